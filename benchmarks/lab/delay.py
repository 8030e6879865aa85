"""``delay``: what does a gradient that is one round old cost?

Question  How far from delay 0 do plain delay 1, look-ahead and its variants end, after equal samples?
Holds     Seeds are paired. The settings are judged at the learning rate that is best for delay 0, which the grid over
          η and μ shows; only the order of computing and applying differs between the methods.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.lab import data, models
from benchmarks.lab.points import METHODS
from benchmarks.lab.trainer import Plan, train
from benchmarks.lab.trial import trial
from benchmarks.results import Trial
from pliant.core.shares import shares

Say = Callable[[str], None]
Rounds = tuple[tuple[int, ...], ...]

PACES = (6.0, 6.0, 3.0, 1.0)
THREE = ("synchronous", "plain", "lookahead")
FOUR = (*THREE, "warm_up")
ACTS = {
    "equal": "equal shares",
    "unequal": "shares 96/96/48/16",
    "large": "the same, twice the rate",
    "floating": "open batches",
    "churn": "workers leave and return",
}
STEADY = ("equal", "unequal")
MOST = (*STEADY, "floating", "churn")
# The study of variants belongs where look-ahead has the hardest time; without one, a large rate diverges.
STUDIED = {"unequal": tuple(METHODS), "large": tuple(one for one in METHODS if not one.endswith("plain"))}
MOMENTA = (0.5, 0.9, 0.95)
EFFECTIVE = (0.5, 1.0, 2.0)
"""η / (1 − μ), by the subject's unit: what a constant gradient would move the weights by in the long run"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its optimizer; ``rate`` is the best one for delay 0."""

    model: str
    optimizer: str
    rate: float
    samples: int
    batch: int
    acts: tuple[str, ...]
    studied: bool
    grid: tuple[tuple[float, float], ...]
    """momentum and rate of every cell"""


def _sgd_grid() -> tuple[tuple[float, float], ...]:
    return tuple((momentum, round(unit * (1 - momentum), 4)) for momentum in MOMENTA for unit in EFFECTIVE)


SUBJECTS = {
    "cnn sgd": Subject("cnn", "sgd", 0.1, 60_000, 256, tuple(ACTS), True, _sgd_grid()),
    "cnn adamw": Subject("cnn", "adamw", 0.008, 60_000, 256, MOST, False, ((0.9, 0.004), (0.9, 0.008), (0.9, 0.016))),
    "batchnorm sgd": Subject("batchnorm", "sgd", 0.1, 40_000, 256, STEADY, True, ((0.9, 0.05), (0.9, 0.1), (0.9, 0.2))),
    "transformer adamw": Subject(
        "transformer", "adamw", 0.004, 6_400, 64, STEADY, False, ((0.9, 0.002), (0.9, 0.004), (0.9, 0.008))
    ),
}
GRID_SEEDS, QUICK_SEEDS, SEEDS = 4, 8, 24


@dataclass(frozen=True, slots=True)
class Selection:
    """What to measure; the grid is one of the parts."""

    subjects: tuple[str, ...]
    acts: tuple[str, ...]
    methods: tuple[str, ...]
    grid: bool

    @property
    def asked(self) -> frozenset[str]:
        return frozenset({*self.subjects, *self.acts, *self.methods})


def selection(only: list[str]) -> Selection:
    words = {word for subject in SUBJECTS for word in subject.split()}
    if unknown := set(only) - {*words, *ACTS, *METHODS, "grid"}:
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    named = set(only) & words
    subjects = tuple(one for one in SUBJECTS if all(word in named for word in one.split())) if named else ()
    if named and not subjects:
        subjects = tuple(one for one in SUBJECTS if named & set(one.split()))
    acts = tuple(act for act in ACTS if act in only)
    methods = tuple(method for method in METHODS if method in only)
    return Selection(
        subjects or tuple(SUBJECTS),
        acts or (() if "grid" in only else tuple(ACTS)),
        methods or tuple(METHODS),
        "grid" in only or not acts,
    )


def steady(subject: Subject, *, equal: bool) -> Rounds:
    """The same shares in every round."""
    paces = (1.0,) * len(PACES) if equal else PACES
    return _filled(subject, [shares(subject.batch, paces)] * (subject.samples // subject.batch + 1))


def floating(subject: Subject) -> Rounds:
    """Open batches: each worker does half to one and a half of its usual, in all about twice the reference batch."""
    random_ = random.Random(20230828)
    unit = 2 * subject.batch / sum(PACES)
    rounds = [
        tuple(max(1, round(unit * pace * random_.uniform(0.5, 1.5))) for pace in PACES)
        for _ in range(subject.samples // subject.batch + 1)
    ]
    return _filled(subject, rounds)


def churn(subject: Subject) -> Rounds:
    """The reference batch shared by whoever is there: a fast worker is away for a fifth of the run, two come and go."""
    count = subject.samples // subject.batch + 1
    rounds: list[tuple[int, ...]] = []
    for number in range(count):
        done = number / count
        there = [
            not 0.25 <= done < 0.45,
            int(done * 20) % 4 != 3,
            not 0.35 <= done < 0.6,
            int(done * 40) % 5 != 2,
        ]
        present = [place for place, is_there in enumerate(there) if is_there]
        given = dict(zip(present, shares(subject.batch, [PACES[place] for place in present]), strict=True))
        rounds.append(tuple(given.get(place, 0) for place in range(len(PACES))))
    return _filled(subject, rounds)


def _filled(subject: Subject, rounds: Sequence[tuple[int, ...]]) -> Rounds:
    """Whole rounds until the samples are used up."""
    found: list[tuple[int, ...]] = []
    done = 0
    for each in rounds:
        if done + sum(each) > subject.samples:
            break
        found.append(tuple(each))
        done += sum(each)
    return tuple(found)


def _rounds(subject: Subject, act: str) -> Rounds:
    if act == "floating":
        return floating(subject)
    if act == "churn":
        return churn(subject)
    return steady(subject, equal=act == "equal")


def cell(momentum: float, rate: float) -> str:
    return f"μ {momentum:g} η {rate:g}"


def measure(quick: bool, seeds: int | None, chosen: Selection, say: Say) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    """Every seed of every method: the grid with few seeds, the settings at the best rate with all.

    A quick run has the grid of the first subject only.
    """
    trials: list[Trial] = []
    notes: list[str] = []
    for key in chosen.subjects:
        subject = SUBJECTS[key]
        source = data.text() if subject.model == "transformer" else data.images()
        ready = models.prepared(subject.model, source)
        notes.append(f"{key}: {ready.name}, {subject.samples} samples a seed")

        def run(
            method: str,
            act: str,
            rounds: Rounds,
            momentum: float,
            rate: float,
            count: int,
            key: str = key,
            subject: Subject = subject,
            ready: data.Data = ready,
        ) -> None:
            rule = "sqrt" if subject.optimizer == "adamw" else "linear"
            plan = Plan(
                model=subject.model,
                optimizer=subject.optimizer,
                rate=rate,
                rounds=rounds,
                reference=subject.batch,
                momentum=momentum,
                rule=rule if act == "floating" else "fixed",
                method=method,
            )
            outcomes = train(plan, ready, range(count))
            trials.extend(trial(method, key, act, one, ready.classes) for one in outcomes)
            say(f"{key}  {act:15}  {method:17}  {fmean(one.accuracy for one in outcomes):.2f}")

        if chosen.grid and not (quick and key != next(iter(SUBJECTS))):
            for momentum, rate in subject.grid:
                for method in THREE:
                    if method in chosen.methods:
                        rounds = steady(subject, equal=False)
                        run(method, cell(momentum, rate), rounds, momentum, rate, GRID_SEEDS)
        for act in (act for act in subject.acts if act in chosen.acts):
            rounds = _rounds(subject, act)
            rate = subject.rate * (2 if act == "large" else 1)
            for method in STUDIED.get(act, FOUR) if subject.studied else FOUR:
                if method in chosen.methods:
                    run(method, act, rounds, 0.9, rate, seeds or (QUICK_SEEDS if quick else SEEDS))
    return tuple(trials), tuple(notes)
