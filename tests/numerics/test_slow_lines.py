"""A newcomer on a slow line: it comes to hold the whole state, and keeps little meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from numerics.trainings import training_of
from pliant.core import portion_size
from pliant.tensors.gradients import FlatGradients
from pliant.worker import snapshot
from pliant.worker.elastic.catch_up import CatchUp
from pliant.worker.training import Training


class Clock:
    now = 0


class SlowLine:
    """To a donor whose answers take their time: so many bytes in each tick of the clock."""

    def __init__(self, donor: Group, late: int) -> None:
        self.failed: str | None = None
        self.closed = False
        self._donor = donor
        self._late = late
        """ticks until even the head of an answer arrives"""
        self._waiting: list[str] | None = None
        self._answer: tuple[int, Any] | None = None
        self._began = self._takes = 0.0

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None:
        self._donor.asked.append(list(want))
        self._waiting = list(want)

    def serve(self) -> None:
        """The donor is at rest."""
        if self._waiting is None:
            return
        want, self._waiting = self._waiting, None
        state = snapshot.snapshot(self._donor.training, {"state": {}}, want)
        size = sum(_bytes(part) for part in state.values())
        self._answer = self._donor.exchange, state
        self._began, self._takes = Clock.now, size / self._donor.per_tick

    def begun(self) -> tuple[int, float] | None:
        if self._answer is None or Clock.now < self._began + self._late:
            return None
        return self._answer[0], min(1.0, (Clock.now - self._began) / max(1e-9, self._takes))

    def arrived(self) -> Any:
        if self._answer is None or Clock.now < self._began + max(self._late, self._takes):
            return None
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        self.closed = True


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value.values())) if isinstance(value, dict) else 0


class Group:
    """A donor, a newcomer, and rounds of one tick each."""

    def __init__(self, sizes: Sequence[int], per_tick: float, *, late: int = 0) -> None:
        Clock.now = 0
        self.per_tick = per_tick
        self.exchange = 10
        self.training = _training(sizes, 1)
        self.asked: list[list[str]] = []
        for _ in range(2):
            self._update()
        self.newcomer = _training(sizes, 2)
        self.lines: list[SlowLine] = []

        def connect(address: str) -> SlowLine:
            self.lines.append(SlowLine(self, late))
            return self.lines[-1]

        self.takeover = CatchUp(self.newcomer, {"state": {}}, connect)
        self.takeover.restart(["donor"], 1, self.exchange, keep=False)
        self.takeover.pursue(self.exchange)
        self.gradients = sum(p.nbytes for p in self.newcomer.parameters)
        self.most = 0
        """bytes kept"""
        self.waited = 0
        """ticks without a round"""

    def _update(self) -> dict[int, torch.Tensor]:
        gradients = {index: torch.randn_like(p) for index, p in enumerate(self.training.parameters)}
        self.training.catch_up(gradients, 1.0, None)
        return gradients

    def tick(self) -> None:
        Clock.now += 1
        if not self.lines[-1].closed:
            self.lines[-1].serve()

    def round(self) -> None:
        """Made by both; the newcomer updates what it holds."""
        self.tick()
        gradients = self._update()
        self.exchange += 1
        means = FlatGradients(self.newcomer.parameters)
        for index, gradient in gradients.items():
            view = means.views[index]
            assert view is not None
            view.copy_(gradient)
        held = self.newcomer.held or 0
        present = (1 << len(gradients)) - 1
        self.takeover.note(self.exchange, means, present, 1.0, (0.0, 0.0))
        self.newcomer.catch_up({i: g for i, g in gradients.items() if held >> i & 1}, 1.0, None)
        self.most = max(self.most, self.takeover.kept_bytes)
        self.takeover.pursue(self.exchange)
        while self.takeover.holds_up(1):
            self.waited += 1
            self.tick()
            self.takeover.pursue(self.exchange)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()
            if self.takeover.complete:
                break
        assert self.takeover.complete, f"not after {rounds} rounds: {self.asked}"
        self.round()
        for mine, theirs in zip(self.newcomer.parameters, self.training.parameters, strict=True):
            assert torch.equal(mine, theirs)
            state = self.training.optimizer.state[theirs]
            assert all(torch.equal(value, state[name]) for name, value in self.newcomer.optimizer.state[mine].items())


def _training(sizes: Sequence[int], seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    return training_of(model, torch.optim.Adam(model.parameters(), lr=0.1))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny, and no bound is below what they have."""
    monkeypatch.setattr(portion_size, "SMALL_BYTES", 0)


def test_over_a_quick_line_all_of_it_comes_at_once() -> None:
    group = Group([100] * 8, 1e9)
    group.run(4)
    assert len(group.asked) == 1 and group.waited == 0
    assert group.most <= 2 * group.gradients


@pytest.mark.parametrize("rounds", [3, 10, 40])
def test_over_a_slow_line_less_is_asked_for_at_a_time(rounds: int) -> None:
    """``rounds``: all of it takes so many, if nothing had to be sent twice."""
    group = Group([100] * 32, 3 * 32 * 800 / rounds)
    group.run(40 * rounds)
    assert group.most <= 2 * group.gradients
    assert group.waited == 0, "no round waits for it"
    sizes = [len(want) for want in group.asked]
    assert sizes[0] > 32 and max(sizes[1:]) <= 20


@pytest.mark.parametrize("rounds", [3, 10, 100])
def test_one_tensor_that_takes_too_long_is_waited_for(rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No optimizer can update a part of it, so it cannot come in parts; only the rounds can wait."""
    group = Group([10, 5000, 10], 3 * 5000 * 8 / rounds)
    group.run(4 * rounds + 20)
    assert group.most <= 2 * group.gradients
    assert 0 < group.waited <= 2 * rounds
    said = capsys.readouterr().err
    assert said.count("the group waits for this worker until 0 MB of parameters have arrived") == 1


def test_several_large_tensors_after_another() -> None:
    group = Group([3000, 3000, 3000, 10], 3 * 3000 * 8 / 20)
    group.run(300)
    assert group.most <= 2 * group.gradients


def test_where_even_the_head_is_late_it_is_waited_for_with_no_more_kept() -> None:
    group = Group([1000], 1e9, late=9)
    group.run(200)
    assert group.most <= 2 * group.gradients
    assert 0 < group.waited <= 2 * 9


def test_a_donor_that_fails_is_not_waited_for() -> None:
    group = Group([1000], 3 * 8000 / 1000)
    for _ in range(2):
        group.tick()
        group.takeover.note(group.exchange + 1, FlatGradients(group.newcomer.parameters), 1, 1.0, (0.0, 0.0))
        group.exchange += 1
    assert group.takeover.holds_up(1)
    group.lines[-1].failed = "it has gone"
    assert not group.takeover.holds_up(1)
    group.takeover.pursue(group.exchange)
    assert len(group.lines) == 2 and group.takeover.kept_bytes == 0
