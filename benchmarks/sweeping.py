"""What the passes over all parameters cost that an update needs.

Question  How long do an update, a look-ahead step, both in one, and the parking of a gradient take, and how near is
          that to what the bytes alone take?
Holds     11 million float32 numbers in four tables, as in the large model; more than a cache holds. CPU seconds of one
          thread, all ways in turn in each repeat, so that all have the same neighbours on the machine. Beside them
          stands torch's own: the sum is scaled to the mean, ``optimizer.step()``, and the gradients are set to zero.
          Both in one begin with the model at the look-ahead point, with the gradients parked in it.
Source    docs/design/0025-sweeps.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from benchmarks.results import Results, Trial
from benchmarks.sheet import Sheet
from benchmarks.streams import MovedBytes, moved
from pliant.tensors import passes
from pliant.tensors.sweep import LookAheadSweep, Sweeps, UpdateSweep

TABLES, ROWS = 4, 10_740 * 256
QUICK, FULL = 7, 40
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}),
    "adamw": (AdamW, {"lr": 1e-4}),
}
SYSTEMS = {
    "torch": "torch, its default",
    "torch_fused": "torch, fused=True",
    "pliant_operators": "Pliant, torch's operators",
    "pliant": "Pliant, compiled",
}
ACTS = {
    "update": "update",
    "ahead": "look-ahead",
    "both": "both in one",
    "park": "parking",
}

Say = Callable[[str], None]


def selection(only: list[str]) -> frozenset[str]:
    if unknown := set(only) - set(RULES):
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    return frozenset(only or RULES)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of doing something."""

    system: str
    act: str
    do: Callable[[], object]
    streams: float


class Tables:
    """Weights, gradients, copies, and an optimizer that has made its first update."""

    def __init__(self, rule: str, *, fused: bool) -> None:
        kind, settings = RULES[rule]
        self.parameters = [Parameter(torch.randn(ROWS)) for _ in range(TABLES)]
        self.gradients = [torch.randn(ROWS) * 0.01 for _ in range(TABLES)]
        self.copies = {index: torch.randn(ROWS) * 0.01 for index in range(TABLES)}
        self.optimizer = kind(self.parameters, fused=fused, **settings)
        self.sweeps = Sweeps(self.optimizer, self.parameters)
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        self.optimizer.step()
        # Found out before anything is counted or replaced.
        assert self.sweeps.settles or fused

    def plainly(self) -> None:
        """An update as it is made without sweeps."""
        for gradient in self.gradients:
            gradient.mul_(0.999)
        self.optimizer.step()
        for gradient in self.gradients:
            gradient.zero_()

    def update(self) -> None:
        assert self.sweeps.settle(self._update)

    def ahead(self) -> None:
        self.sweeps.ahead(self._look)

    def both(self) -> None:
        assert self.sweeps.settle_and_look_ahead(self._update, self._look, away=True)

    def park(self) -> None:
        passes.park(self.gradients, list(self.copies.values()))

    @property
    def _update(self) -> UpdateSweep:
        hyper: list[dict[str, Any]] = [{} for _ in self.optimizer.param_groups]
        return UpdateSweep(self.gradients, (1 << TABLES) - 1, hyper, 0.999, clears=True)

    @property
    def _look(self) -> LookAheadSweep:
        return LookAheadSweep(self.copies, self._update.present, self._update.hyper)

    def streams(self, do: Callable[[], object]) -> float:
        """How many streams torch's operators move."""
        with MovedBytes() as counted:
            do()
        return counted.bytes / sum(p.nbytes for p in self.parameters)

    def swept(self, act: Callable[[], object]) -> float:
        """How many streams a sweep moves."""
        found: list[int] = []
        run, passes.run = passes.run, lambda parameters: found.append(moved(parameters))
        try:
            act()
        finally:
            passes.run = run
        return sum(found) / sum(p.nbytes for p in self.parameters)


def _without_kernel(do: Callable[[], object]) -> Callable[[], None]:
    def done() -> None:
        kept = passes._kernel, passes._sweep
        passes._kernel, passes._sweep = (lambda method, dtype: None), None
        try:
            do()
        finally:
            passes._kernel, passes._sweep = kept

    return done


def ways(rule: str) -> list[Way]:
    """All that is compared."""
    plain, fused = Tables(rule, fused=False), Tables(rule, fused=True)
    found = [
        Way("torch", "update", plain.plainly, plain.streams(plain.plainly)),
        Way("torch_fused", "update", fused.plainly, fused.streams(fused.plainly)),
    ]
    for act in ACTS:
        do = getattr(plain, act)
        composed = _without_kernel(do)
        found.append(Way("pliant_operators", act, composed, plain.streams(composed)))
        if passes._sweep is not None:
            # Parking reads the gradient and writes the copy.
            found.append(Way("pliant", act, do, 2.0 if act == "park" else plain.swept(do)))
    return found


def measure(repeats: int, rules: frozenset[str], say: Say, keep: Callable[[tuple[Trial, ...]], None]) -> list[Trial]:
    """Every way, in turn."""
    trials: list[Trial] = []
    for rule in (rule for rule in RULES if rule in rules):
        compared = ways(rule)
        for way in compared:
            way.do()
        for repeat in range(repeats):
            seconds = {(way.system, way.act): _timed(way.do) for way in compared}
            for way in compared:
                trials.append(_trial(way, rule, repeat, seconds))
            keep(tuple(trials))
        if passes._sweep is None:
            reason = "the extension is not built: pip install -e . with a C compiler"
            trials += [Trial("pliant", rule, act, 0, failure=reason) for act in ACTS]
            keep(tuple(trials))
        for way in compared:
            ms = median(t.figures["ms"] for t in trials if (t.system, t.model, t.act) == (way.system, rule, way.act))
            say(f"{rule}  {SYSTEMS[way.system]}, {ACTS[way.act]}: {ms:.1f} ms, {way.streams:.0f} streams")
    return trials


def _timed(do: Callable[[], object]) -> float:
    began_s = time.thread_time()
    do()
    return time.thread_time() - began_s


def _trial(way: Way, rule: str, repeat: int, seconds: dict[tuple[str, str], float]) -> Trial:
    spent_s = seconds[way.system, way.act]
    figures = {
        "ms": spent_s * 1e3,
        "streams": way.streams,
        "gb_per_s": way.streams * TABLES * ROWS * 4 / spent_s / 1e9,
        "beside_torch": spent_s / seconds["torch", "update"],
        "beside_fused": spent_s / seconds["torch_fused", "update"],
    }
    return Trial(way.system, rule, way.act, repeat, figures)


def sheets(results: Results) -> list[Sheet]:
    """A table for each rule."""
    columns = ("", "streams", "CPU ms, median", "least", "GB/s", "÷ torch's update", "÷ its fused update")
    made: list[Sheet] = []
    for rule in dict.fromkeys(trial.model for trial in results.trials):
        rows: list[tuple[str, ...]] = []
        for system, act in dict.fromkeys((t.system, t.act) for t in results.trials if t.model == rule):
            name = f"{SYSTEMS[system]}: {ACTS[act]}"
            figures = {
                figure: results.measured(system, rule, act, figure)
                for figure in ("streams", "ms", "gb_per_s", "beside_torch", "beside_fused")
            }
            if not figures["ms"]:
                rows.append((name, f"failed: {results.refusals(system, rule, act)[0]}", *[""] * 5))
                continue
            middle = {figure: median(values) for figure, values in figures.items()}
            shown = (f"{middle['gb_per_s']:.0f}", f"{middle['beside_torch']:.2f}", f"{middle['beside_fused']:.2f}")
            times = (f"{middle['ms']:.1f}", f"{min(figures['ms']):.1f}")
            rows.append((name, f"{middle['streams']:.0f}", *times, *shown))
        made.append(Sheet(f"Passes over 11 M float32 parameters, {rule}", columns, tuple(rows)))
    return made
