"""What must stay small however large the rest is: the start of a long epoch, the memory of a newcomer.

Question  How long does an epoch of a billion samples take to begin, and what does it take in memory? How much does a
          newcomer keep besides its state, if that takes many rounds to arrive?
Holds     The epoch is begun by the real loop, in this process; the clock runs from the call of ``batches`` to the first
          micro-batch, and memory is that of the whole process. The newcomer is the real code that takes the state
          over, with the large model, SGD with momentum, and an optimizer on the donor's side; only the wire is made up:
          it brings so many bytes per round. What is kept is counted from the tensors that are alive, not from what the
          code believes to keep.
Source    docs/design/0019-order.md; docs/design/0007-elastic.md ("Handing the state on").
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pliant
from benchmarks.memory import live_tensors, storages
from benchmarks.resident import forget_peak, status_mb
from benchmarks.results import Trial
from benchmarks.workload import Device, make_model, make_optimizer
from pliant.tensors.gradients import FlatGradients
from pliant.worker.elastic.catch_up import CatchUp
from pliant.worker.snapshot import snapshot
from pliant.worker.training import Training

PARTS = ("epoch", "newcomer")
BILLION, SHORT = 10**9, 1000
SIZE = 32
EPOCHS, QUICK_EPOCHS = 20, 5
STATE_ROUNDS, QUICK_STATE_ROUNDS = (2, 10, 50, 100), (2, 50)  # what the state takes to travel
MODEL = "large"
USERS: dict[str, Any] = {"state": {}}

Say = Callable[[str], None]


def selection(only: list[str]) -> frozenset[str]:
    if unknown := set(only) - set(PARTS):
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    return frozenset(only or PARTS)


def measure(parts: frozenset[str], quick: bool, say: Say) -> tuple[Trial, ...]:
    trials: list[Trial] = []

    def done(trial: Trial) -> None:
        trials.append(trial)
        say(f"{trial.act}  " + "  ".join(f"{name} {value:.2f}" for name, value in trial.figures.items()))

    if "epoch" in parts:
        for epoch, figures in enumerate(begun(QUICK_EPOCHS if quick else EPOCHS)):
            done(Trial("pliant", "1e9 samples", "epoch", epoch, figures))
    if "newcomer" in parts:
        for repeat, rounds in enumerate(QUICK_STATE_ROUNDS if quick else STATE_ROUNDS):
            done(Trial("pliant", MODEL, "newcomer", repeat, joined(rounds)))
    return tuple(trials)


# -- the start of an epoch


class Samples(Dataset[Tensor]):
    """So many, made as they are asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


def begun(epochs: int) -> Iterator[dict[str, float]]:
    """Begin so many epochs of a billion samples, each after one of a thousand."""
    model = nn.Linear(1, 1)
    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=SIZE) as run:
        for _ in run.epochs(epochs):
            short_s, _ = _begin(run, model, SHORT)
            seconds, grown_mb = _begin(run, model, BILLION)
            yield {"begins_ms": seconds * 1e3, "grown_mb": grown_mb, "short_ms": short_s * 1e3}


def _begin(run: pliant.Run, model: nn.Module, length: int) -> tuple[float, float]:
    """Seconds until the first micro-batch, and megabytes; the epoch ends with its first round."""
    samples = Samples(length)
    forget_peak()
    before_mb, began_s = status_mb("VmRSS"), time.perf_counter()
    found: tuple[float, float] | None = None
    for x in run.batches(samples, size=SIZE):
        if found is None:
            found = time.perf_counter() - began_s, status_mb("VmHWM") - before_mb
        run.backward(model(x).mean())
        if run.step():
            break
    assert found is not None
    return found


# -- the memory of a newcomer


class Wire:
    """To a donor whose answers travel slowly; what is under way moves with ``travel``."""

    failed: str | None = None

    def __init__(self, donor: Training, bytes_per_round: float) -> None:
        self._donor = donor
        self._bytes_per_round = bytes_per_round
        self._want: Sequence[str] = ()
        self._as_of = 0
        self._size = self._came = 0.0
        self._under_way = False
        self.parts: dict[str, Any] = {}
        self.asked = 0

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None:
        self._want, self.asked = want, self.asked + 1

    def travel(self, exchange: int) -> None:
        """As long as a round takes; the donor copies what was asked for at its next rest."""
        if self._want:
            self.parts = snapshot(self._donor, USERS, self._want)
            self._want, self._as_of, self._came, self._under_way = (), exchange, 0.0, True
            self._size = float(sum(storages(_tensors(self.parts)).values()))
        self._came += self._bytes_per_round

    def begun(self) -> tuple[int, float] | None:
        if not self._under_way or self._came >= self._size:
            return None
        return self._as_of, self._came / self._size

    def arrived(self) -> Any:
        if not self._under_way or self._came < self._size:
            return None
        self._under_way = False
        return self._as_of, self.parts

    def close(self) -> None:
        """What was under way is of no use any more."""
        self._want, self._under_way, self.parts = (), False, {}


def _tensors(value: Any) -> Iterator[Tensor]:
    """All in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)


class Newcomer:
    """It follows the donor's rounds and takes the state over meanwhile."""

    def __init__(self, state_rounds: int) -> None:
        self.mine, self.theirs = _training(), _training()
        # Momentum is there, and both buffers of gradients: it is what follows that is to be measured.
        self.theirs.catch_up(dict(enumerate(_means(self.theirs, 0.01).values())), 1.0, None)
        for training in (self.mine, self.theirs):
            training.gradients.check()
        self.gradient_bytes = sum(p.nbytes for p in self.mine.parameters)
        self.wire = Wire(self.theirs, 2 * self.gradient_bytes / state_rounds)
        self.takeover = CatchUp(self.mine, USERS, lambda _: self.wire, say=lambda _: None)
        self.takeover.restart(["donor"], 1, 0, keep=False)
        self.exchange = self.waits = 0
        # Held, not only noted: a freed one's place would be taken by what is to be counted.
        self._others = live_tensors()

    def follow(self) -> bool:
        """One round, or as long a wait; False: the state is here."""
        self.wire.travel(self.exchange)
        self.takeover.pursue(self.exchange)
        if self.takeover.complete:
            return False
        if self.takeover.holds_up(1):
            self.waits += 1
        else:
            self._round()
        return True

    def _round(self) -> None:
        self.exchange += 1
        means = FlatGradients(self.theirs.parameters)
        gradients = _filled(means, 0.001 * self.exchange)
        held, self.mine.held = self.mine.held or 0, None
        self.mine.catch_up({index: view for index, view in gradients.items() if held >> index & 1}, 1.0, None)
        self.mine.held = held
        self.takeover.note(self.exchange, means, (1 << len(gradients)) - 1, 1.0, (0.0, 0.0))
        self.theirs.catch_up(gradients, 1.0, None)

    def beyond_bytes(self) -> int:
        """Alive, but neither of the donor nor of the state, here or arriving."""
        state = [*_tensors(self.mine.optimizer.state), *_tensors(self.theirs.optimizer.state)]
        known = storages([*self._others, *state, *_tensors(self.wire.parts)])
        return sum(size for place, size in storages(live_tensors()).items() if place not in known)

    def differs(self) -> bool:
        pairs = zip(self.mine.parameters, self.theirs.parameters, strict=True)
        return not all(torch.equal(ours, theirs) for ours, theirs in pairs)

    def close(self) -> None:
        self.takeover.close()
        self.mine.close()
        self.theirs.close()


def _training() -> Training:
    model = make_model(MODEL, Device(lambda: 0.0))
    return Training(
        model,
        make_optimizer(model),
        reference=SIZE,
        grouped=True,
        correction="none",
        clip_norm=None,
        scheduler=None,
        schedule_by="batch",
        scaler=None,
    )


def _filled(buffer: FlatGradients, value: float) -> dict[int, Tensor]:
    """Its views, by parameter."""
    views = {index: view for index, view in enumerate(buffer.views) if view is not None}
    for view in views.values():
        view.fill_(value)
    return views


def _means(training: Training, value: float) -> dict[int, Tensor]:
    return _filled(FlatGradients(training.parameters), value)


def joined(state_rounds: int) -> dict[str, float]:
    """A newcomer whose state would take so many rounds if none were held up."""
    newcomer = Newcomer(state_rounds)
    try:
        most = 0
        while newcomer.follow():
            most = max(most, newcomer.beyond_bytes())
        if newcomer.differs():
            raise AssertionError("the newcomer's weights are not the donor's")
        return {
            "state_rounds": float(state_rounds),
            "copies": most / newcomer.gradient_bytes,
            "rounds": float(newcomer.exchange),
            "waits": float(newcomer.waits),
            "asked": float(newcomer.wire.asked),
        }
    finally:
        newcomer.close()
