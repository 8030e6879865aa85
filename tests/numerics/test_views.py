"""A replay makes of every worker's running statistics what the worker itself has made of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from pliant.core.group_state import GroupState, Policy, founded
from pliant.replay.buffers import BufferHandIn, BufferViews
from pliant.tensors.buffers import ModelBuffers
from pliant.types import WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")
Drawn = Mapping[WorkerId, Tensor]
"""what each worker computes in a round; who is missing goes along"""


class Worker:
    """A worker's own model, and what is done with its buffers in a run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.buffers = ModelBuffers(self.model)
        self.buffers.begin(self.buffers.training_bits(), kept=True)

    def group_values(self) -> dict[int, Tensor]:
        """What a newcomer is given."""
        self.buffers.exchange()
        values = dict(enumerate(self.buffers.held()))
        self.buffers.exchange()
        return values


class Player:
    """The one model of a replay."""

    def __init__(self, model: nn.Module, group: GroupState) -> None:
        self.model = copy.deepcopy(model)
        training: Any = SimpleNamespace(buffers=ModelBuffers(self.model))
        self.views = BufferViews(self.model, training)
        self.views.change(group)
        self.views.begin(training.buffers.training_bits())

    def round(self, group: GroupState, drawn: Drawn, *, applied: bool = True) -> None:
        for worker, x in drawn.items():
            self.views.show(worker)
            self.model(x)
        parts = [
            BufferHandIn(
                worker,
                self.views.handed_in(group, worker, float(len(drawn[worker]))) if worker in drawn else None,
                computed=worker in drawn,
                follows=worker not in drawn,
            )
            for worker in group.roster
        ]
        outcome: Any = SimpleNamespace(applied=applied, weight=float(sum(map(len, drawn.values()))))
        self.views.merge(group, parts, outcome)

    def held(self, worker: WorkerId) -> list[Tensor]:
        self.views.show(worker)
        return [value.clone() for value in self.model.buffers()]


def merged_round(workers: Mapping[WorkerId, Worker], drawn: Drawn) -> None:
    """A round of the run itself."""
    for worker, x in drawn.items():
        workers[worker].model(x)
    hand_in(workers, {worker: float(len(drawn.get(worker, ()))) for worker in workers})


def hand_in(workers: Mapping[WorkerId, Worker], weights: Mapping[WorkerId, float]) -> None:
    leader = next(iter(workers))
    parts = [each.buffers.hand_in(weights[worker], leader=worker == leader) for worker, each in workers.items()]
    summed = torch.stack([part for part in parts if part is not None]).sum(0)
    for each in workers.values():
        each.buffers.merge(summed, sum(weights.values()))


def norm() -> nn.Module:
    torch.manual_seed(3)
    return nn.BatchNorm1d(4).double()


def group_of(*roster: WorkerId, exchange: int = 0) -> GroupState:
    return replace(founded(Policy(batch=8), 1, roster), exchange=exchange)


def assert_alike(player: Player, workers: Mapping[WorkerId, Worker]) -> None:
    for worker, each in workers.items():
        for here, there in zip(player.held(worker), each.buffers.held(), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def samples(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64) * 2 + 1


def test_a_spare_goes_along_from_the_first_round_on() -> None:
    model, group = norm(), group_of(W0, W1)
    workers, player = {W0: Worker(model), W1: Worker(model)}, Player(model, group)
    for drawn in ({W0: samples(4)}, {W0: samples(3)}, {W0: samples(4), W1: samples(2)}, {W1: samples(5)}):
        merged_round(workers, drawn)
        player.round(group, drawn)
        assert_alike(player, workers)


@pytest.mark.parametrize("asks", ["between rounds", "in mid-round"])
def test_a_newcomer_to_one_who_was_alone_begins_with_the_last_round(asks: str) -> None:
    """It computes beside the other before anything is merged: it is ready at the beginning of a loop."""
    model, alone = norm(), group_of(W0)
    first, player = Worker(model), Player(model, alone)
    for x in (samples(4), samples(4)):
        first.model(x)
        first.buffers.go_alone(kept=True)
        player.round(alone, {W0: x})
    first.buffers.drain()
    player.views.drain(alone)
    both = group_of(W0, W1, exchange=3)
    player.views.change(both)
    drawn = {W0: samples(3), W1: samples(5)}
    newcomer = Worker(model)
    given = first.group_values()
    first.model(drawn[W0])
    newcomer.buffers.adopt(first.group_values() if asks == "in mid-round" else given, merged=False)
    newcomer.model(drawn[W1])
    hand_in({W0: first, W1: newcomer}, {W0: 3.0, W1: 5.0})
    player.round(both, drawn)
    assert_alike(player, {W0: first, W1: newcomer})


def test_before_the_first_merge_the_group_holds_what_it_began_with() -> None:
    """The first round is skipped, or a checkpoint is written in it: what one worker has forwarded is its own."""
    model, group = norm(), group_of(W0)
    first, player = Worker(model), Player(model, group)
    x = samples(4)
    first.model(x)
    player.views.show(W0)
    player.model(x)
    newcomer = Worker(model)
    newcomer.buffers.adopt(first.group_values(), merged=False)
    assert all(map(torch.equal, newcomer.buffers.held(), model.buffers()))
    player.views.change(group_of(W0, W1, exchange=2))
    assert_alike(player, {W0: first, W1: newcomer})


def test_who_holds_the_state_counts_in_a_drain() -> None:
    """A newcomer is ready and was dealt nothing yet; the last round of the loop is skipped."""
    model, alone = norm(), group_of(W0)
    first, player = Worker(model), Player(model, alone)
    x = samples(4)
    first.model(x)
    first.buffers.go_alone(kept=True)
    player.round(alone, {W0: x})
    both = group_of(W0, W1, exchange=2)
    player.views.change(both)
    newcomer = Worker(model)
    newcomer.buffers.adopt(first.group_values(), merged=False)
    x = samples(4)
    first.model(x)
    player.round(both, {W0: x}, applied=False)
    hand_in({W0: first, W1: newcomer}, {W0: 1.0, W1: 1.0})
    player.views.drain(both)
    assert_alike(player, {W0: first, W1: newcomer})


def test_one_who_is_alone_forgets_what_a_break_cut_off() -> None:
    model, alone = norm(), group_of(W0)
    worker, player = Worker(model), Player(model, alone)
    x = samples(4)
    worker.model(x)
    worker.buffers.go_alone(kept=True)
    player.round(alone, {W0: x})
    worker.model(samples(4))
    worker.buffers.drain()
    player.views.drain(alone)
    assert_alike(player, {W0: worker})
