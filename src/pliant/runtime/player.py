"""A recorded run, computed again by one process.

Question  Do the script and the journal lead to the numbers that the workers had?
Holds     It stands in for ``Worker``: the script's own loop body computes every contribution of every worker, each at
          the point where it was computed, and ``Training`` makes the updates. Nothing is decided here: who computed
          what, and what became of it, is the journal's. What each ticket says is compared as it is reached, so the
          first difference has a round and a worker.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pliant.core.group import Group, Past, founded
from pliant.core.journal import PhaseEndRecord, PolicyRecord
from pliant.core.ledger import MicroBatch
from pliant.core.rounds import Settled
from pliant.core.score import (
    Agreed,
    Bodies,
    Changed,
    Ended,
    Exchange,
    Opened,
    Part,
    Rewound,
    Score,
    Start,
    Stretch,
    Update,
)
from pliant.core.tickets import Flag, Kind
from pliant.errors import Diverged, UsageError
from pliant.runtime import views
from pliant.runtime.findings import EXACT, LOOSE, Difference, Findings, of_weights
from pliant.runtime.membership import Membership, Offer, signature, summary
from pliant.runtime.script import Opening
from pliant.runtime.takeover import install_state
from pliant.runtime.update import Training
from pliant.runtime.views import Handing, Views
from pliant.tensors.gradients import Buffer

# What the loader may read in advance.
_AHEAD = 64
# A loss per sample, or a norm, below this is compared as if it were this: nothing is left of it but rounding.
_LEAST = 1e-6
# Says when a worker is lost, and nothing about what is computed.
_OF_NO_EFFECT = ("dead_after",)


class Over(SystemExit):
    """As far as the run is to be replayed, it has been: ends the script."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(slots=True)
class _Take:
    """A contribution as it is computed here."""

    buffer: Buffer | None = None
    weight: float = 0.0
    loss: Tensor | float = 0.0
    norm: float | None = 0.0
    present: int = 0
    merged: Tensor | None = None
    finished: bool = False


@dataclass(slots=True)
class _Call:
    """A call of ``batches`` or ``evaluate`` that the script is in."""

    kind: Kind
    phase: int
    result: float | None = None
    over: bool = False
    total: float = 0.0
    count: float = 0.0


@dataclass(slots=True)
class _Body:
    """Where the script is: in which stretch, and what is left of it."""

    stretch: Stretch | None = None
    left: list[MicroBatch] = field(default_factory=list[MicroBatch])
    part: Part | None = None
    """whose micro-batch was drawn last"""
    computed: bool = True
    """``backward`` was called for it, or none was drawn"""


class Player:
    """Plays all workers of a run, to one script."""

    writes = False

    def __init__(
        self,
        score: Score,
        offer: Offer,
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
        self._items = score.items
        self._until = until
        self._weights = weights
        self._cursor = 0
        self._saving = offer.saving(score.run.job)
        self._start = None if since is None else self._found_start(score, since)
        self._body = _Body()
        self._waiting: list[Stretch] = []
        """of the bodies that come next"""
        self._exchanging: Exchange | None = None
        """the part of an ``evaluate`` that is being computed"""
        self._calls: list[_Call] = []
        self._takes: dict[Part, _Take] = {}
        self._spare: list[Buffer] = []
        self._agreed: PolicyRecord | None = None
        self._limit: int | None = None
        self._weights_before: list[Tensor] = []
        self._measured: dict[int, float] = {}
        self._closed = False
        findings.exact = all(p.dtype is torch.float64 for p in self.training.parameters)
        findings.tolerance = EXACT if findings.exact else LOOSE
        self._compare_settings(offer)
        self._policy = offer.policy
        self.group = next(item.group for item in self._items if isinstance(item, Changed))
        self.me = self.group.roster[0]
        self.last_trained: Settled | None = None
        self.applied_rate = self.training.rate
        self._views = Views(offer.model, self.training)

    def _compare_settings(self, offer: Offer) -> None:
        agreed = next((item.record for item in self._items if isinstance(item, Agreed)), None)
        if agreed is None:
            raise UsageError(
                "the journal has no phase: the run ended before it trained, and there is nothing to replay"
            )
        for name, recorded in agreed.settings.items():
            here = offer.agreed.get(name)
            if here != recorded and name not in _OF_NO_EFFECT:
                raise Diverged(f"the script joins with {name}={here}, the run had {name}={recorded}")
        here = summary(signature(offer.model, offer.optimizer, offer.agreed))
        if agreed.parameters and agreed.parameters != here:
            raise Diverged(f"the script trains another model: {here}; the run trained {agreed.parameters}")

    def _found_start(self, score: Score, since: int) -> Start:
        """The last checkpoint up to round ``since`` that is there and can be started from."""
        if self._saving is None:
            raise UsageError("--from starts at a checkpoint, but the script calls join without checkpoint=…")
        there = self._saving.names()
        for start in reversed(score.starts):
            if start.checkpoint.round <= since and start.checkpoint.name in there:
                return start
        possible = ", ".join(str(s.checkpoint.round) for s in score.starts if s.checkpoint.name in there)
        raise UsageError(
            f"there is no checkpoint up to round {since} to start from. The journal names {score.checkpoints}; in "
            f"{score.checkpoints - len(score.starts)} of them something was under way that was computed before (with "
            "delay 1 it always is, but in an epoch's first round), and of the others there are now those of rounds: "
            f"{possible or 'none'}"
        )

    # -- facts, as ``Worker`` has them

    @property
    def inside(self) -> Kind | None:
        return self._calls[-1].kind if self._calls else None

    def limit_samples(self, samples: int | None) -> None:
        self._limit = samples

    def leave(self, reason: str) -> None:
        """Who left, and when, is in the journal."""

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """What will be drawn next in the innermost call."""
        found = list(self._body.left)
        for stretch in self._waiting:
            found += stretch.micro_batches
        phase, nested = self._calls[-1].phase, 0
        for item in itertools.islice(self._items, self._cursor, None):
            if len(found) >= _AHEAD or (isinstance(item, Ended) and item.record.phase == phase):
                break
            match item:
                case Opened():
                    nested += 1
                case Ended():
                    nested -= 1
                case Bodies() if not nested:
                    found += [mb for stretch in item.stretches for mb in stretch.micro_batches]
                case Exchange() if not nested:
                    found += [mb for part in item.parts for mb in part.micro_batches]
                case _:
                    pass
        return tuple(found[:_AHEAD])

    # -- what the script calls

    def open(self, call: Opening) -> int | Past:
        """Enter the phase that the run opened next."""
        self._leave_body()
        for item in self._rest():
            match item:
                case Opened():
                    self._enter(call, item)
                    return self._passed_by(item, self._start) if self._start is not None else item.record.phase
                case Bodies() if not item.stretches:
                    pass
                case Bodies() | Update() | Exchange():
                    raise Diverged(
                        f"the script calls {_NAMES[call.kind]} after round {self.group.round}, where the run went on "
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
        if self._body.left or self._waiting:
            return self._drawn()
        self._complete_exchange()
        for item in self._rest():
            match item:
                case Bodies():
                    self._waiting = [stretch for stretch in item.stretches if stretch.micro_batches]
                case Exchange():
                    stretches = (Stretch(part, part.micro_batches, ahead=False) for part in item.parts)
                    self._waiting = [stretch for stretch in stretches if stretch.micro_batches]
                    self._exchanging = item
                    if not self._waiting:
                        self._complete_exchange()
                case Update():
                    self._update(item)
                case Opened():
                    self._pass_over_evaluate(item)
                case _:
                    self._pass(item)
                    if isinstance(item, Ended) and item.record.phase == phase:
                        return None
            if self._waiting:
                return self._drawn()
        raise AssertionError("unreachable")

    def contributed(self, weight: float, loss_sum: Tensor | float) -> None:
        """A drawn micro-batch is computed; its gradients lie in the buffer."""
        part = self._body.part
        assert part is not None
        take = self._takes[part]
        take.weight += weight
        take.loss = take.loss + loss_sum
        self._body.computed = True

    def step(self) -> bool:
        """Make the update that comes now, if the run's loop bodies saw it."""
        if self.inside is not Kind.TRAIN or self._body.left or self._waiting:
            return False
        following = self._items[self._cursor] if self._cursor < len(self._items) else None
        if not isinstance(following, Update):
            return False
        self._leave_body()
        self._cursor += 1
        self._update(following)
        return following.outcome.seen

    def abandon(self, phase: int) -> None:
        """The script has left its loop early: everything of the phase must have been computed."""
        unreached = bool(self._body.left or self._waiting or not self._body.computed)
        self._leave_body()
        for item in self._rest() if not self._calls[-1].over else ():
            if unreached or (isinstance(item, Bodies) and item.stretches):
                raise Diverged(
                    f"the script leaves its loop after round {self.group.round}, where workers of the run computed on: "
                    "replay runs one script for all of them, so let `break` depend on what is the same on all workers "
                    "right after run.step() has returned True (run.round, run.samples, a result of evaluate)"
                )
            if isinstance(item, Update):
                self._update(item)
            elif not isinstance(item, Bodies):
                self._pass(item)
            if isinstance(item, Ended) and item.record.phase == phase:
                break
        self.left()

    def left(self) -> float | None:
        """The script is out of its innermost call; the call's recorded result."""
        return self._calls.pop().result

    def end(self) -> None:
        """The script has come to its end."""
        if self._closed:
            return
        for item in self._items[self._cursor :]:
            if isinstance(item, Update | Opened) or (isinstance(item, Bodies) and item.stretches):
                raise Diverged(f"the script ends after round {self.group.round}, where the run went on")
        self.findings.complete = True
        self._compare_weights()

    def finished(self) -> None:
        """The script is at its end; a replay writes no checkpoints."""

    def close(self) -> None:
        """Give the optimizer back."""
        if not self._closed:
            self._closed = True
            self.training.close()

    # -- the journal's items

    def _rest(self) -> Iterator[Any]:
        """The items from here on; ends the script where the journal ends."""
        while self._cursor < len(self._items):
            self._cursor += 1
            yield self._items[self._cursor - 1]
        self._stop()

    def _complete_exchange(self) -> None:
        item, self._exchanging = self._exchanging, None
        if item is not None:
            self._exchanged(item)

    def _pass(self, item: Any) -> None:
        match item:
            case Agreed():
                self._agreed = item.record
            case Changed():
                self._change(item)
            case Rewound():
                self._rewind(item)
            case Ended():
                self._end_phase(item.record, item.group)
            case _:
                raise AssertionError(item)

    def _stop(self) -> None:
        """As far as the journal goes, or as the user wants."""
        self._compare_weights()
        raise Over

    def _change(self, item: Changed) -> None:
        group = item.group
        self._views.change(group)
        self.group = group
        self.me = group.roster[0]

    def _rewind(self, item: Rewound) -> None:
        """Somebody has read the state as it is now from a checkpoint; what was computed since counts for nothing."""
        for take in self._takes.values():
            self._let_go(take)
        self._takes.clear()
        self.group = item.group
        self.me = item.group.roster[0]
        # Inside an ``evaluate`` the model shows the merged values already.
        self._views.begin_anew([self.me], shown=self.inside is Kind.EVALUATE)

    def _enter(self, call: Opening, item: Opened) -> None:
        record = item.record
        where = f"phase {record.phase} (epoch {record.epoch + 1})"
        if record.task != call.kind.name.lower():
            there = _NAMES[Kind[record.task.upper()]]
            raise Diverged(f"{where}: the script calls {_NAMES[call.kind]}, the run called {there}")
        for what, here, there in (
            ("is in epoch", call.epoch + 1, record.epoch + 1),
            ("has samples:", call.length, record.length),
            ("takes the samples in an order with the checksum", call.order, record.order),
        ):
            if here != there:
                raise Diverged(f"{where}: the script {what} {here}, the run {there}")
        limit = self._agreed.samples_limit if self._agreed is not None else None
        if limit != self._limit:
            raise Diverged(f"{where}: the script trains on samples={self._limit}, the run on samples={limit}")
        self._calls.append(_Call(call.kind, record.phase))
        if call.kind is Kind.TRAIN:
            self._views.grow(self.training.buffers.training_bits())
        self.group = item.group

    def _passed_by(self, opened: Opened, start: Start) -> int | Past:
        """This phase began before the checkpoint: go to its end without a computation, or to the checkpoint."""
        while self._cursor < start.item:
            item = self._items[self._cursor]
            self._cursor += 1
            if isinstance(item, Agreed):
                self._agreed = item.record
            elif not isinstance(item, Bodies):
                self.group = item.group
            if isinstance(item, Ended) and item.record.phase == opened.record.phase:
                call = self._calls.pop()
                return Past(call.kind, opened.record.epoch, item.record.result)
        self._begin_at(start)
        return opened.record.phase

    def _begin_at(self, start: Start) -> None:
        """The script is where the checkpoint was written: hold its state, as every worker did."""
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
        self._views.begin_anew(views.holders(here), shown=False)
        self.me = here.roster[0]
        self.findings.first_round = here.round + 1

    def _pass_over_evaluate(self, item: Opened) -> None:
        """The run evaluated here and the script does not: nothing of the weights depends on it."""
        if item.record.task != "evaluate":
            raise Diverged(f"the run opened another loop over batches after round {self.group.round}")
        for passed in self._rest():
            if isinstance(passed, Changed | Rewound):
                self._pass(passed)
            if isinstance(passed, Ended) and passed.record.phase == item.record.phase:
                self.group = passed.group
                return

    def _end_phase(self, record: PhaseEndRecord, group: Group) -> None:
        call = next((call for call in self._calls if call.phase == record.phase), None)
        self.group = group
        if call is None:
            return
        call.over, call.result = True, record.result
        if call.kind is Kind.TRAIN:
            for take in self._takes.values():
                self._let_go(take)
            self._takes.clear()
            self._views.drain(group)
            self.me = group.roster[0]
            return
        self.findings.evaluations += 1
        if record.result is not None and call.count:
            self._compare("the result of evaluate", call.total / call.count, record.result, _LEAST, worker="the group")
        if record.result is not None and not group.open and not group.past[-1].inner:
            self.training.evaluated(record.result)

    # -- loop bodies

    def _drawn(self) -> MicroBatch:
        body = self._body
        if not body.left:
            body.stretch = self._waiting.pop(0)
            body.left = list(body.stretch.micro_batches)
            self._begin(body.stretch)
        assert body.stretch is not None
        body.part, body.computed = body.stretch.part, False
        return body.left.pop(0)

    def _begin(self, stretch: Stretch) -> None:
        """Put the model where this stretch was computed."""
        part, training = stretch.part, self.training
        take = self._takes.get(part)
        begun = take is not None
        if take is None:
            take = self._takes[part] = _Take()
        self.me = part.worker
        if self.inside is Kind.EVALUATE:
            return
        before = None if begun else part.before
        if before is not None and (before.round == 0 or before.round > self.group.round):
            # It was handed in before this one was begun.
            self._finish(before)
        take.buffer = take.buffer or (self._spare.pop() if self._spare else Buffer(training.parameters))
        self._views.show(part.worker)
        training.back()
        if stretch.ahead:
            self._go_ahead(before, take.buffer)
        training.gradients.fill(take.buffer, begun=begun)
        if before is not None and before.round == 0:
            self._let_go(self._takes.pop(before))

    def _go_ahead(self, before: Part | None, blank: Buffer) -> None:
        """Look ahead as this worker did, from the contribution that it had handed in."""
        training = self.training
        if before is None or training.lookahead is None:
            raise Diverged(f"round {self.group.round}: the run looked ahead where the script has nothing to look from")
        handed = self._takes.get(before, _Take())
        training.gradients.fill(handed.buffer or blank, begun=True)
        training.park(handed.weight, handed.norm, handed.present)
        if not before.point.fresh and self._weights_before:
            training.lookahead.depart_from(self._weights_before)
        training.look_ahead(self.group.rate.factor)

    def _leave_body(self) -> None:
        """The script's loop body has run."""
        body = self._body
        body.computed = True
        if not body.left and body.stretch is not None:
            body.stretch = body.part = None
            if self.inside is not Kind.EVALUATE:
                self.training.back()

    # -- contributions and updates

    def _finish(self, part: Part) -> _Take:
        """Everything of a contribution is computed: what its ticket says is known."""
        take = self._takes.setdefault(part, _Take())
        if take.finished:
            return take
        take.finished = True
        self.findings.contributions += 1
        self.findings.dropped += part.line is None
        loss = float(take.loss)
        norm = 0.0
        if take.buffer is not None:
            self.training.gradients.fill(take.buffer, begun=True)
            take.present = self.training.gradients.present()
            take.buffer.scale(1.0 / (part.line.scale if part.line is not None else self.training.scale))
            norm = take.buffer.squared_norm()
        take.norm = norm if math.isfinite(loss + norm) else None
        if part.line is None:
            return take
        take.merged = self._views.handed_in(self.group, part.worker, take.weight)
        self._compare_ticket(part, take, loss)
        return take

    def _compare_ticket(self, part: Part, take: _Take, loss: float) -> None:
        line, worker = part.line, part.worker
        assert line is not None
        number = part.round
        self._compare("the weight", take.weight, line.weight, _LEAST, number=number, worker=worker)
        finite = not line.flags & Flag.NONFINITE
        if (take.norm is not None) != finite:
            here, there = (1.0, math.inf) if take.norm is not None else (math.inf, 1.0)
            self.findings.note(Difference(math.inf, "loss or gradient (1: finite)", number, worker, here, there))
        elif take.norm is not None:
            self._compare("the loss", loss, line.loss_sum, _LEAST * max(1.0, line.weight), number=number, worker=worker)
            mean = self.training.reference / take.weight if take.weight > 0 else 0.0
            square = take.norm * mean * mean
            self._compare(
                "the gradient's squared norm", square, line.squared_norm, _LEAST**2, number=number, worker=worker
            )

    def _update(self, item: Update) -> None:
        """What all members did when a round was settled."""
        training, outcome, record = self.training, item.outcome, item.record
        training.back()
        takes = [
            _Take(finished=True) if part.line is None or part.line.flags & Flag.FOLLOWING else self._finish(part)
            for part in item.parts
        ]
        present = 0
        for take in takes:
            present |= take.present
        self._merge(item, takes)
        if training.lookahead is not None and training.lookahead.repeats:
            self._weights_before = [p.detach().clone() for p in training.parameters]
        self.applied_rate = training.rate * outcome.factor
        self._compare("the learning rate", self.applied_rate, record.rate, 0.0, number=record.round, worker="the group")
        summed = self._summed(takes)
        training.gradients.fill(summed, begun=True)
        training.apply(outcome, summed, present, measures=outcome.measures)
        training.advance_schedule(item.before.scheduled, item.group.scheduled)
        self._compare_measure(item)
        for part, take in zip(item.parts, takes, strict=True):
            self._takes.pop(part, None)
            self._let_go(take)
        self.group, self.last_trained = item.group, outcome
        self.findings.rounds += 1
        self.findings.last_round = record.round
        self.me = item.group.roster[0]
        self._views.show(views.holders(item.group)[0])
        if self._until is not None and record.round >= self._until:
            self._stop()

    def _merge(self, item: Update, takes: list[_Take]) -> None:
        """Bring in the merged buffers, on every worker."""
        handed = [
            Handing(
                worker,
                take.merged,
                computed=take.buffer is not None,
                follows=part.line is not None and bool(part.line.flags & Flag.FOLLOWING),
            )
            for worker, part, take in zip(item.before.roster, item.parts, takes, strict=True)
        ]
        self._views.merge(item.before, handed, item.outcome)

    def _summed(self, takes: list[_Take]) -> Buffer:
        """The sum of all contributions, in the buffer of the first."""
        buffers = [take.buffer for take in takes if take.buffer is not None]
        if not buffers:
            return Buffer(self.training.parameters)
        for other in buffers[1:]:
            for into, flat in zip(buffers[0].flats, other.flats, strict=True):
                into.add_(flat)
        return buffers[0]

    def _let_go(self, take: _Take) -> None:
        """Its gradients are not needed any more."""
        if take.buffer is not None:
            for flat in take.buffer.flats:
                flat.zero_()
            self._spare.append(take.buffer)

    def _compare_measure(self, item: Update) -> None:
        """The norm of a mean gradient that the run took, and told in a later round."""
        number, square = self.training.measured
        if number:
            self._measured[number] = square
        if item.record.measured is not None:
            told, recorded = item.record.measured
            here = self._measured.pop(told, None)
            if here is not None:
                what = "the squared norm of the mean gradient"
                self._compare(what, here, recorded, _LEAST**2, number=told, worker="the group")

    # -- comparing

    def _exchanged(self, item: Exchange) -> None:
        """All of an exchange of an ``evaluate`` is computed."""
        call = self._calls[-1]
        for part in item.parts:
            take = self._takes.pop(part, _Take())
            total, line = float(take.loss), part.line
            assert line is not None
            call.total, call.count = call.total + total, call.count + take.weight
            self._compare("evaluate's count", take.weight, line.weight, _LEAST, worker=part.worker)
            if math.isfinite(total):
                floor = _LEAST * max(1.0, abs(line.weight))
                self._compare("evaluate's sum", total, line.loss_sum, floor, worker=part.worker)
        self.group = item.group

    def _compare(
        self, what: str, here: float, there: float, floor: float, *, number: int | None = None, worker: str = ""
    ) -> None:
        apart = abs(here - there)
        scale = max(abs(here), abs(there), floor)
        relative = apart / scale if apart else 0.0
        if math.isnan(relative):
            relative = math.inf
        self.findings.note(
            Difference(relative, what, self.group.round if number is None else number, worker, here, there)
        )

    def _compare_weights(self) -> None:
        """The model's plain weights beside those of a file, if that is of this round."""
        path, findings = self._weights, self.findings
        if path is None:
            findings.not_compared = "there is no file; give one that run.save wrote with --weights"
        if path is None or findings.compared or findings.not_compared:
            return
        self.training.back()
        try:
            with self.training.plain(), safe_open(str(path), framework="pt") as file:
                there = (file.metadata() or {}).get("round")
                if there is not None and int(there) != self.group.round:
                    findings.not_compared = f"those in {path.name} are of round {there}"
                    return
                findings.weights = of_weights(self._model.state_dict(), cast(Any, file), findings.last_round)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"cannot read weights from {path}: {error}; give a file that run.save wrote") from None
        findings.compared = f"the weights in {path.name}"


_NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate"}


def enrolled(
    offer: Offer, score: Score, findings: Findings, *, since: int | None, until: int | None, weights: Path | None
) -> Membership:
    """The membership of a script that is replayed."""
    player: Any = Player(score, offer, findings, since=since, until=until, weights=weights)
    return Membership(player, None, offer.carried)
