"""The same training by hand, in plain PyTorch.

Question  Which weights does a script end with, going by the samples of each round and nothing else?
Holds     Nothing of Pliant's numerics is used: plain autograd and torch's own optimizers. Of the run this is taken:
          which micro-batches made up each round, at which point each was computed, and the factor of its rate.
Source    ours; the look-ahead: PAPERS §3, a step of a copied optimizer on the worker's own mean gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Point, Ticket
from pliant.testing.habits.kit import Kit, KitSamples, change, kit_of
from pliant.testing.habits.script import TESTED, Diary, Drawn
from pliant.testing.habits.values import Habits
from pliant.testing.threads import WorkerRecord
from pliant.worker.script.sample_order import epoch_order

_KEPT = 4
"""Versions of the weights: a contribution is at most one round old, a repeated step begins one earlier."""


class ScriptMismatch(AssertionError):
    """A run did something else than its script says."""


@dataclass
class Sum:
    """Σ weight·gradient of some micro-batches, by the name of the parameter, and Σ weight."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 0.0
    infinite: bool = False

    def add(self, other: Sum) -> None:
        for name, gradient in other.gradients.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient
        self.weight += other.weight
        self.infinite = self.infinite or other.infinite

    def only(self, names: frozenset[str]) -> Sum:
        """Of these parameters."""
        kept = {name: gradient for name, gradient in self.gradients.items() if name in names}
        return Sum(kept, self.weight, self.infinite)


@dataclass(frozen=True)
class Round:
    """What the run says of one."""

    outcome: Settled
    tickets: Sequence[Ticket]
    rate: float
    overlaps: bool


class Reference:
    """A training computed again, round by round."""

    def __init__(self, habits: Habits, diaries: Sequence[Diary], record: WorkerRecord) -> None:
        self.kit = kit_of(habits, 0)
        self._habits = habits
        self._diaries = diaries
        told = zip(record.outcomes, record.tickets, record.rates, record.overlaps, strict=True)
        self._rounds = [Round(*each) for each in told if each[0].kind is Kind.TRAIN]
        self._phases = sorted({each.outcome.phase for each in self._rounds})
        """every epoch has one; who goes along does not name the epoch in its ticket"""
        self._samples = KitSamples(habits, habits.samples)
        self._tests = KitSamples(habits, TESTED, seed=2).batch(tuple(range(TESTED)))
        self._fronts: dict[tuple[int, int], int] = {}
        self._versions: dict[int, Kit] = {}
        self._factors = {0: 1.0}
        self._handed_in: dict[int, tuple[Sum, Point, frozenset[str]]] = {}
        """what each contributed last, where it was computed, and what it was summed for"""
        self._changed = 0
        self._agreed = frozenset[str]()
        """what the group trains"""
        self._took_part: set[int] = set()
        """who has computed something in this loop"""
        self._names = self._numbered()
        self._seen = 0
        self._compared = 0
        """up to which round it has been compared what scripts say of single updates"""
        self._followed: set[int] = set()
        """who has gone along with others"""
        self._set_bound: float | None = None
        """as the run counts it: 0: none; None: no script has set one"""

    def run(self) -> Kit:
        """All rounds; raises ``ScriptMismatch`` where the run's own account of itself does not hold."""
        self._keep(0)
        for place, told in enumerate(self._rounds):
            outcome = told.outcome
            if place == 0 or self._rounds[place - 1].outcome.phase != outcome.phase:
                self._open(self._phases.index(outcome.phase))
            self._round(told)
            ends = place + 1 == len(self._rounds) or self._rounds[place + 1].outcome.phase != outcome.phase
            if ends and self._habits.schedule == "epoch":
                step_schedule(self.kit)
            self._do_changes(outcome.round)
            self._keep(outcome.round)
            self._compare_answers(outcome.round)
        return self.kit

    def _keep(self, number: int) -> None:
        self._versions[number] = self.kit.twin()
        self._versions.pop(number - _KEPT, None)

    def _do_changes(self, number: int) -> None:
        for at, event in self._diaries[0].changes[self._changed :]:
            if at > number:
                break
            change(self.kit, event)
            self._changed += 1

    # -- what is trained

    def _numbered(self) -> list[str]:
        """The parameters as tickets count them: the optimizer's, then those that only the model has."""
        names = {id(p): name for name, p in self.kit.named()}
        held = [p for group in self.kit.optimizer.param_groups for p in group["params"]]
        return list(dict.fromkeys(names[id(p)] for p in (*held, *self.kit.model.parameters())))

    def _set(self, of: bytes) -> frozenset[str]:
        bits = int.from_bytes(of, "little")
        return frozenset(name for number, name in enumerate(self._names) if bits >> number & 1)

    def _open(self, epoch: int) -> None:
        """Where a loop begins, what all train counts at once."""
        self._took_part = set()
        sets = {diary.opened[epoch] for diary in self._diaries}
        if len(sets) == 1:
            self._agreed = sets.pop()

    def _layout(self, told: Round) -> frozenset[str]:
        """What this round is summed for; with an overlap a change counts one round later."""
        wanted = {
            member: self._set(ticket.wanted)
            for member, ticket in enumerate(told.tickets)
            if not ticket.flags & Flag.FOLLOWING
        }
        layout = self._agreed
        if not told.overlaps and len(set(wanted.values())) == 1:
            layout = next(iter(wanted.values()))
        # Who has just begun follows those who ran the code.
        said = {of for member, of in wanted.items() if member in self._took_part} or set(wanted.values())
        if len(said) == 1:
            self._agreed = next(iter(said))
        self._took_part |= {member for member, ticket in enumerate(told.tickets) if ticket.samples}
        return layout

    # -- one round

    def _round(self, told: Round) -> None:
        outcome, total, samples = told.outcome, Sum(), 0
        layout = touched = self._layout(told)
        failed = False
        for member, ticket in enumerate(told.tickets):
            part = self._drawn(member, outcome, ticket)
            own = self._contribution(member, outcome.round, part, ticket.point).only(layout)
            self._handed_in[member] = own, ticket.point, layout
            total.add(own)
            samples += sum(len(drawn.indices) for drawn in part)
            for drawn in part:
                touched &= drawn.trained
                failed = failed or drawn.failed
        applied = total.weight > 0 and not total.infinite
        in_parts = self._habits.wide or self._habits.large or self._habits.model == "mixed"
        if failed and in_parts and not outcome.applied:
            # Its ticket was with the others already when the pass failed: all do without the round.
            applied = False
        _check(outcome.batch == samples, f"round {outcome.round} says {outcome.batch} samples, it has {samples}")
        _check(outcome.applied == applied, f"round {outcome.round}: applied is {outcome.applied}")
        self._factors[outcome.round] = outcome.factor
        self._follow_bound(told)
        rate = self.kit.optimizer.param_groups[0]["lr"] * outcome.factor
        _close(told.rate, rate, f"the rate of round {outcome.round}")
        if applied:
            update(self.kit, total.only(touched), outcome.factor)
        self._advance(samples)

    def _advance(self, samples: int) -> None:
        before, self._seen = self._seen, self._seen + samples
        if self._habits.schedule in ("batch", "cycle"):
            for _ in range(self._seen // self._habits.batch - before // self._habits.batch):
                step_schedule(self.kit)

    def _drawn(self, member: int, outcome: Settled, ticket: Ticket) -> list[Drawn]:
        """The micro-batches of a contribution, which must be those of its ticket and of the ledger."""
        epoch = self._phases.index(outcome.phase)
        front = self._fronts.get((member, epoch), 0)
        part = self._diaries[member].drawn.get(epoch, [])[front : front + ticket.micro_batches]
        self._fronts[member, epoch] = front + ticket.micro_batches
        order = epoch_order(None, 0, epoch, self._habits.samples)
        said = order.at([position for start, stop in outcome.spans[member] for position in range(start, stop)])
        drew = [index for drawn in part for index in drawn.indices]
        _check(said == drew, f"round {outcome.round}: worker {member} drew {drew}, the ledger says {said}")
        return part

    def _contribution(self, member: int, number: int, part: Sequence[Drawn], point: Point) -> Sum:
        """Computed where its ticket says it was."""
        if not part:
            return Sum()
        if self._habits.delay == 0 or self._habits.workers == 1:
            at = point.early_round, point.ahead, point.early
            _check(at == (number - 1, False, len(part)), f"round {number}: worker {member} computed at {point}")
        _check(point.early_round >= number - 2, f"round {number}: worker {member} computed at {point}")
        early, own = self._point(member, point), Sum()
        for place, drawn in enumerate(part):
            # What a failed pass leaves behind is of no use, nor is what was added up before it.
            own = Sum() if drawn.failed else own
            if not drawn.failed:
                own.add(self._gradient(early if place < point.early else self._versions[point.late_round], drawn))
        return own

    def _point(self, member: int, point: Point) -> Kit:
        plain = self._versions[point.early_round]
        if not point.ahead:
            return plain
        before, handed, layout = self._handed_in[member]
        if self._habits.optimizer in ("sgd", "adam", "adamw"):
            return ahead(plain, before, self._factors[point.early_round], layout)
        return repeated(plain, plain if handed.fresh else self._versions[point.early_round - 1])

    def _gradient(self, kit: Kit, drawn: Drawn) -> Sum:
        if drawn.infinite:
            return Sum(weight=drawn.weight, infinite=True)
        wanted = [(name, p) for name, p in kit.named() if name in drawn.trained]
        for _, p in wanted:
            p.requires_grad_(True)
        loss, weight = kit.loss(self._samples.batch(drawn.indices))
        found = torch.autograd.grad(loss, [p for _, p in wanted], allow_unused=True)
        gradients = {name: g * weight for (name, _), g in zip(wanted, found, strict=True) if g is not None}
        return Sum(gradients, weight)

    # -- the bound on the gradient's norm

    def _follow_bound(self, told: Round) -> None:
        """A bound that scripts have set is in force from the first round on to which all who set one bring the same."""
        number, said = told.outcome.round, set[float]()
        for member, ticket in enumerate(told.tickets):
            if ticket.flags & Flag.FOLLOWING:
                self._followed.add(member)
            else:
                self._check_bound(member, number, ticket.clip_norm)
                said |= {ticket.clip_norm} - {-1.0}
        if len(said) == 1:
            self._set_bound = said.pop()
            self.kit.clip = self._set_bound or None
        given = told.outcome.clip_norm
        _check(given == self._set_bound, f"round {number} is clipped to {given}, it should be {self._set_bound}")

    def _check_bound(self, member: int, number: int, given: float) -> None:
        """Of one script: what it had set when it handed in, which may have been a round before."""
        told = [-1.0, *(bound or 0.0 for at, bound in self._diaries[member].bounds if at < number)]
        early = [-1.0, *(bound or 0.0 for at, bound in self._diaries[member].bounds if at < number - 1)]
        possible = {told[-1]} if self._habits.delay == 0 else {*told[len(early) - 1 :]}
        if member in self._followed:
            # It has missed what others set meanwhile, and has no say before it sets one itself.
            possible.add(-1.0)
        _check(given in possible, f"round {number}: worker {member} asks for the bound {given}, it set {told[1:]}")

    # -- what scripts say at an update

    def _compare_answers(self, number: int) -> None:
        """What ``evaluate`` and ``save`` have said at this update; running statistics are the group's own affair."""
        after, self._compared = self._compared, number
        for diary in self._diaries if not self._habits.norm else ():
            for at, result in diary.results:
                if after < at <= number:
                    self._compare_result(result, number)
            for each in diary.gathered:
                if after < each.round <= number and each.outputs is not None:
                    self._compare_outputs(torch.stack(each.outputs), number)
        for at, path in self._diaries[0].saved:
            if after < at <= number:
                self._compare_saved(path, number)

    def _compare_result(self, result: float, number: int) -> None:
        loss = torch.nn.functional.cross_entropy(self._outputs(), self._tests[1])
        _close(result, float(loss), f"evaluate after round {number}", tolerance(self._habits))

    def _compare_outputs(self, outputs: Tensor, number: int) -> None:
        compare(f"what was gathered after round {number}", outputs, self._outputs(), tolerance(self._habits))

    def _compare_saved(self, path: Path, number: int) -> None:
        saved = load_file(path)
        for name, p in self.kit.model.named_parameters():
            compare(f"{name} saved after round {number}", saved[name], p.detach(), tolerance(self._habits))

    @torch.no_grad()
    def _outputs(self) -> Tensor:
        self.kit.model.eval()
        try:
            return self.kit.outputs(self._tests)
        finally:
            self.kit.model.train()


def update(kit: Kit, total: Sum, factor: float) -> None:
    """One optimizer step on the mean gradient, clipped by torch's own function."""
    mean = {name: gradient / total.weight for name, gradient in total.gradients.items()}
    _step(kit, mean, factor)


def step_schedule(kit: Kit) -> None:
    """One step of the scheduler, which may come before the first update where that is skipped."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        kit.scheduler.step()


def ahead(plain: Kit, own: Sum, factor: float, layout: frozenset[str]) -> Kit:
    """After a real step of a copied optimizer on a worker's own mean gradient; without one, where momentum leads.

    ``layout``: what the coming update is for. A frozen layer stays where it is, whatever its momentum.
    """
    kit = plain.twin()
    if own.weight > 0 and not own.infinite:
        update(kit, own, factor)
        return kit
    moving = {name: torch.zeros_like(p) for name, p in kit.named() if name in layout and _moves(kit, p)}
    _step(kit, moving, factor)
    return kit


@torch.no_grad()
def repeated(plain: Kit, before: Kit) -> Kit:
    """The last displacement made once more."""
    kit = plain.twin()
    for (_, p), (_, now), (_, then) in zip(kit.named(), plain.named(), before.named(), strict=True):
        p.copy_(now * 2 - then)
    return kit


def _moves(kit: Kit, p: Parameter) -> bool:
    return any(isinstance(value, Tensor) for value in kit.optimizer.state.get(p, {}).values())


def _step(kit: Kit, mean: dict[str, Tensor], factor: float) -> None:
    parameters = dict(kit.named())
    for name, p in parameters.items():
        p.grad = mean.get(name)
    if kit.clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), kit.clip)
    rates = [group["lr"] for group in kit.optimizer.param_groups]
    for group, rate in zip(kit.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    kit.optimizer.step()
    for group, rate in zip(kit.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    kit.optimizer.zero_grad(set_to_none=True)


def tolerance(habits: Habits) -> float:
    """How far rounding may take it off."""
    return 2e-3 if habits.float32 or habits.model == "mixed" else 1e-6


def compare(name: str, given: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to rounding."""
    if not torch.allclose(given, expected, rtol=tolerance, atol=tolerance):
        largest = float((given - expected).abs().max())
        raise ScriptMismatch(f"{name} is off plain PyTorch by {largest:.3g}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ScriptMismatch(message)


def _close(given: float, expected: float, what: str, tolerance: float = 1e-9) -> None:
    _check(abs(given - expected) <= tolerance * (1 + abs(expected)), f"{what} is {given}, it should be {expected}")
