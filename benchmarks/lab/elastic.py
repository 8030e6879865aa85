"""``elastic-accuracy``: does the accuracy notice that workers come and go?

Question  How far from the fixed reference batch does each rate rule end, after equal samples, while the batch changes?
Holds     A round's batch is what matters, so one process computes it; the rate decisions are the library's own. Seeds
          are paired: the same initial weights and order of samples under every rule and trace.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.lab import data, models, rules, traces
from benchmarks.lab.trainer import BIN, Outcome, Plan, train
from benchmarks.lab.trial import trial
from benchmarks.results import Curve, Trial

Say = Callable[[str], None]

MODEL = "cnn"
SAMPLES = 100_000  # five epochs of 20,000
# Tuned for the reference batch with 8 seeds, cosine over 120,000 samples: SGD 86.5, 87.0, 87.1 at 0.01, 0.02, 0.03 (the
# lowest within the scatter is taken); AdamW 85.5, 86.6, 87.3 at 0.001, 0.002, 0.004.
RATES = {"sgd": 0.02, "nesterov": 0.02, "adamw": 0.004}
_SGD = ("none", "linear_at_once", "linear", "adascale")
_ADAM = ("none", "sqrt_at_once", "sqrt", "sqrt_moments", "adascale_moments")
RULES = {"sgd": _SGD, "nesterov": _SGD, "adamw": _ADAM}
SEEDS, QUICK_SEEDS = 24, 8

RISE = 1.4  # times the batch before: a change worth a look at the loss
BEFORE, AFTER = 4096, 8192  # samples: the loss before a change is a mean, the one after it the worst bin


@dataclass(frozen=True, slots=True)
class Selection:
    """What to measure."""

    optimizers: tuple[str, ...]
    traces: tuple[str, ...]
    rules: tuple[str, ...]

    @property
    def asked(self) -> frozenset[str]:
        return frozenset({*(f"{MODEL} {one}" for one in self.optimizers), *self.traces, *self.rules, rules.FIXED})


def selection(only: list[str]) -> Selection:
    every = tuple(dict.fromkeys(rule for group in RULES.values() for rule in group))
    if unknown := set(only) - {*RATES, *traces.TRACES, *every}:
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")

    def chosen(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in only) or tuple(names)

    return Selection(chosen(tuple(RATES)), chosen(traces.TRACES), chosen(every))


def changes(batches: Sequence[int]) -> list[int]:
    """Samples consumed where the batch rises, if enough came before to compare with."""
    found: list[int] = []
    done = batches[0]
    for before, now in itertools.pairwise(batches):
        if now >= RISE * before and done >= BEFORE:
            found.append(done)
        done += now
    return found


def peak(losses: Sequence[float], at: Sequence[int]) -> float | None:
    """The worst of: loss after a change ÷ loss before it."""
    found: list[float] = []
    for samples in at:
        place = samples // BIN
        before = fmean(losses[place - BEFORE // BIN : place])
        found.append(max(losses[place : place + AFTER // BIN]) / before)
    return max(found, default=None)


def _curve(rule: str, key: str, trace: str, outcomes: Sequence[Outcome]) -> Curve:
    # Stacks under a rule that learns end in their own time.
    means = [fmean(bins) for bins in zip(*(one.losses for one in outcomes if not one.diverged), strict=False)]
    places = tuple(float(BIN * place + BIN // 2) for place in range(len(means)))
    return Curve(rule, key, trace, "loss", places, tuple(round(value, 4) for value in means))


def _batches(key: str, trace: str, batches: Sequence[int]) -> Curve:
    """The batch where it changes."""
    places: list[float] = []
    values: list[float] = []
    done = 0
    for batch in batches:
        if not values or batch != values[-1]:
            places.append(float(done))
            values.append(float(batch))
        done += batch
    return Curve("", key, trace, "batch", tuple(places), tuple(values))


def gpus(file: Path | None) -> tuple[tuple[int, ...], str]:
    """The recorded GPU counts and where they come from."""
    if file is not None and file.exists():
        return traces.read_gpus(file), "spot trace: recorded"
    return traces.synthetic_gpus(), "spot trace: synthetic, the recorded one is absent"


@dataclass(frozen=True, slots=True)
class Found:
    trials: tuple[Trial, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]


def measure(seeds: int, chosen: Selection, spot: Path | None, say: Say) -> Found:
    """Every seed under every rule on every trace."""
    ready = models.prepared(MODEL, data.images())
    counts, note = gpus(spot)
    trials: list[Trial] = []
    curves: list[Curve] = []
    for optimizer in chosen.optimizers:
        key = f"{MODEL} {optimizer}"

        def run(rule: str, batches: Sequence[int], optimizer: str = optimizer) -> tuple[Outcome, ...]:
            plan = Plan(
                model=MODEL,
                optimizer=optimizer,
                rate=RATES[optimizer],
                rounds=tuple((batch,) for batch in batches),
                reference=traces.REFERENCE,
                rule=rule,
            )
            outcomes = train(plan, ready, range(seeds))
            say(f"{optimizer:8}  {rule:15}  {fmean(one.accuracy for one in outcomes):.2f}  ({len(batches)} rounds)")
            return outcomes

        truth = run(rules.FIXED, traces.fixed(SAMPLES))
        for trace in chosen.traces:
            batches = traces.batches(trace, SAMPLES, counts)
            curves.append(_batches(key, trace, batches))
            say(f"{trace}: {len(batches)} rounds of {min(batches[:-1])} to {max(batches)}")
            for rule in (rules.FIXED, *RULES[optimizer]):
                if rule != rules.FIXED and rule not in chosen.rules:
                    continue
                outcomes = truth if rule == rules.FIXED else run(rule, batches)
                for one in outcomes:
                    trials.append(trial(rule, key, trace, one, ready.classes, peak(one.losses, changes(batches))))
                curves.append(_curve(rule, key, trace, outcomes))
    return Found(tuple(trials), tuple(curves), (f"data: {ready.name}", f"{SAMPLES} samples a seed", note))
