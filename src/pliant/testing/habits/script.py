"""The one training script that has all habits.

Question  What does a script with these habits do, line by line?
Holds     It is written as users write: everything is said through ``join`` and ``Run``. What it draws and when it does
          what it does once is written down in a diary, for whoever computes it again.
Source    ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pliant
from pliant.run import Run
from pliant.testing.habits.kit import Batch, Kit, KitSamples, change
from pliant.testing.habits.values import CLIP, FOLLOW, GATHER, SAMPLE, SET, UPDATE, Event, What

TESTED = 10
"""samples that ``evaluate`` goes over"""

BOUND = 0.02
"""what the gradient's norm is clipped to in mid-run"""

_SLOW_S = 0.02
"""A slow save among threads: longer than a round, so the others stand at the next one meanwhile."""
_USUAL_S = 60.0
"""what the script says of how long it takes: so long that waiting would not pay"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A micro-batch in the body of the loop."""

    indices: tuple[int, ...]
    weight: float
    trained: frozenset[str]
    """which parameters were trained when it was computed"""
    infinite: bool = False
    failed: bool = False
    """its backward pass did not come to its end"""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What one call of ``evaluate`` has gathered."""

    round: int
    event: int
    """which event of the script it was"""
    outputs: list[Tensor] | None
    """in the order of the dataset; None: they are another worker's"""


@dataclass
class Diary:
    """What one worker's script has done."""

    drawn: dict[int, list[Drawn]] = field(default_factory=dict)
    """by epoch"""
    changes: list[tuple[int, Event]] = field(default_factory=list)
    """(round, change of the trained set)"""
    opened: list[frozenset[str]] = field(default_factory=list)
    """what was trained at the beginning of each epoch"""
    results: list[tuple[int, float]] = field(default_factory=list)
    """(round, result of evaluate)"""
    gathered: list[Gathered] = field(default_factory=list)
    bounds: list[tuple[int, float | None]] = field(default_factory=list)
    """(round, bound on the gradient's norm that was set after it)"""
    saved: list[tuple[int, Path]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    """rounds after which ``step`` said True"""
    state: dict[str, Tensor] = field(default_factory=dict)


class _Exhausted(torch.autograd.Function):
    """A layer whose backward pass does not fit into memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")


class DrawnScript:
    """One worker's part."""

    def __init__(self, kit: Kit, place: int, join: Callable[..., Run], directory: Path) -> None:
        self.kit = kit
        self.habits = kit.habits
        self.diary = Diary()
        self._place = place
        self._join = join
        self._directory = directory
        self._broke = False
        self._samples = KitSamples(self.habits, self.habits.samples)
        self._tests = KitSamples(self.habits, TESTED, seed=2)
        self.at_micro_batch: Callable[[Run], None] = lambda run: None
        """called in the body of the loop, before anything is computed"""
        self.pause: Callable[[Run], None] = lambda run: time.sleep(_SLOW_S)
        """what takes long in a slow save"""

    def train(self) -> Diary:
        """The script."""
        kit, habits = self.kit, self.habits
        with self._join(kit.model, kit.optimizer, **settings(kit)) as run:
            if habits.hooks or habits.inside:
                run.on_update(lambda update: self._follow(run))
            for epoch in run.epochs(steps=habits.steps) if habits.steps else run.epochs(habits.epochs):
                self._epoch(run, epoch)
                self._change(run)
                if habits.evaluates:
                    self._evaluate(run)
            self.diary.state = kit.state()
        return self.diary

    def _epoch(self, run: Run, epoch: int) -> None:
        drawn = self.diary.drawn.setdefault(epoch, [])
        self.diary.opened.append(self.kit.trained())
        size = self.habits.sizes[self._place % len(self.habits.sizes)]
        for batch in run.batches(self._samples, size=size, num_workers=self.habits.loaders):
            self.at_micro_batch(run)
            if not self._compute(run, batch, drawn) and self.habits.skips:
                continue
            if run.step():
                self.diary.updates.append(run.round)
                if not self.habits.hooks:
                    self._average()
                self._change(run)
                if self._act(run, UPDATE - FOLLOW if self.habits.inside else UPDATE):
                    break
            if self._breaks_alone(run):
                break

    def _follow(self, run: Run) -> None:
        """The function of ``on_update``."""
        if self.habits.hooks:
            self._average()
        if self.habits.inside:
            self._act(run, FOLLOW)

    def _average(self) -> None:
        if self.kit.ema is not None:
            self.kit.ema.update_parameters(self.kit.model)  # type: ignore[operator]

    def _compute(self, run: Run, batch: Batch, drawn: list[Drawn]) -> bool:
        """The gradients of a micro-batch; one that does not fit into memory is passed over: False."""
        loss, weight = self.kit.loss(batch)
        indices = tuple(batch[3].tolist())
        happens = {event.what for event in self.habits.events if event.what in SAMPLE and event.at in indices}
        if "inf" in happens:
            loss = loss * float("inf")
        if "oom" in happens:
            loss = _Exhausted.apply(loss)
        drawn.append(Drawn(indices, weight, self.kit.trained(), "inf" in happens, "oom" in happens))
        try:
            run.backward(loss, weight=weight if self.habits.tokens else None)
        except torch.OutOfMemoryError:
            return False
        return True

    def _breaks_alone(self, run: Run) -> bool:
        """Whether this worker leaves its loop by itself, once."""
        events = self.habits.events
        due = any(e.what == "break alone" and e.place == self._place and e.at <= run.round for e in events)
        breaks, self._broke = due and not self._broke, self._broke or due
        return breaks

    def _due(self, run: Run, kind: frozenset[What]) -> dict[int, Event]:
        """What all workers do now. Which of it is done travels with the state: a newcomer does nothing twice."""
        due: dict[int, Event] = {}
        for number, event in enumerate(self.habits.events):
            if event.what in kind and event.at <= run.round and not run.state["done"] >> number & 1:
                run.state["done"] |= 1 << number
                due[number] = event
        return due

    def _change(self, run: Run) -> None:
        """Change the trained set, at an update or between epochs."""
        for event in self._due(run, SET).values():
            if event.what == "freeze alone" and event.place != self._place:
                continue
            self.diary.changes.append((run.round, event))
            change(self.kit, event)

    def _act(self, run: Run, kind: frozenset[What]) -> bool:
        """All workers are at the same update now; whether they leave the loop."""
        due = self._due(run, kind)
        for number, event in due.items():
            if event.what in ("save", "slow save"):
                self._save(run, event)
            elif event.what in CLIP:
                run.clip_norm = BOUND if event.what == "clip" else None
                self.diary.bounds.append((run.round, run.clip_norm))
            elif event.what in GATHER:
                self._gather(run, number, everywhere=event.what == "gather everywhere")
            elif event.what != "break":
                for _ in range(2 if event.what == "evaluate twice" else 1):
                    self._evaluate(run)
        return any(event.what == "break" for event in due.values())

    def _save(self, run: Run, event: Event) -> None:
        path = self._directory / f"round-{run.round}.safetensors"
        self.diary.saved.append((run.round, path))
        if event.what == "slow save" and event.place == self._place:
            with run.busy("saving", _USUAL_S):
                self.pause(run)
                run.save(path)
        else:
            run.save(path)

    def _gather(self, run: Run, event: int, *, everywhere: bool) -> None:
        found = run.evaluate(self._predict, self._tests, size=3, gather=True, everywhere=everywhere)
        if found is not None and [each["index"] for each in found] != list(range(TESTED)):
            raise AssertionError(f"the outputs gathered are those of samples {[each['index'] for each in found]}")
        outputs = None if found is None else [each["outputs"] for each in found]
        self.diary.gathered.append(Gathered(run.round, event, outputs))

    def _predict(self, batch: Batch) -> dict[str, Any]:
        return {"outputs": self.kit.outputs(batch), "index": batch[3].tolist()}

    def _evaluate(self, run: Run) -> None:
        self.diary.results.append((run.round, run.evaluate(self._measure, self._tests, size=3)))

    def _measure(self, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(self.kit.outputs(batch), batch[1], reduction="sum"), len(batch[1])


def settings(kit: Kit) -> dict[str, Any]:
    """What the script gives to ``join``."""
    habits = kit.habits
    given: dict[str, Any] = {
        "batch": pliant.Floating(reference=habits.batch) if habits.floating else habits.batch,
        "delay": habits.delay,
        "correction": habits.correction,
        "clip_norm": habits.clip,
        "state": {"done": 0} if kit.ema is None else {"done": 0, "ema": kit.ema},
    }
    if kit.scheduler is not None:
        given |= {"scheduler": kit.scheduler, "schedule_by": "epoch" if habits.schedule == "epoch" else "batch"}
    if habits.checkpoints:
        given |= {"checkpoint": "checkpoints", "checkpoint_every": 0.1}
    if habits.scaler:
        given["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    return given
