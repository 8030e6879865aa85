"""A script in threads, and what must come of it.

Question  Does Pliant train as the script says, alone and in a group?
Holds     Always: the same state on all workers bit for bit, each sample once per epoch or cut by a break. The weights
          are those of a plain PyTorch loop over the same rounds.
Source    ours; invariants 2, 3, 4 and 7 of the design.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pliant.core.rounds import Settled
from pliant.core.tickets import Kind
from pliant.errors import PliantError
from pliant.testing.habits.kit import kit_of
from pliant.testing.habits.reference import Reference, ScriptMismatch, compare, tolerance
from pliant.testing.habits.script import Diary, DrawnScript
from pliant.testing.habits.values import EVALUATE, Habits
from pliant.testing.threads import Together, WorkerRecord, together

LIMIT_S = 60.0
"""Far above what any of these takes; only a hang reaches it."""


def checked(habits: Habits, directory: Path) -> None:
    """Run the script; raises ``ScriptMismatch`` where the outcome is not as it must be, or what the script raised."""
    try:
        diaries, records = ran(habits, directory)
    except PliantError as error:
        if any(words in str(error) for words in refusals(habits)):
            return
        raise
    compare_workers(diaries, records, alone=habits.does("freeze alone"))
    count_gathered(habits, diaries)
    count_positions(habits, records[0].outcomes)
    expected = Reference(habits, diaries, records[0]).run()
    for name, p in expected.named():
        kept = name if name.startswith("outside.") else f"model.{name}"
        compare(kept, diaries[0].state[kept], p.detach(), tolerance(habits))


def refusals(habits: Habits) -> list[str]:
    """What a script may be told that does what the others cannot follow; it may be over before that is noticed."""
    told: list[str] = []
    if habits.workers == 1:
        return told
    if habits.does("freeze alone"):
        told.append("must happen on every worker at the same update")
    if habits.does("break alone") and habits.delay != 0 and not habits.inside and habits.does(*EVALUATE):
        # The tickets of the round in flight do not tell of the break yet: at its update the others are in the body of
        # the loop and evaluate without the worker that has left it. That one makes its next call a round later.
        told += ["call batches and evaluate on every worker", "make sure that no worker skips or repeats calls"]
    return told


def ran(habits: Habits, directory: Path) -> tuple[list[Diary], list[WorkerRecord]]:
    """What every worker did and settled."""
    own = Path(tempfile.mkdtemp(dir=directory))
    # torch's generators belong to the process: made one after the other, each with other weights.
    kits = [kit_of(habits, place) for place in range(habits.workers)]

    def script(handle: Together) -> tuple[Diary, WorkerRecord]:
        return DrawnScript(kits[handle.place], handle.place, handle.join, own).train(), handle.record

    paces = habits.paces if len(habits.paces) == habits.workers else None
    results: list[Any] = together(habits.workers, script, paces=paces, timeout_s=LIMIT_S)
    return [diary for diary, _ in results], [record for _, record in results]


def compare_workers(diaries: Sequence[Diary], records: Sequence[WorkerRecord], *, alone: bool = False) -> None:
    """The same rounds, results and final state everywhere; changes too, unless one worker makes its own."""
    first, record = diaries[0], records[0]
    for place, (diary, other) in enumerate(zip(diaries[1:], records[1:], strict=True), start=1):
        if other.outcomes != record.outcomes:
            raise ScriptMismatch(f"worker {place} settled other rounds than worker 0")
        # A spare is told of no update in the body of the loop.
        here, there = dict(diary.results), dict(first.results)
        if any(here[number] != there[number] for number in here.keys() & there.keys()):
            raise ScriptMismatch(f"worker {place} evaluated {diary.results}, worker 0 {first.results}")
        compare_gathered(place, diary, first)
        if diary.changes != first.changes and not alone:
            raise ScriptMismatch(f"worker {place} changed {diary.changes}, worker 0 {first.changes}")
        if diary.state.keys() != first.state.keys():
            raise ScriptMismatch(f"worker {place} has {sorted(diary.state.keys() ^ first.state.keys())} more or less")
        for name, value in first.state.items():
            if not torch.equal(value, diary.state[name]):
                largest = (value - diary.state[name]).abs().max()
                raise ScriptMismatch(f"{name} differs between worker {place} and worker 0 by {float(largest):.3g}")


def compare_gathered(place: int, diary: Diary, first: Diary) -> None:
    """Outputs of all samples are the same where two workers have those of one call.

    Another call at the same update is dealt anew: in other micro-batches the last digit may be another one.
    """
    there = {(each.round, each.event): each.outputs for each in first.gathered}
    for each in diary.gathered:
        other = there.get((each.round, each.event))
        if each.outputs is None or other is None:
            continue
        if not all(torch.equal(a, b) for a, b in zip(each.outputs, other, strict=True)):
            raise ScriptMismatch(f"worker {place} gathered other outputs after round {each.round} than worker 0")


def count_gathered(habits: Habits, diaries: Sequence[Diary]) -> None:
    """Somebody has the outputs; all have, where everybody wants them."""
    for number, event in {(each.round, each.event) for diary in diaries for each in diary.gathered}:
        told = [each for diary in diaries for each in diary.gathered if (each.round, each.event) == (number, event)]
        having = sum(each.outputs is not None for each in told)
        if not having or (habits.events[event].what == "gather everywhere" and having < len(told)):
            raise ScriptMismatch(f"of {len(told)} workers {having} have the outputs gathered after round {number}")


def count_positions(habits: Habits, outcomes: Sequence[Settled]) -> None:
    """Each position of a phase once: in a round, or cut."""
    phases = sorted({outcome.phase for outcome in outcomes if outcome.kind is Kind.TRAIN})
    if habits.steps:
        made = sum(outcome.applied for outcome in outcomes if outcome.kind is Kind.TRAIN)
        if made != habits.steps:
            raise ScriptMismatch(f"{made} updates were made, the script asks for {habits.steps}")
    elif len(phases) != habits.epochs:
        raise ScriptMismatch(f"there were {len(phases)} loops over batches, the script has {habits.epochs}")
    for phase in phases:
        rounds = [outcome for outcome in outcomes if outcome.phase == phase]
        spent = [span for outcome in rounds for member in outcome.spans for span in member]
        cut = [span for outcome in rounds for span in outcome.cut]
        may_be_cut = habits.does("break", "break alone") or (habits.steps and phase == phases[-1])
        if cut and not may_be_cut:
            raise ScriptMismatch(f"positions {cut} were cut though nobody broke the loop")
        positions = sorted(position for start, stop in (*spent, *cut) for position in range(start, stop))
        if positions != list(range(habits.samples)):
            raise ScriptMismatch(f"phase {phase} went over positions {positions} of {habits.samples}")
