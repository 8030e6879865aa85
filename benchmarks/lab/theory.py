"""``scaling-theory``: do the derivations hold?

Question  Is the noise of an update after a change of batch what the recursion says, and does a quadratic become
          unstable where the polynomials say?
Holds     The noise is that of the CNN's real gradients at fixed weights (a learning rate of 0 keeps them, while
          momentum goes on), over replicas that draw their own samples. Edges are found by bisection on real
          optimizer steps, with the library's own look-ahead.
Source    PAPERS §1: U ← μ²U + (1−μ²)/k, excess γ²U/k relative to 1; PAPERS §3: characteristic polynomials.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD

from benchmarks.lab import data, models
from benchmarks.lab.rules import Follower
from benchmarks.results import Curve, Trial
from pliant.tensors.lookahead import LookAhead

Say = Callable[[str], None]

REFERENCE = 32
STEADY, AFTER = 60, 60  # rounds before and after the change
ROUNDS = 3000  # on a quadratic: what grows by a thousandth a round has shown it by then
FACTORS = (2, 4, 8, 16)
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95)
EDGES = {
    "synchronous": "delay 0",
    "plain": "delay 1, plain",
    "momentum": "delay 1, momentum part only",
    "lookahead": "delay 1, look-ahead",
}
NOISE = {"linear_at_once": "at once", "linear": "ramped"}
PARTS = ("noise", "edge")


def recursion(factors: Sequence[float], ks: Sequence[float], momentum: float) -> list[float]:
    """Variance of an update relative to the steady state of its batch under the linear rule."""
    carried = 1.0
    found: list[float] = []
    for factor, k in zip(factors, ks, strict=True):
        carried = momentum**2 * carried + (1 - momentum**2) / k
        found.append(factor**2 * carried / k)
    return found


@dataclass(frozen=True, slots=True)
class Noise:
    """Measured and predicted variance of the update, round by round from the change on."""

    measured: tuple[float, ...]
    predicted: tuple[float, ...]


def measured_noise(k: int, rule: str, momentum: float, replicas: int, passes: int = 1) -> Noise:
    """Jump from the reference batch to k of them at fixed weights."""
    ready = models.prepared("cnn", data.images())
    model = models.build("cnn", [0] * replicas)
    parameters: list[Tensor] = list(model.parameters())
    follower = Follower(rule, reference=REFERENCE, momentum=momentum)
    ks = [1.0] * STEADY + [float(k)] * AFTER
    factors = [follower.follow(round(REFERENCE * each)) for each in ks]
    variances = torch.zeros(len(ks), dtype=torch.float64)
    for attempt in range(passes):
        generator = torch.Generator().manual_seed(attempt)
        optimizer = SGD(parameters, lr=0.0, momentum=momentum)
        for place, each in enumerate(ks):
            sums = [torch.zeros_like(p) for p in parameters]
            batch = round(REFERENCE * each)
            for _ in range(batch // REFERENCE):
                chosen = torch.randint(len(ready.inputs), (replicas, REFERENCE), generator=generator)
                losses = model.losses(ready.inputs[chosen], ready.targets[chosen])
                torch._foreach_add_(sums, torch.autograd.grad(losses.sum() / batch, parameters))
            for p, gradient in zip(parameters, sums, strict=True):
                p.grad = gradient
            optimizer.step()
            buffers = [optimizer.state[p]["momentum_buffer"] if momentum else p.grad for p in parameters]
            variance = sum(float(buffer.var(0).sum()) for buffer in buffers if buffer is not None)
            variances[place] += factors[place] ** 2 * variance / passes
    # The unit is the steady state of the reference batch; under the linear rule k of them have k units.
    unit = float(variances[STEADY // 2 : STEADY].mean())
    found = (variances[STEADY:] / (k * unit)).tolist()
    predicted = recursion(factors[STEADY:], ks[STEADY:], momentum)
    return Noise(tuple(found), tuple(predicted))


def derived_edge(method: str, momentum: float) -> float:
    """The largest stable ηλ from the characteristic polynomial of w on the quadratic λw²/2."""
    if method in ("synchronous", "lookahead"):
        return 2 * (1 + momentum)
    if method == "plain":
        return 1 - momentum

    def stable(x: float) -> bool:
        # w' = w + μ(w − w₁) − x(w₁ + μ(w₁ − w₂)): the gradient was taken one round ago, moved on by the momentum part
        roots = np.roots([1.0, -(1 + momentum), momentum + x * (1 + momentum), -x * momentum])
        return bool(np.abs(roots).max() <= 1.0)

    return _bisected(stable)


def _bisected(stable: Callable[[float], bool]) -> float:
    low, high = 0.0, 5.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def _stays(method: str, momentum: float, rate: float, curvatures: Sequence[float], rounds: int) -> bool:
    """Whether a group with one curvature per worker stays bounded."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = SGD([w], lr=rate, momentum=momentum)
    ahead = LookAhead(optimizer)
    flying: list[Tensor] | None = None
    for _ in range(rounds):
        gradients: list[Tensor] = []
        for worker, curvature in enumerate(curvatures):
            if flying is not None and method in ("momentum", "lookahead"):
                ahead.park([flying[worker]] if method == "lookahead" else None, 1, 1.0)
                ahead.go([{"lr": rate}])
            gradients.append(curvature * w.detach().clone())
            ahead.back()
        applied = gradients if method == "synchronous" else flying
        flying = gradients
        if applied is None:
            continue
        w.grad = torch.stack(applied).mean(0)
        optimizer.step()
        if abs(w.item()) > 1e6:
            return False
    return abs(w.item()) < 10.0


def measured_edge(
    method: str, momentum: float, curvatures: Sequence[float] = (1.0,), steps: int = 12, rounds: int = ROUNDS
) -> float:
    """The largest ηλ, λ the mean curvature, at which the group stays bounded."""
    low, high = 0.0, 5.0
    mean = math.fsum(curvatures) / len(curvatures)
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if _stays(method, momentum, middle / mean, curvatures, rounds) else (low, middle)
    return (low + high) / 2


def selection(only: list[str]) -> tuple[str, ...]:
    if unknown := set(only) - set(PARTS):
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    return tuple(part for part in PARTS if part in only) or PARTS


def measure(quick: bool, parts: tuple[str, ...], say: Say) -> tuple[tuple[Trial, ...], tuple[Curve, ...]]:
    trials: list[Trial] = []
    curves: list[Curve] = []
    if "noise" in parts:
        for k in FACTORS:
            for rule in NOISE:
                found = measured_noise(k, rule, 0.9, replicas=32, passes=1 if quick else 4)
                figures = {
                    "measured": round(max(found.measured), 3),
                    "predicted": round(max(found.predicted), 3),
                    "apart": round(abs(max(found.measured) / max(found.predicted) - 1), 3),
                }
                trials.append(Trial(rule, "noise", f"k {k}", 0, figures))
                for figure, values in (("measured", found.measured), ("predicted", found.predicted)):
                    rounded = tuple(round(value, 3) for value in values)
                    curves.append(Curve(rule, "noise", f"k {k}", figure, tuple(map(float, range(AFTER))), rounded))
                say(f"noise  k {k:2}  {rule:14}  peak {figures['measured']} against {figures['predicted']}")
    if "edge" in parts:
        for momentum in (0.5, 0.9) if quick else MOMENTA:
            for method in EDGES:
                derived = derived_edge(method, momentum)
                found_edge = measured_edge(method, momentum)
                figures = {"measured": round(found_edge, 4), "predicted": round(derived, 4)}
                figures["apart"] = round(abs(found_edge / derived - 1), 4)
                trials.append(Trial(method, "edge", f"μ {momentum:g}", 0, figures))
                say(f"edge  μ {momentum}  {method:12}  {found_edge:.4f} against {derived:.4f}")
        for spread in (0.25, 0.5, 1.0):
            curvatures = (1 - spread, 1 + spread)
            found_edge = measured_edge("lookahead", 0.9, curvatures)
            trials.append(Trial("lookahead", "unlike", f"± {spread:g}", 0, {"measured": round(found_edge, 4)}))
            say(f"edge  curvatures {curvatures}  look-ahead  {found_edge:.4f}")
    return tuple(trials), tuple(curves)
