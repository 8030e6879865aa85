"""What Pliant refuses: one line that says what is wrong and what to do, raised at the script's own line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import pliant
from pliant.errors import NonFiniteLoss, PliantError, Refused
from pliant.testing import Together, together

SOURCE = Path(pliant.__file__).parent
Script = Callable[[Any, nn.Module, torch.optim.Optimizer], None]


def dataset(samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def refused(match: str, called: Callable[[], Any], kind: type[PliantError] = pliant.UsageError) -> None:
    """It raises ``kind`` with one line that matches; hardly a frame of the traceback is Pliant's."""
    with pytest.raises(kind, match=match) as caught:
        called()
    assert "\n" not in str(caught.value)
    own = [
        entry
        for entry in caught.traceback
        if Path(entry.path).is_relative_to(SOURCE) and "testing" not in Path(entry.path).parts
    ]
    assert len(own) <= 2, own
    assert caught.value.__cause__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("batch", [0, -1, 2.5, "64", True, None, pliant.Floating(0), pliant.Floating(2.5)])  # type: ignore[arg-type]
def test_a_batch_that_is_no_positive_whole_number(batch: Any) -> None:
    refused("batch is .*: give a positive whole number", lambda: pliant.join(*problem(), batch=batch))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch": pliant.Floating(8, at_most=4)}, "at_most=4 is below reference=8: raise"),
        ({"delay": 2}, "delay is 2: choose one of 'auto', 1, 0"),
        ({"delay": True}, "delay is True: choose"),
        ({"correction": "hope"}, "correction is 'hope': choose one of 'lookahead', 'none'"),
        ({"rates": "cubic"}, "rates is 'cubic': choose one of"),
        ({"schedule_by": "round"}, "schedule_by is 'round': choose"),
        ({"scheduler": 3}, "scheduler is a int: give one of torch.optim.lr_scheduler"),
        ({"state": [0.0]}, "state is a list: give a dict"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0: give a positive number"),
        ({"dead_after": 0}, "dead_after is 0: give seconds, at least 0.5"),
    ],
)
def test_other_settings(settings: dict[str, Any], match: str) -> None:
    refused(match, lambda: pliant.join(*problem(), **{"batch": 8, **settings}))


def wrapped(model: nn.Module) -> nn.Module:
    """DDP's constructor wants a process group; its type is all that matters here."""
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = model
    return ddp


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "optimize", "match"),
    [
        (lambda: nn.Linear(2, 2), torch.optim.LBFGS, "LBFGS .*: use SGD, Adam"),
        (lambda: nn.Linear(2, 2), torch.optim.SparseAdam, "SparseAdam .*: use Adam"),
        (lambda: nn.Linear(2, 2), lambda p: [torch.optim.SGD(p, lr=0.1)] * 2, "several optimizers .*: put the param"),
        (lambda: nn.Linear(2, 2), lambda p: "sgd", "optimizer is a str: give a torch.optim optimizer"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.optim.SGD, "0 has sparse=True: build it with"),
        (lambda: wrapped(nn.Linear(2, 2)), torch.optim.SGD, "wrapped in DistributedDataParallel: .* model.module"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), torch.optim.SGD, "wrapped in DataParallel: .* model.module"),
        (
            lambda: nn.Linear(2, 2),
            lambda p: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),
            "the optimizer has no parameter of this model",
        ),
        (frozen, torch.optim.SGD, "no parameter of the optimizer requires a gradient"),
    ],
)
def test_models_and_optimizers(make: Callable[[], nn.Module], optimize: Any, match: str) -> None:
    model = make()
    refused(match, lambda: pliant.join(model, optimize(model.parameters()), batch=8))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(3)


class Wandering:
    """Samples without a number."""

    def __getitem__(self, index: int) -> int:
        return index


def backward_outside(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.backward(model(torch.randn(2, 6)).mean())


def backward_after_the_loop(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loop(run, model)
    run.backward(model(torch.randn(2, 6)).mean())


def step_outside(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.step()


def loss_per_sample(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y, reduction="none"))


def loss_as_a_number(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y).item())  # type: ignore[arg-type]


def negative_weight(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y), weight=-1)


def left_over_step(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def left_over_zero_grad(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        optimizer.zero_grad()
        run.backward(F.cross_entropy(model(x), y))
        run.step()


def zero_grad_before_step(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=8):
        run.backward(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        run.step()


def zero_grad_to_zero(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y))
        run.step()
        optimizer.zero_grad(set_to_none=False)


def nested(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in run.batches(dataset(), size=4):
        loop(run, model)


def evaluate_in_evaluate(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def measure(batch: Any) -> tuple[float, int]:
        return run.evaluate(lambda inner: (1.0, 1), dataset(), size=4), 1

    run.evaluate(measure, dataset(), size=4)


def loop(run: pliant.Run, model: nn.Module, samples: Any = None, size: Any = 4, **options: Any) -> None:
    for x, y in run.batches(dataset() if samples is None else samples, size=size, **options):
        run.backward(F.cross_entropy(model(x), y))
        run.step()


def own_backward(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        F.cross_entropy(model(x), y).backward()
        run.step()


def own_backward_after_some(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (x, y) in enumerate(run.batches(dataset(), size=4)):
        loss = F.cross_entropy(model(x), y)
        if number < 3:
            run.backward(loss)
        else:
            loss.backward()
        run.step()


def two_losses(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y))
        run.backward(model(x).square().mean())


def measure_without_count(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.evaluate(lambda batch: model(batch[0]).sum(), dataset(), size=4)


def no_epochs(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(iter(run.epochs()))


def epochs_without_batches(run: pliant.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in run.epochs(samples=10):
        pass


CLEARED = "gradients were cleared or replaced by the script: remove optimizer.zero_grad"
STEPPED = r"optimizer.step\(\) was called by the script: remove it from the loop; run.step"
LOOPS: list[tuple[Script, str]] = [
    (backward_outside, r"backward was called outside of a loop over run.batches"),
    (backward_after_the_loop, r"backward was called outside of a loop over run.batches"),
    (step_outside, r"step was called outside of a loop over run.batches"),
    (loss_per_sample, r"the loss is not a scalar but \(4,\): take its mean"),
    (loss_as_a_number, "the loss is not a scalar but float: take its mean"),
    (negative_weight, "weight is -1: give the number of samples or tokens"),
    (left_over_step, STEPPED),
    (left_over_zero_grad, CLEARED),
    (zero_grad_before_step, CLEARED),
    (zero_grad_to_zero, CLEARED),
    (own_backward, r"gradients were computed without Pliant.*: replace loss.backward\(\) by run.backward\(loss\)"),
    (own_backward_after_some, "gradients were (computed without Pliant|cleared or replaced by the script)"),
    (two_losses, "backward was called twice for one micro-batch: add the losses up"),
    (measure_without_count, r"evaluate's measure returned a Tensor: return \(sum, count\), two numbers"),
    (nested, "batches was called while another loop over batches is open: finish or break it first"),
    (evaluate_in_evaluate, "evaluate was called inside evaluate: finish the first one"),
    (lambda run, model, _: loop(run, model, Stream()), "IterableDataset has no positions .*: use a map-style"),
    (lambda run, model, _: loop(run, model, Wandering()), "Wandering is not a map-style dataset: it needs"),
    (lambda run, model, _: loop(run, model, size=0), "size is 0: give a positive whole number"),
    (lambda run, model, _: loop(run, model, size=2.5), "size is 2.5: give a positive whole number"),
    (lambda run, model, _: loop(run, model, shuffle=True), "does not take shuffle: .*order="),
    (no_epochs, "epochs takes one of these: a number of epochs, samples=N, steps=N"),
    (epochs_without_batches, "an epoch trained on no sample, .*: call batches in it"),
]


@pytest.mark.parametrize(("script", "match"), LOOPS)
def test_alone(script: Script, match: str) -> None:
    model, optimizer = problem()

    def whole() -> None:
        with pliant.join(model, optimizer, batch=8) as run:
            script(run, model, optimizer)

    refused(match, whole)


@pytest.mark.parametrize(("script", "match"), LOOPS)
def test_in_a_group(script: Script, match: str) -> None:
    def worker(handle: Together) -> None:
        model, optimizer = problem()
        with handle.join(model, optimizer, batch=8) as run:
            script(run, model, optimizer)

    refused(match, lambda: together(2, worker))


def test_the_end_of_the_with_block() -> None:
    model, optimizer = problem()
    with pliant.join(model, optimizer, batch=8) as run:
        loop(run, model)
    refused("the run is closed: call batches and evaluate inside the with block", lambda: loop(run, model))
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("order", [lambda epoch, n: [n], lambda epoch, n: [[0]], lambda epoch, n: [-1]])
def test_an_order_with_other_indices(order: Any) -> None:
    model, optimizer = problem()
    run = pliant.join(model, optimizer, batch=8, order=order)
    refused("must return indices from 0 to 39", lambda: loop(run, model))
    run.close()


# -- workers that do not do the same


def of_other_length(handle: Together, run: pliant.Run, model: nn.Module) -> None:
    loop(run, model, dataset(40 + handle.place))


def evaluated_by_the_leader_only(handle: Together, run: pliant.Run, model: nn.Module) -> None:
    loop(run, model)
    if run.is_leader:
        run.evaluate(lambda batch: (1.0, 1), dataset(), size=4)


def evaluated_by_the_leader_only_between_loops(handle: Together, run: pliant.Run, model: nn.Module) -> None:
    evaluated_by_the_leader_only(handle, run, model)
    loop(run, model)


def evaluated_by_the_leader_only_inside_the_loop(handle: Together, run: pliant.Run, model: nn.Module) -> None:
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y))
        if run.step() and run.is_leader:
            run.evaluate(lambda batch: (1.0, 1), dataset(), size=4)


def evaluated_at_any_time(handle: Together, run: pliant.Run, model: nn.Module) -> None:
    for x, y in run.batches(dataset(400), size=4):
        run.backward(F.cross_entropy(model(x), y))
        if not run.step():
            run.evaluate(lambda batch: (1.0, 1), dataset(), size=4)


def left_early_by_one(handle: Together, run: pliant.Run, model: nn.Module) -> None:
    for _ in run.epochs(1 + handle.place):
        loop(run, model)


@pytest.mark.parametrize("delay", [1, 0])
@pytest.mark.parametrize(
    ("script", "match"),
    [
        (of_other_length, "dataset lengths differ: 40 samples on w0 but 41 on w1; give batches the same dataset"),
        (evaluated_by_the_leader_only, "w0 is in the start of evaluate while w1 is in the end of the script: call"),
        (
            evaluated_by_the_leader_only_between_loops,
            "w0 is in the start of evaluate while w1 is in the start of batches: .*not under is_leader",
        ),
        (
            evaluated_by_the_leader_only_inside_the_loop,
            "w0 is in the start of evaluate while w1 is in the middle of batches: .*not under is_leader",
        ),
        (left_early_by_one, "w0 is in the end of the script while w1 is in the start of batches: call"),
    ],
)
def test_workers_that_differ(script: Callable[[Together, pliant.Run, nn.Module], None], match: str, delay: int) -> None:
    def worker(handle: Together) -> None:
        model, optimizer = problem()
        with handle.join(model, optimizer, batch=8, delay=delay) as run:
            script(handle, run, model)

    with pytest.raises(Refused, match=match):
        together(2, worker)


def test_evaluate_in_the_middle_of_a_round() -> None:
    def worker(handle: Together) -> None:
        model, optimizer = problem()
        with handle.join(model, optimizer, batch=8) as run:
            evaluated_at_any_time(handle, run, model)

    with pytest.raises(PliantError, match=r"in the middle of a round: .*right after run.step|is in the start of eval"):
        together(2, worker)


# -- losses that are not finite


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_is_not_finite_is_skipped(workers: int) -> None:
    def worker(handle: Together) -> None:
        model, optimizer = problem()
        after: dict[int, list[torch.Tensor]] = {}
        with handle.join(model, optimizer, batch=8, delay=0) as run:
            for x, y in run.batches(dataset(), size=4):
                loss = F.cross_entropy(model(x), y)
                run.backward(loss * math.inf if run.round == 1 and handle.place == workers - 1 else loss)
                if run.step():
                    after[run.round] = [p.detach().clone() for p in model.parameters()]
                    assert math.isnan(run.loss) == (run.round == 2)
            assert run.samples == 40
        assert [outcome.applied for outcome in handle.record.outcomes] == [True, False, True, True, True]
        assert all(torch.equal(p, q) for p, q in zip(after[1], after[2], strict=True))
        assert not all(torch.equal(p, q) for p, q in zip(after[2], after[3], strict=True))
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    together(workers, worker)


@pytest.mark.parametrize("workers", [1, 2])
def test_twenty_in_a_row_end_the_run(workers: int) -> None:
    def worker(handle: Together) -> None:
        model, optimizer = problem()
        with handle.join(model, optimizer, batch=8) as run:
            for x, _ in run.batches(dataset(400), size=4):
                run.backward(model(x).mean() * math.nan)
                run.step()

    refused(
        "20 rounds in a row had an infinite .*: lower the learning rate",
        lambda: together(workers, worker),
        NonFiniteLoss,
    )


def test_the_scripts_own_errors_pass_untouched() -> None:
    model, optimizer = problem()

    def measure(batch: Any) -> tuple[float, int]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught, pliant.join(model, optimizer, batch=8) as run:
        run.evaluate(measure, dataset(), size=4)
    assert caught.traceback[-1].name == "measure"


def test_a_scripts_frames_are_kept_in_pliants_errors() -> None:
    model, optimizer = problem()

    def measure(batch: Any) -> tuple[float, int]:
        run.step()
        return 1.0, 1

    with pytest.raises(pliant.UsageError) as caught, pliant.join(model, optimizer, batch=8) as run:
        run.evaluate(measure, dataset(), size=4)
    assert [entry.name for entry in caught.traceback][-1] == "measure"
