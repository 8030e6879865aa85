"""What ``Run`` may expect of a ``TrainingLoop``: of a worker alone, in a job, in a group, and of a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.coordinator.run_spec import RunSpec
from pliant.core.group_state import FinishedPhase, founded
from pliant.core.journal import records as journal
from pliant.core.journal.trace import score
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.tickets import Kind
from pliant.errors import Diverged
from pliant.replay import replayer
from pliant.replay.findings import Findings
from pliant.replay.replayer import Replayer
from pliant.tensors.process_group.gloo import Alone
from pliant.testing import Together, together
from pliant.types import WorkerId
from pliant.worker import session
from pliant.worker.elastic.enrolment import Solo
from pliant.worker.elastic.signature import signature, summary
from pliant.worker.journal import JournalReporter
from pliant.worker.loop import Worker
from pliant.worker.script.calls import Counted, ScriptCall
from pliant.worker.script.training_loop import TrainingLoop
from pliant.worker.session import JoinRequest, Session

LOOPS: list[type[TrainingLoop]] = [Worker, Replayer]
"""All implementations: the type checker finds what one of them lacks."""

LENGTH, BATCH, SIZE, RATE = 24, 8, 4, 0.05


# -- scripts, written with nothing but a ``TrainingLoop``


@dataclass
class Script:
    """One worker's script."""

    loop: TrainingLoop
    model: nn.Module
    batch: int = BATCH
    drawn: list[MicroBatch] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    """the rounds after which ``step`` said True"""

    def open(self, kind: Kind, epoch: int = 0) -> int:
        phase = self.loop.open(ScriptCall(kind, epoch, Counted(LENGTH, int(kind)), SIZE, 0))
        assert isinstance(phase, int)
        assert self.loop.inside is kind
        return phase

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """Of samples that are made of their positions."""
        positions = [position for start, stop in micro_batch for position in range(start, stop)]
        x = torch.tensor([[float(position), 1.0] for position in positions], dtype=torch.float64) / LENGTH
        return (self.model(x) - x.sum(1, keepdim=True)).pow(2).mean()

    def contribute(self, micro_batch: MicroBatch) -> None:
        loss, weight, training = self.loss(micro_batch), float(samples_of(micro_batch)), self.loop.training
        self.loop.contribute(
            weight, loss.detach() * weight, lambda ready: training.backward(loss, weight, ready), whole=True
        )

    def body(self, micro_batch: MicroBatch) -> bool:
        """One loop body; whether it has seen an update."""
        self.drawn.append(micro_batch)
        self.loop.note_progress()
        self.contribute(micro_batch)
        before = self.loop.group.round
        updated = self.loop.step()
        if updated:
            assert self.loop.group.round > before
            assert self.loop.last_trained is not None and self.loop.last_trained.applied
            assert self.loop.applied_rate == RATE
            self.updates.append(self.loop.group.round)
        return updated

    def epoch(self, number: int) -> FinishedPhase | None:
        phase = self.open(Kind.TRAIN, number)
        while (micro_batch := self.loop.draw(phase)) is not None:
            self.body(micro_batch)
        assert self.loop.draw(phase) is None, "it may be asked again"
        ended = self.loop.left()
        self.loop.training.end_epoch(number)
        return ended

    def evaluate(self) -> tuple[FinishedPhase | None, list[tuple[MicroBatch, bytes]]]:
        with torch.no_grad(), self.loop.training.plain():
            phase = self.open(Kind.EVALUATE)
            while (micro_batch := self.loop.draw(phase)) is not None:
                count = float(samples_of(micro_batch))
                total = float(sum(position for start, stop in micro_batch for position in range(start, stop)))
                self.loop.contributed(count, total, (("loss", total, count),), str(micro_batch).encode())
                self.loop.step()
            ended = self.loop.left()
            gathered = self.loop.gathered(phase, everywhere=True)
        assert gathered is not None
        assert self.loop.gathered(phase, everywhere=True) in (None, []), "it is given once"
        return ended, gathered


Said = list[Any]
"""what the members of a group say afterwards, for a comparison"""


def each_sample_comes_once(script: Script) -> Said:
    for number in range(2):
        ended = script.epoch(number)
        assert ended is not None and ended.kind is Kind.TRAIN
        assert script.loop.inside is None
        assert script.loop.group.samples == (number + 1) * LENGTH
        assert script.loop.group.updates == (number + 1) * LENGTH // BATCH
    return [script.drawn, script.updates]


def upcoming_is_what_comes(script: Script) -> Said:
    phase = script.open(Kind.TRAIN)
    while (micro_batch := script.loop.draw(phase)) is not None:
        upcoming = script.loop.upcoming()
        assert micro_batch not in upcoming
        assert all(samples_of(each) <= SIZE for each in upcoming)
        script.body(micro_batch)
    script.loop.left()
    return [script.drawn, script.updates]


def an_evaluate_inside_gives_the_mean_and_all_outputs(script: Script) -> Said:
    phase = script.open(Kind.TRAIN)
    seen = 0
    while (micro_batch := script.loop.draw(phase)) is not None:
        if script.body(micro_batch):
            seen += 1
            ended, gathered = script.evaluate()
            assert ended is not None and ended.kind is Kind.EVALUATE
            assert ended.result == (LENGTH - 1) / 2
            assert ended.results == {"loss": (LENGTH - 1) / 2}
            positions = sorted(p for mb, _ in gathered for start, stop in mb for p in range(start, stop))
            assert positions == list(range(LENGTH))
            assert all(output == str(mb).encode() for mb, output in gathered)
            assert script.loop.inside is Kind.TRAIN
    assert script.loop.left() is not None
    assert seen == len(script.updates) > 0
    return [script.drawn, script.updates]


def what_is_abandoned_ends_for_all(script: Script) -> Said:
    phase = script.open(Kind.TRAIN)
    while (micro_batch := script.loop.draw(phase)) is not None:
        if script.body(micro_batch):
            script.loop.training.back()
            script.loop.abandon(phase)
            break
    assert script.loop.inside is None
    assert not script.loop.training.ahead
    samples = script.loop.group.samples
    assert BATCH <= samples < LENGTH
    second = script.open(Kind.TRAIN, 1)
    assert second > phase
    while (micro_batch := script.loop.draw(second)) is not None:
        script.body(micro_batch)
    assert script.loop.left() is not None
    assert script.loop.group.samples == samples + LENGTH
    return [script.drawn, script.updates]


class OutOfMemory(Exception):
    """What a backward pass raises."""


def a_pass_that_fails_may_be_tried_again(script: Script) -> Said:
    def fail(ready: object) -> None:
        raise OutOfMemory

    phase = script.open(Kind.TRAIN)
    failed = False
    while (micro_batch := script.loop.draw(phase)) is not None:
        if not failed:
            failed = True
            weight = float(samples_of(micro_batch))
            with pytest.raises(OutOfMemory):
                script.loop.contribute(weight, 0.0, fail, whole=False)
            assert script.loop.may_repeat
        script.body(micro_batch)
    assert script.loop.left() is not None
    assert script.loop.group.updates == LENGTH // BATCH
    return [script.drawn, script.updates]


def facts_and_settings(script: Script) -> Said:
    loop = script.loop
    assert loop.me in loop.group.roster
    assert loop.inside is None and loop.last_trained is None
    assert loop.applied_rate == RATE
    assert loop.clip_norm is None
    loop.set_clip_norm(None)
    with loop.busy("saving", None):
        assert not loop.training.stepping
    loop.limit(LENGTH, None)
    script.epoch(0)
    assert loop.group.samples == LENGTH
    loop.leave_if_late()
    return [script.drawn, script.updates]


PROMISES: list[Callable[[Script], Said]] = [
    each_sample_comes_once,
    upcoming_is_what_comes,
    an_evaluate_inside_gives_the_mean_and_all_outputs,
    what_is_abandoned_ends_for_all,
    a_pass_that_fails_may_be_tried_again,
    facts_and_settings,
]

promises = pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)


# -- who carries them out


def played(promise: Callable[[Script], Said], join: Callable[..., pliant.Run]) -> tuple[Said, list[float]]:
    """What one worker's script says, and the weights that it ends with."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    with join(model, optimizer, batch=BATCH, delay=0) as run:
        said = promise(Script(run._worker, model))
    # The optimizer is the script's own again.
    run._worker.close()
    optimizer.step()
    return said, [float(value) for p in model.parameters() for value in p.detach().flatten()]


class Lines:
    """Where a journal's lines go."""

    sends_lines = True

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        self.kept += lines

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None: ...

    def unwritten(self) -> list[bytes]:
        return []

    def send_lines_again(self) -> None: ...


def journaled(lines: Lines) -> Callable[[JoinRequest], Session]:
    """The only worker of a job."""

    def enroll(offer: JoinRequest) -> Session:
        described = signature(offer.model, offer.optimizer, offer.agreed)
        witness = JournalReporter(lines, described.settings, summary(described))
        group = founded(offer.policy, 1, (WorkerId("w0"),))
        witness.era(group, None, sends=True)
        worker = Worker(WorkerId("w0"), group, Alone(), offer.prepared(True), witness, Solo(), carried=offer.carried)
        return Session(worker, None, offer.carried)

    return enroll


def appointed(enroll: Callable[[JoinRequest], Session]) -> Callable[..., pliant.Run]:
    def join(*arguments: Any, **settings: Any) -> pliant.Run:
        with session.appointed(enroll):
            return pliant.join(*arguments, **settings)

    return join


@promises
def test_alone(promise: Callable[[Script], Said]) -> None:
    played(promise, pliant.join)


@promises
def test_in_a_group_over_gloo(promise: Callable[[Script], Said]) -> None:
    def script(handle: Together) -> tuple[Said, list[float]]:
        return played(promise, handle.join)

    members: list[tuple[Said, list[float]]] = together(2, script)
    assert members[0][1] == members[1][1], "they end with the same weights"


@promises
def test_in_a_job_and_again_in_a_replay(promise: Callable[[Script], Said]) -> None:
    """The same script over the same interface: what the replay says is what the worker said."""
    lines = Lines()
    in_job = played(promise, appointed(journaled(lines)))
    run = RunSpec("job", "script.py", "0").record(0.0)
    trace = score([run, *(journal.decode(line) for line in lines.kept)])
    findings = Findings()

    def enroll(offer: JoinRequest) -> Session:
        return replayer.enrolled(offer, trace, findings, since=None, until=None, weights=None)

    assert played(promise, appointed(enroll)) == in_job
    assert findings.complete and findings.exact and findings.agrees
    assert findings.rounds > 0 and findings.first is None


def test_a_replay_refuses_another_script() -> None:
    lines = Lines()
    played(each_sample_comes_once, appointed(journaled(lines)))
    trace = score([RunSpec("job", "script.py", "0").record(0.0), *(journal.decode(line) for line in lines.kept)])

    def enroll(offer: JoinRequest) -> Session:
        return replayer.enrolled(offer, trace, Findings(), since=None, until=None, weights=None)

    with pytest.raises(Diverged, match="the script leaves its loop after round 1"):
        played(what_is_abandoned_ends_for_all, appointed(enroll))
