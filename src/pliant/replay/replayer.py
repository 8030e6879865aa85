"""A recorded run, computed again by one process.

Question  How does one script do again what all workers of the recorded run did?
Holds     A ``TrainingLoop`` in the place of ``Worker``. The script's own loop body computes every contribution of every
          worker, each at the point of the weights where it was computed (``ReplayedContributions``), and ``Training``
          makes the updates. Nothing is decided here: the journal says who computed what, and what became of it.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from pliant.core.group_state import FinishedPhase, GroupState, founded
from pliant.core.journal.records import PhaseEndRecord, PolicyRecord
from pliant.core.journal.trace import (
    Agreed,
    Bodies,
    Changed,
    Item,
    Opened,
    PhaseEnded,
    Rewound,
    Segment,
    Trace,
    TracedExchange,
    TracedRound,
    TraceStart,
)
from pliant.core.ledger import MicroBatch
from pliant.core.rounds import Settled
from pliant.core.tickets import Kind, Sums
from pliant.errors import Diverged, UsageError
from pliant.replay import buffers
from pliant.replay.buffers import BufferViews
from pliant.replay.calls import ReplayedCall
from pliant.replay.compare import NAMES, Comparison, refuse_other_call, refuse_other_settings
from pliant.replay.contributions import ReplayedContributions
from pliant.replay.cursor import TraceCursor, start_before
from pliant.replay.findings import EXACT, LOOSE, Findings
from pliant.worker.script.calls import ScriptCall
from pliant.worker.script.hooks import ReplayedHooks, told
from pliant.worker.script.hooks import Update as Told
from pliant.worker.session import JoinRequest, Session
from pliant.worker.snapshot import install_state
from pliant.worker.training import Training


class ReplayOver(SystemExit):
    """Ends the script: the run has been replayed as far as was asked for, or as far as the journal goes."""

    def __init__(self) -> None:
        super().__init__(0)


class Replayer:
    """Stands in for all workers of a run, for one script."""

    leads = False

    def __init__(
        self,
        score: Trace,
        offer: JoinRequest,
        findings: Findings,
        *,
        since: int | None,
        until: int | None,
        weights: Path | None,
    ) -> None:
        self.training: Training = offer.prepared(True)
        self.findings = findings
        self._model = offer.model
        self._carried = offer.carried
        self._until = until
        self._saving = offer.saving(score.run.job)
        self._start = None if since is None else self._found_start(score, since)
        self._reading = TraceCursor(score.items)
        self._exchanging: TracedExchange | None = None
        """the exchange of an ``evaluate`` that is being computed"""
        self._calls: list[ReplayedCall] = []
        self._last: ReplayedCall | None = None
        """the call that the script has just left"""
        self._micro_batch: MicroBatch | None = None
        """the one that was drawn last"""
        self._agreed: PolicyRecord | None = None
        self._limit: tuple[int | None, int | None] = None, None
        self._closed = False
        self._due: Told | None = None
        """an update that has ended its loop: its hooks are called once the loop is drained"""
        self.hooks = ReplayedHooks(self.training)
        findings.exact = all(p.dtype is torch.float64 for p in self.training.parameters)
        findings.tolerance = EXACT if findings.exact else LOOSE
        refuse_other_settings(offer, next((item.record for item in score.items if isinstance(item, Agreed)), None))
        self._policy = offer.policy
        self.group = next(item.group for item in score.items if isinstance(item, Changed))
        self.me = self.group.roster[0]
        self.last_trained: Settled | None = None
        self.applied_rate = self.training.rate
        self._comparison = Comparison(findings, weights)
        self._views = BufferViews(offer.model, self.training)
        self._takes = ReplayedContributions(self.training, self._views, self._comparison)

    def _found_start(self, score: Trace, since: int) -> TraceStart:
        if self._saving is None:
            raise UsageError("--from starts at a checkpoint, but the script calls join without checkpoint=…")
        return start_before(score, since, self._saving.names())

    # -- facts and settings, as ``Worker`` has them

    @property
    def inside(self) -> Kind | None:
        return self._calls[-1].kind if self._calls else None

    def limit(self, samples: int | None, updates: int | None) -> None:
        self._limit = samples, updates

    @property
    def clip_norm(self) -> float | None:
        return self.training.clip_norm

    def set_clip_norm(self, bound: float | None) -> None:
        """Nothing to do: the journal says which bound was in force, and when."""

    def leave_if_late(self) -> None:
        """Nothing to do: a replay takes part from the beginning."""

    def leave(self, reason: str) -> None:
        """Nothing to do: the journal says which worker left, and when."""

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """The micro-batches that will be drawn next in the innermost call."""
        return self._reading.upcoming(self._calls[-1].phase)

    # -- what the script calls

    def open(self, call: ScriptCall) -> int | FinishedPhase:
        """Enter the phase that the run opened next. Raises ``Diverged`` if the script opens another one."""
        self.hooks.refuse("evaluate" if call.kind is Kind.EVALUATE else "batches")
        self._leave_body()
        for item in self._rest():
            match item:
                case Opened():
                    self._enter(call, item)
                    return self._passed_by(item, self._start) if self._start is not None else item.record.phase
                case Bodies() if not item.stretches:
                    pass
                case Bodies() | TracedRound() | TracedExchange():
                    raise Diverged(
                        f"the script calls {NAMES[call.kind]} after round {self.group.round}, where the run went on "
                        "with the loop it was in"
                    )
                case _:
                    self._pass(item)
        raise AssertionError("unreachable")

    def draw(self, phase: int) -> MicroBatch | None:
        """The next micro-batch that some worker computed in ``phase``."""
        self._leave_body()
        call = self._calls[-1]
        if call.over:
            return None
        if self._reading.is_under_way:
            return self._drawn()
        self._complete_exchange()
        for item in self._rest():
            match item:
                case Bodies():
                    self._reading.lay_out(item.stretches)
                case TracedExchange():
                    self._reading.lay_out(Segment(part, part.micro_batches, ahead=False) for part in item.parts)
                    self._exchanging = item
                    if not self._reading.is_laid_out:
                        self._complete_exchange()
                case TracedRound():
                    self._update(item)
                case Opened():
                    self._pass_over_evaluate(item)
                case _:
                    self._pass(item)
                    if isinstance(item, PhaseEnded) and item.record.phase == phase:
                        return None
            if self._reading.is_laid_out:
                return self._drawn()
        raise AssertionError("unreachable")

    def contribute(
        self, weight: float, loss_sum: Tensor | float, compute: Callable[[None], None], *, whole: bool
    ) -> None:
        """Have the gradients of a drawn micro-batch computed."""
        try:
            compute(None)
        except Exception:
            assert self._reading.part is not None
            self._takes.leave_out(self._reading.part)
            self._reading.computed = True
            raise
        self.contributed(weight, loss_sum)

    @property
    def may_repeat(self) -> bool:
        return True

    def contributed(
        self, weight: float, loss_sum: Tensor | float, sums: Sums = (), output: bytes | None = None
    ) -> None:
        """A drawn micro-batch is computed; its gradients lie in the buffer."""
        part, call = self._reading.part, self._calls[-1]
        assert part is not None
        self._takes.add(part, weight, loss_sum)
        self._reading.computed = True
        call.measured(sums)
        if output is not None and self._micro_batch is not None:
            call.outputs.append((self._micro_batch, output))

    def step(self) -> bool:
        """Make the update that comes next, if a loop body of the run saw it."""
        if self.inside is not Kind.TRAIN or self._reading.is_under_way:
            return False
        following = next(self._reading.to_come(), None)
        if not isinstance(following, TracedRound):
            return False
        self._leave_body()
        next(self._reading.rest())
        self._update(following)
        return following.outcome.seen

    def abandon(self, phase: int) -> None:
        """The script has left its loop early: all of the phase must have been computed."""
        unreached = self._reading.is_under_way or not self._reading.computed
        self._leave_body()
        for item in self._rest() if not self._calls[-1].over else ():
            if unreached or (isinstance(item, Bodies) and item.stretches):
                raise Diverged(
                    f"the script leaves its loop after round {self.group.round}, where workers of the run computed on: "
                    "replay runs one script for all of them, so let `break` depend on what is the same on all workers "
                    "right after run.step() has returned True (run.round, run.samples, a result of evaluate)"
                )
            if isinstance(item, TracedRound):
                self._update(item)
            elif not isinstance(item, Bodies):
                self._pass(item)
            if isinstance(item, PhaseEnded) and item.record.phase == phase:
                break
        self.left()

    def left(self) -> FinishedPhase | None:
        """The script is out of its innermost call: how that ended."""
        self._last = call = self._calls.pop()
        return call.finished

    def note_progress(self) -> None:
        """Nothing to do: no other worker waits."""

    def busy(self, what: str, seconds: float | None) -> AbstractContextManager[None]:
        """Nothing to do: no other worker waits."""
        return nullcontext()

    def gathered(self, phase: int, *, everywhere: bool) -> list[tuple[MicroBatch, bytes]] | None:
        """The outputs of the ``evaluate`` that has just ended; only if wanted everywhere: a replay has no leader."""
        call, self._last = self._last, None
        return call.outputs if everywhere and call is not None and call.phase == phase else None

    def end(self) -> None:
        """The script has come to its end."""
        if self._closed:
            return
        for item in self._reading.to_come():
            if isinstance(item, TracedRound | Opened) or (isinstance(item, Bodies) and item.stretches):
                raise Diverged(f"the script ends after round {self.group.round}, where the run went on")
        self.findings.complete = True
        self._comparison.weights(self._model, self.training, self.group.round)

    def finished(self) -> None:
        """The script is at its end; a replay writes no checkpoints."""

    def close(self) -> None:
        """Give the optimizer back."""
        if not self._closed:
            self._closed = True
            self.training.close()

    # -- the journal's items

    def _rest(self) -> Iterator[Item]:
        """The items from here on; ends the script at the end of the journal."""
        yield from self._reading.rest()
        self._stop()

    def _complete_exchange(self) -> None:
        item, self._exchanging = self._exchanging, None
        if item is not None:
            self._exchanged(item)

    def _pass(self, item: Item) -> None:
        match item:
            case Agreed():
                self._agreed = item.record
            case Changed():
                self._change(item)
            case Rewound():
                self._rewind(item)
            case PhaseEnded():
                self._end_phase(item.record, item.group)
            case _:
                raise AssertionError(item)

    def _stop(self) -> None:
        """End the script, at the end of the journal or where the user wants."""
        self._comparison.weights(self._model, self.training, self.group.round)
        raise ReplayOver

    def _change(self, item: Changed) -> None:
        group = item.group
        self._views.change(group)
        self.group = group
        self.me = group.roster[0]

    def _rewind(self, item: Rewound) -> None:
        """A worker has read the present state from a checkpoint; drop what was computed since."""
        self._takes.forget()
        self.group = item.group
        self.me = item.group.roster[0]
        # Inside an ``evaluate`` the model shows the merged values already.
        self._views.begin_anew([self.me], shown=self.inside is Kind.EVALUATE)

    def _enter(self, call: ScriptCall, item: Opened) -> None:
        record = item.record
        # The run's policy says how the order that is compared is made.
        self.group = item.group
        refuse_other_call(call, self._limit, record, self._agreed)
        self._calls.append(ReplayedCall(call.kind, record.phase))
        if call.kind is Kind.TRAIN:
            self._views.begin(self.training.buffers.training_bits())

    def _passed_by(self, opened: Opened, start: TraceStart) -> int | FinishedPhase:
        """Go to the end of a phase that began before the checkpoint, or to the checkpoint, without a computation."""
        for item in self._reading.up_to(start.item):
            if isinstance(item, Agreed):
                self._agreed = item.record
            elif not isinstance(item, Bodies):
                self.group = item.group
            if isinstance(item, PhaseEnded) and item.record.phase == opened.record.phase:
                call = self._calls.pop()
                results = item.record.results or None
                return FinishedPhase(call.kind, opened.record.epoch, item.record.result, results=results)
        self._begin_at(start)
        return opened.record.phase

    def _begin_at(self, start: TraceStart) -> None:
        """Install the state of the checkpoint: the script is where it was written."""
        assert self._saving is not None
        self._start = None
        asked = founded(self._policy, self.group.era, self.group.roster)
        found = self._saving.restored([start.checkpoint.name], self.training, self._carried, asked)
        there, here = found.handed.group, self.group
        if (there.era, there.exchange, there.round) != (here.era, here.exchange, here.round):
            raise Diverged(f"checkpoint {start.checkpoint.name} is not of this journal")
        if found.users_state is not None:
            install_state(self._carried["state"], found.users_state)
        self._views.grow(found.handed.live)
        self._views.begin_anew(buffers.holders(here), shown=False)
        self.me = here.roster[0]
        self.findings.first_round = here.round + 1

    def _pass_over_evaluate(self, item: Opened) -> None:
        """Pass over an ``evaluate`` of the run that the script does not make: the weights do not depend on it."""
        if item.record.task != "evaluate":
            raise Diverged(f"the run opened another loop over batches after round {self.group.round}")
        for passed in self._rest():
            if isinstance(passed, Changed | Rewound):
                self._pass(passed)
            if isinstance(passed, PhaseEnded) and passed.record.phase == item.record.phase:
                self.group = passed.group
                return

    def _end_phase(self, record: PhaseEndRecord, group: GroupState) -> None:
        call = next((call for call in self._calls if call.phase == record.phase), None)
        self.group = group
        if call is None:
            return
        call.end(record)
        if call.kind is Kind.TRAIN:
            self._takes.forget()
            self._views.drain(group)
            self.me = group.roster[0]
            self._follow_update()
            return
        self.findings.evaluations += 1
        call.compare(self._comparison, record, group.round)
        if record.result is not None and not group.open and not group.past.ended_inside:
            self.training.evaluated(record.result)

    def _exchanged(self, item: TracedExchange) -> None:
        """All of an exchange of an ``evaluate`` is computed."""
        call = self._calls[-1]
        for part in item.parts:
            total, count = self._takes.evaluated(part)
            call.total, call.count = call.total + total, call.count + count
            self._comparison.evaluated(part, total, count, self.group.round)
        self.group = item.group

    # -- loop bodies and updates

    def _drawn(self) -> MicroBatch:
        stretch = self._reading.begun()
        if stretch is not None:
            self.me = stretch.part.worker
            if self.inside is Kind.EVALUATE:
                self._takes.begin_evaluating(stretch.part)
            else:
                self._takes.begin(stretch, self.group)
        self._micro_batch = self._reading.drawn()
        return self._micro_batch

    def _leave_body(self) -> None:
        """The script's loop body has run."""
        if self._reading.leave_body() and self.inside is not Kind.EVALUATE:
            self.training.back()

    def _update(self, item: TracedRound) -> None:
        """Make the update of a round, as all members did when it was settled."""
        rates = self.training.rates(item.outcome.factor)
        self.applied_rate = self._takes.apply(item, self.group)
        self.group, self.last_trained = item.group, item.outcome
        self.findings.rounds += 1
        self.findings.last_round = item.record.round
        self.me = item.group.roster[0]
        self._views.show(buffers.holders(item.group)[0])
        if self._until is not None and item.record.round >= self._until:
            self._stop()
        if item.outcome.applied:
            self._due = told(item.outcome, item.group, self.training.grad_norm, rates)
            if not item.outcome.ended:
                self._follow_update()

    def _follow_update(self) -> None:
        """Call the script's hooks for the last update, if that is due."""
        update, self._due = self._due, None
        if update is not None:
            self.hooks.call(update)


def enrolled(
    offer: JoinRequest, score: Trace, findings: Findings, *, since: int | None, until: int | None, weights: Path | None
) -> Session:
    """The session of a script that is replayed.

    since     start from the last checkpoint up to this round; None: from the beginning
    until     stop after this round; None: at the end of the journal
    weights   a file of final weights to compare with
    """
    player = Replayer(score, offer, findings, since=since, until=until, weights=weights)
    return Session(player, None, offer.carried)
