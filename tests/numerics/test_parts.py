"""A synchronous round's gradients are summed in parts, beside the backward pass that makes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import pliant
from numerics import reference
from pliant.tensors import buckets
from pliant.tensors.gradients import FlatGradients
from pliant.testing import Together, together
from pliant.worker.submit import Submission

SIZES = (16, 7, 5)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(203, 6, generator=generator), torch.randint(0, 3, (203,), generator=generator))


def wide() -> nn.Module:
    """Three parts: the last layer with the third one, the second one, the rest."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each contribution that was handed in beside its last backward pass: how many parts went before its end."""
    found: list[int] = []
    original = Submission._complete_parts

    def complete(self: Submission, *, usable: bool) -> None:
        flight = self._member.work.flight
        assert flight is not None
        if flight.given:
            found.append(flight.given)
        original(self, usable=usable)

    monkeypatch.setattr(Submission, "_complete_parts", complete)
    return found


Body = Callable[[pliant.Run, nn.Module, int, int, Tensor, Tensor], None]


def trained(model: nn.Module, body: Body, sizes: tuple[int, ...] = SIZES) -> tuple[Any, ...]:
    """The leader's model after the run, its record, and what everybody drew; ``body`` is that of the loop."""
    drawn = [reference.Drawn() for _ in sizes]

    def script(handle: Together) -> Any:
        mine = copy.deepcopy(model)
        with handle.join(mine, sgd(mine), batch=32, delay=0) as run:
            number = 0
            for _ in run.epochs(2):
                for x, y in run.batches(dataset(), size=sizes[handle.place]):
                    drawn[handle.place].micro_batches.append((x, y, float(len(y))))
                    body(run, mine, handle.place, number, x, y)
                    run.step()
                    number += 1
        return mine, handle.record

    results = together(len(sizes), script)
    models = [result[0] for result in results]
    for other in models[1:]:
        for (name, p), q in zip(models[0].named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
    return models[0], results[0][1], drawn


def plain(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
    run.backward(loss_of(model, x, y))


def expected(record: Any, drawn: list[reference.Drawn]) -> nn.Module:
    """The same updates by hand."""
    model = wide()
    optimizer = sgd(model)
    counts = [[ticket.micro_batches for ticket in row] for row in record.tickets]
    for round_ in reference.contributions(drawn, counts):
        sums = [reference.gradient_sum(model, loss_of, part) for part in round_]
        reference.update(model, optimizer, reference.added([s for s, _ in sums]), sum(w for _, w in sums), None)
    return model


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q[1].detach(), rtol=1e-9, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


# -- the parts


def test_every_parameter_is_in_one_part_and_the_last_ones_come_first() -> None:
    model = wide()
    model.register_parameter("lighter", nn.Parameter(torch.zeros(40_000, dtype=torch.bfloat16)))
    buffer = FlatGradients(list(model.parameters()))
    cut = buffer.cut
    members = [index for part in cut for index in part.members]
    assert sorted(members) == list(range(len(buffer.views)))
    assert [part.members[-1] for part in cut] == sorted((part.members[-1] for part in cut), reverse=True)
    for number, (part, values) in enumerate(zip(cut, buffer.parts, strict=True), 1):
        values.fill_(number)
        assert {buffer.views[index].dtype for index in part.members} == {part.dtype}
        assert all(bool((buffer.views[index] == number).all()) for index in part.members)


def test_a_large_model_has_few_parts() -> None:
    shapes = [nn.Parameter(torch.empty(64, 1024)) for _ in range(300)]
    assert len(buckets.cut(shapes, {n: (65536 * n, 65536 * (n + 1)) for n in range(300)})) == 4


def test_parts_are_told_of_in_their_order() -> None:
    model = wide()
    parameters = list(model.parameters())
    cut = FlatGradients(parameters).cut
    assert len(cut) == 3
    told: list[int] = []
    with buckets.watched(parameters, cut, told.append) as backward:
        loss_of(model, *dataset()[:8]).backward()
    assert told == [0, 1, 2] and not backward.twice
    told.clear()
    with buckets.watched(parameters, cut, told.append):
        # The last layer, which is in the first part, gets nothing.
        model[:-1](dataset()[:8][0]).sum().backward()
    assert told == []
    told.clear()
    loss_of(model, *dataset()[:8]).backward()
    assert told == [], "a hook was left behind"


def test_a_gradient_that_is_added_to_twice_is_noticed() -> None:
    layer = nn.Linear(6, 6)
    parameters = list(layer.parameters())
    cut = [buckets.Bucket(torch.float32, 0, 6, (1,)), buckets.Bucket(torch.float32, 6, 42, (0,))]
    with buckets.watched(parameters, cut, lambda _: None) as backward:
        x = torch.randn(2, 6, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()
    assert backward.twice and backward.late


# -- rounds


def test_the_sums_are_those_of_whole_gradients(early: list[int]) -> None:
    model, record, drawn = trained(wide(), plain)
    assert_close(model, expected(record, drawn))
    rounds = len(record.outcomes)
    # All but the first of each worker, which tells whether the parts can be relied on.
    assert len(early) >= 3 * rounds - 6 and set(early) == {3}
    for row in record.tickets:
        for ticket in row:
            assert ticket.busy_s > 0 and (ticket.squared_norm > 0) is (ticket.samples > 0)


def test_who_gives_weights_sums_the_same_parts_after_its_pass(early: list[int]) -> None:
    def body(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
        run.backward(loss_of(model, x, y), weight=float(len(y)) if place == 1 else None)

    model, record, drawn = trained(wide(), body)
    assert_close(model, expected(record, drawn))
    rounds = len(record.outcomes)
    assert 0 < len(early) <= 2 * rounds


def test_a_part_of_the_model_may_go_unused(early: list[int]) -> None:
    """The parts that are complete in the pass are summed beside it, those behind a missing one after it."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.spare, self.head = nn.Linear(6, 1500), nn.Linear(6, 1500), nn.Linear(1500, 9)

        def forward(self, x: Tensor, spare: bool) -> Tensor:
            return self.head((self.spare if spare else self.first)(x))

    def body(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
        run.backward(F.cross_entropy(model(x, spare=bool(number % 2)), y))

    torch.manual_seed(3)
    model = Branched()
    trained(model, body)
    assert set(early) <= {1, 2, 3} and 1 in early


def test_a_gradient_that_is_not_finite_is_passed_over() -> None:
    def body(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
        hidden = model[0](x)
        if place == 1 and number == 9:
            # The loss is finite. The gradient of the first layer is not, and the others have gone by then.
            hidden.register_hook(lambda gradient: gradient * torch.inf)
        run.backward(F.cross_entropy(model[1:](hidden), y))

    model, record, _ = trained(wide(), body)
    assert [outcome.applied for outcome in record.outcomes].count(False) == 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_pass_that_fails_costs_its_round_and_no_more() -> None:
    """A script may catch it, for lack of memory say."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, refuses: bool) -> Tensor:
            ctx.refuses = refuses
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if ctx.refuses:
                raise MemoryError("not enough")
            return grads[0], None

    def body(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
        hidden = Refusing.apply(model[0](x), place == 2 and number == 8)
        try:
            run.backward(F.cross_entropy(model[1:](hidden), y))
        except MemoryError:
            assert (place, number) == (2, 8)

    # Shares in one piece: it is the last pass of its contribution.
    _, record, _ = trained(wide(), body, sizes=(32, 32, 32))
    assert [outcome.applied for outcome in record.outcomes].count(False) == 1
    assert sum(outcome.batch for outcome in record.outcomes) == 2 * 203


def test_shared_weights_that_are_computed_again_are_summed_after_the_pass(early: list[int]) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.head = nn.Linear(6, 128), nn.Linear(128, 128), nn.Linear(128, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            for _ in range(2):
                hidden = torch.tanh(checkpoint(self.shared, hidden, use_reentrant=True))
            return self.head(hidden)

    torch.manual_seed(3)
    trained(Again(), plain)
    assert not early


class Sometimes(nn.Module):
    """Passes a shared layer once or twice; where it is computed again in the backward pass it gets two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(6, 128), nn.Linear(128, 128), nn.Linear(128, 3)

    def forward(self, x: Tensor, again: bool, *, computed_again: bool = True) -> Tensor:
        hidden = self.first(x)
        for _ in range(2 if again else 1):
            once = checkpoint(self.shared, hidden, use_reentrant=True) if computed_again else self.shared(hidden)
            hidden = torch.tanh(once)
        return self.head(hidden)


def test_a_gradient_that_comes_late_for_once_is_passed_over(
    early: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A model that is orderly at first; from then on that worker sums after the pass."""

    def body(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
        run.backward(F.cross_entropy(model(x, again=place == 0 and number == 5), y))

    torch.manual_seed(3)
    # Shares in one piece: every pass is the last one of its contribution, so its parts are summed beside it.
    _, record, _ = trained(Sometimes(), body, sizes=(32, 32, 32))
    assert [outcome.applied for outcome in record.outcomes].count(False) == 1
    assert "added to after it had been summed" in capfd.readouterr().err
    assert early


@pytest.mark.parametrize("number_of_late", [2, 5, 8])
def test_no_late_gradient_is_in_a_sum(number_of_late: int) -> None:
    """Late is only who sums beside the pass: the last of a contribution. Which one that is, the shares decide."""
    twice: list[Tensor] = []

    def body(run: pliant.Run, model: nn.Module, place: int, number: int, x: Tensor, y: Tensor) -> None:
        again = place == 0 and number == number_of_late
        twice.extend([x] if again else [])
        run.backward(F.cross_entropy(model(x, again=again), y))

    def loss_again(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, again=any(x is each for each in twice), computed_again=False), y)

    torch.manual_seed(3)
    model = Sometimes()
    trained_model, record, drawn = trained(model, body, sizes=(6, 7, 5))
    counts = [[ticket.micro_batches for ticket in row] for row in record.tickets]
    optimizer = sgd(model)
    for outcome, round_ in zip(record.outcomes, reference.contributions(drawn, counts), strict=True):
        passes = [x for x, _, _ in round_[0]]
        # The first contribution is summed after its pass: it tells whether the parts can be relied on.
        late = outcome.round > 1 and bool(passes) and any(passes[-1] is x for x in twice)
        assert outcome.applied is not late
        if outcome.applied:
            sums = [reference.gradient_sum(model, loss_again, part) for part in round_]
            reference.update(model, optimizer, reference.added([s for s, _ in sums]), sum(w for _, w in sums), None)
    assert_close(trained_model, model)
