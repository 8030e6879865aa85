"""One process that computes what a group of workers computes, for several seeds at once.

Question  What weights does a group reach whose rounds have these shares, with this delay and this rate rule?
Holds     A round's update is the weighted mean over the workers' samples, each gradient taken where that worker would
          be: at the plain weights without delay; with it at the plain weights or at a look-ahead point of its own, one
          round late. The last contribution is applied too. The schedule counts samples, or what they were worth where
          the rule says so: such a run goes on until its schedule is through. Seeds never mix; one of them equals a
          plain PyTorch loop on the same samples where there is no delay.
Source    PAPERS §2 and §3; the library's own look-ahead and rate decisions.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.lab.data import Data
from benchmarks.lab.models import Stack, build
from benchmarks.lab.points import WARM_UP, Contribution, Points, per_seed, spread
from benchmarks.lab.rules import FIXED, PARTS, Follower, Followers, learns, moments, moves_moments

PASS = 1536  # samples of all seeds together in one forward pass: what stays in a core's cache
BIN = 512  # samples over which the loss is averaged: one round of the largest batch
STACK = 24  # seeds trained together
LONGEST = 4  # times the plan's samples: a run goes on no longer, whatever its schedule says


class Decides(Protocol):
    """Whatever says the factor of each round."""

    factor: float

    def follow(self, batch: int, *, short: bool = False) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One configuration; the seeds come apart."""

    model: str
    optimizer: str
    rate: float
    rounds: tuple[tuple[int, ...], ...]
    """samples of each worker, round by round"""
    reference: int
    momentum: float = 0.9
    rule: str = FIXED
    method: str = "synchronous"

    @property
    def samples(self) -> int:
        return sum(map(sum, self.rounds))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed reached: share of right answers in per cent, held-out loss, training loss by bins of samples."""

    seed: int
    accuracy: float
    loss: float
    losses: tuple[float, ...]
    samples: int = 0
    """used until the schedule was through"""

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


def optimizer_of(plan: Plan, parameters: list[Tensor]) -> Optimizer:
    if plan.optimizer == "adamw":
        return AdamW(parameters, lr=plan.rate, betas=(plan.momentum, 0.999), weight_decay=0.01)
    return SGD(parameters, lr=plan.rate, momentum=plan.momentum, nesterov=plan.optimizer == "nesterov")


def scheduled(plan: Plan, consumed: float) -> float:
    """Cosine over the samples consumed, in steps of the reference batch."""
    place = consumed // plan.reference * plan.reference / plan.samples
    return plan.rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, place)))


def orders(seeds: Sequence[int], available: int, samples: int) -> Tensor:
    """Positions of the samples each seed meets: one permutation after another."""
    found: list[Tensor] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(1_000_003 + seed)
        epochs = [torch.randperm(available, generator=generator) for _ in range(math.ceil(samples / available))]
        found.append(torch.cat(epochs)[:samples])
    return torch.stack(found)


class Trainer:
    """A stack of seeds under one plan."""

    longest = 1
    """times the plan's samples"""

    def __init__(self, plan: Plan, data: Data, seeds: Sequence[int]) -> None:
        self.plan, self.data = plan, data
        self.model: Stack = build(plan.model, seeds)
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.optimizer = optimizer_of(plan, self.parameters)
        self.order = orders(seeds, len(data.inputs), self.longest * plan.samples)
        self.follower: Decides = Follower(plan.rule, reference=plan.reference, momentum=plan.momentum)
        self.points = Points(self.optimizer, plan.method, self.parameters)
        self.largest = max(map(sum, plan.rounds))
        self.drawn = 0
        self.consumed = 0
        self.bins = torch.zeros(len(self.model.seeds), math.ceil(self.longest * plan.samples / BIN))
        self.counts = torch.zeros(self.bins.shape[1])

    def run(self) -> tuple[Outcome, ...]:
        flying: list[Contribution] | None = None
        for shares in self._rounds():
            handed_in = self._computed(shares, flying)
            if flying is not None:
                self._apply(flying)
                flying = None
            if self._delayed():
                flying = handed_in
            else:
                self._apply(handed_in)
        if flying is not None:
            self._apply(flying)
        return self._outcomes()

    def _rounds(self) -> Iterator[tuple[int, ...]]:
        yield from self.plan.rounds

    def _delayed(self) -> bool:
        return self.drawn > WARM_UP.get(self.plan.method, 0.0) * self.plan.samples

    def _computed(self, shares: tuple[int, ...], flying: list[Contribution] | None) -> list[Contribution]:
        """Every worker's contribution, each taken at that worker's point."""
        found: list[Contribution] = []
        merged = [value.clone() for value in self.model.running]
        remembered: list[list[Tensor]] = []
        for worker, share in enumerate(shares):
            if share == 0:
                found.append(Contribution(0))
                continue
            if flying is not None:
                own = flying[worker] if worker < len(flying) else None
                self.points.go(own, self.follower.factor)
            for value, known in zip(self.model.running, merged, strict=True):
                value.copy_(known)
            found.append(self._contribution(share))
            remembered.append([value.clone() for value in self.model.running])
            self.points.back()
        self._merge(remembered, [share for share in shares if share])
        return found

    def _contribution(self, share: int) -> Contribution:
        size = self.model.micro_batch or max(1, PASS // len(self.model.seeds))
        passes = math.ceil(share / size)
        sums: list[Tensor] = []
        losses = torch.zeros(len(self.model.seeds))
        for number in range(passes):
            # Near-equal micro-batches, as the library cuts a share.
            begin, end = (self.drawn + share * place // passes for place in (number, number + 1))
            chosen = self.order[:, begin:end]
            found = self.model.losses(self.data.inputs[chosen], self.data.targets[chosen])
            gradients = torch.autograd.grad(found.sum(), self.parameters)
            if sums:
                torch._foreach_add_(sums, gradients)
            else:
                sums = list(gradients)
            losses += found.detach().sum(1)
        taken_at = [p.detach().clone() for p in self.parameters] if self.points.keeps_point else None
        self.drawn += share
        return Contribution(share, sums, losses, taken_at)

    @torch.no_grad()
    def _merge(self, remembered: list[list[Tensor]], shares: list[int]) -> None:
        """Running statistics of the group as those of one mixture: PAPERS §4."""
        total = sum(shares)
        for place in range(0, len(self.model.running), 2):
            pairs = [(each[place], each[place + 1]) for each in remembered]
            weights = [share / total for share in shares]
            mean = torch.stack([w * m for w, (m, _) in zip(weights, pairs, strict=True)]).sum(0)
            square = torch.stack([w * (v + m * m) for w, (m, v) in zip(weights, pairs, strict=True)]).sum(0)
            self.model.running[place].copy_(mean)
            self.model.running[place + 1].copy_(square - mean * mean)

    @torch.no_grad()
    def _apply(self, contributions: list[Contribution]) -> None:
        batch = sum(one.samples for one in contributions)
        if self.points.keeps_point:
            self.points.compensate(contributions)
        present = [one.sums for one in contributions if one.sums is not None]
        mean = [torch.stack(parts).sum(0) / batch for parts in zip(*present, strict=True)]
        before = [p.detach().clone() for p in self.parameters] if self.plan.method == "displacement" else None
        for p, gradient in zip(self.parameters, mean, strict=True):
            p.grad = gradient
        # The run's last round may be short.
        self._update(contributions, batch, short=self.consumed + batch >= self.plan.samples and batch < self.largest)
        self._record(contributions, batch)
        self.consumed += batch
        for group in self.optimizer.param_groups:
            group["lr"] = scheduled(self.plan, self.consumed)
        self.points.applied(contributions, mean, before)

    def _update(self, contributions: list[Contribution], batch: int, *, short: bool) -> None:
        """One step on the mean gradients."""
        factor = self.follower.follow(batch, short=short)
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = scheduled(self.plan, self.consumed) * factor
        kept = [dict(group) for group in groups]
        if moves_moments(self.plan.rule):
            for group in groups:
                group["betas"], group["eps"] = moments(group["betas"], group["eps"], factor)
        self.optimizer.step()
        for group, values in zip(groups, kept, strict=True):
            group.update(values)

    def _record(self, contributions: list[Contribution], batch: int) -> None:
        place = min(int((self.consumed + batch / 2) // BIN), self.bins.shape[1] - 1)
        for one in contributions:
            if one.losses is not None:
                self.bins[:, place] += one.losses
        self.counts[place] += batch

    def _outcomes(self) -> tuple[Outcome, ...]:
        right, loss = self.model.judged(self.data.held_inputs, self.data.held_targets)
        last = int(self.counts.nonzero().max()) + 1
        curve = (self.bins / self.counts)[:, :last]
        # A bin without a round (a round larger than a bin) has the one before it.
        for place in range(1, curve.shape[1]):
            if not self.counts[place]:
                curve[:, place] = curve[:, place - 1]
        return tuple(
            Outcome(seed, float(right[place]) * 100, float(loss[place]), tuple(curve[place].tolist()), self.consumed)
            for place, seed in enumerate(self.model.seeds)
        )


class Learner(Trainer):
    """The same under a rule that learns from the noise: every seed has a factor and a schedule of its own.

    A round whose norms are taken has several contributions. Once the plan's rounds are used up the last full one is
    repeated until the slowest schedule is through; a seed that is ahead stands still by then.
    """

    longest = LONGEST

    def __init__(self, plan: Plan, data: Data, seeds: Sequence[int]) -> None:
        if plan.method != "synchronous":
            raise ValueError(f"{plan.rule} is followed without delay only")
        super().__init__(plan, data, seeds)
        self.followers = Followers(plan.rule, len(seeds), reference=plan.reference, momentum=plan.momentum)
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        """of AdamW, where they move"""
        self.steps = 0

    def _rounds(self) -> Iterator[tuple[int, ...]]:
        batches = [sum(shares) for shares in self.plan.rounds]
        if batches[-1] < self.largest and len(batches) > 1:
            batches.pop()
        for place in itertools.count():
            batch = batches[min(place, len(batches) - 1)]
            if self.drawn + batch > self.longest * self.plan.samples or self._through():
                return
            parts = min(PARTS, batch) if self.followers.is_due else 1
            yield tuple(batch * (part + 1) // parts - batch * part // parts for part in range(parts))

    def _delayed(self) -> bool:
        return False

    def _through(self) -> bool:
        return min(self.followers.scheduled) >= self.plan.samples

    def _update(self, contributions: list[Contribution], batch: int, *, short: bool) -> None:
        before = [p.detach().clone() for p in self.parameters]
        paces = [scheduled(self.plan, done) / self.plan.rate for done in self.followers.scheduled]
        # Its rounds are full ones throughout.
        factors = self.followers.follow(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate
        if moves_moments(self.plan.rule):
            self._step(factors)
        else:
            self.optimizer.step()
        # An update is proportional to its rate.
        scale = torch.tensor([pace * factor for pace, factor in zip(paces, factors, strict=True)])
        for p, old in zip(self.parameters, before, strict=True):
            p.copy_(old + spread(scale.to(p), p) * (p - old))
        if len(contributions) > 1:
            means = [(one.samples, per_seed(one.mean() or [])) for one in contributions]
            self.followers.learn(means, per_seed([p.grad for p in self.parameters if p.grad is not None]))

    def _step(self, factors: Sequence[float]) -> None:
        """AdamW with betas and epsilon for every seed."""
        (group,) = self.optimizer.param_groups
        moved = [moments(group["betas"], group["eps"], factor) for factor in factors]
        self.steps += 1
        for p, (first, second) in zip(self.parameters, self.moments, strict=True):
            assert p.grad is not None
            one, two, epsilon = (
                spread(torch.tensor(values, dtype=p.dtype), p)
                for values in zip(*((*betas, eps) for betas, eps in moved), strict=True)
            )
            first.lerp_(p.grad, 1 - one)
            second.mul_(two).add_((1 - two) * p.grad.square())
            length = (second / (1 - two**self.steps)).sqrt() + epsilon
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(group["lr"] * first / (1 - one**self.steps) / length)


def train(plan: Plan, data: Data, seeds: Sequence[int]) -> tuple[Outcome, ...]:
    """One outcome per seed, in stacks."""
    trainer = Learner if learns(plan.rule) else Trainer
    found: list[Outcome] = []
    for start in range(0, len(seeds), STACK):
        found += trainer(plan, data, seeds[start : start + STACK]).run()
    return tuple(found)
