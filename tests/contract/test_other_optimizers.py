"""Optimizers beside the one given to join, alone and in a group of threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import TensorDataset

import pliant
from pliant.testing import Together, together
from pliant.worker.session import appointed

Body = Callable[[nn.Module, torch.Tensor], None]
"""what the script does in each micro-batch besides: (model, x)"""


def dataset(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def trained(join: Callable[..., pliant.Run], make: Callable[[nn.Module], Body], **settings: Any) -> None:
    """A whole script: ``make(model)`` is made before the loop."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    body = make(model)
    with join(model, optimizer, batch=8, **settings) as run:
        for _ in run.epochs(2):
            for x, y in run.batches(dataset(), size=4):
                body(model, x)
                run.backward(F.cross_entropy(model(x), y))
                run.step()


@pytest.fixture(params=[1, 2], ids=["alone", "group"])
def run_script(request: pytest.FixtureRequest) -> Callable[..., None]:
    def run_script(make: Callable[[nn.Module], Body], **settings: Any) -> None:
        if request.param == 1:
            trained(pliant.join, make, **settings)
        else:
            together(2, lambda handle: trained(handle.join, make, **settings))

    return run_script


@pytest.fixture(autouse=True)
def no_hook_stays() -> Any:
    before = len(_global_optimizer_pre_hooks)
    yield
    assert len(_global_optimizer_pre_hooks) == before


def discriminator(model: nn.Module) -> Body:
    """A GAN's second network."""
    other = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(other.parameters())

    def body(model: nn.Module, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        other(x).mean().backward()
        optimizer.step()

    return body


def second_on_the_model(model: nn.Module) -> Body:
    """Muon + AdamW: two optimizers for one model."""
    optimizer = torch.optim.AdamW([model.bias])  # type: ignore[list-item]
    return lambda model, x: optimizer.step()


def adversarial(model: nn.Module) -> Body:
    """An inner loop with an optimizer of its own, made anew for each micro-batch."""

    def body(model: nn.Module, x: torch.Tensor) -> None:
        delta = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([delta], lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            (gradient,) = torch.autograd.grad(-model(x + delta).square().mean(), [delta])
            delta.grad = gradient
            inner.step()

    return body


def adversarial_collected(model: nn.Module) -> Body:
    """The same, with each optimizer surely gone before the next: an address may come twice."""
    body = adversarial(model)

    def collected(model: nn.Module, x: torch.Tensor) -> None:
        body(model, x)
        gc.collect()

    return collected


def adversarial_kept(model: nn.Module) -> Body:
    """The same, kept alive: what counts are steps."""
    kept: list[torch.optim.Optimizer] = []

    def body(model: nn.Module, x: torch.Tensor) -> None:
        kept.append(torch.optim.SGD([x.clone().requires_grad_()], lr=0.1))
        kept[-1].step()

    return body


SECOND = r"a second optimizer \(Adam\) goes on from micro-batch to micro-batch.*GAN: both networks in one module"
OWN = r"another optimizer \(\w+\) changes parameters of the run.*as groups with their own settings into the one"


@pytest.mark.parametrize(("make", "match"), [(discriminator, SECOND), (second_on_the_model, OWN)])
def test_what_would_train_beside_the_run_is_refused(
    run_script: Callable[..., None], make: Callable[[nn.Module], Body], match: str
) -> None:
    with pytest.raises(pliant.UsageError, match=match) as caught:
        run_script(make)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [adversarial, adversarial_collected, adversarial_kept])
def test_inner_loops_are_left_alone(run_script: Callable[..., None], make: Callable[[nn.Module], Body]) -> None:
    run_script(make)


class Wrapper:
    """An object with parameters() that is no module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def parameters(self) -> Any:
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)])
def test_what_state_holds_is_the_runs(wrap: Callable[[nn.Module], Any]) -> None:
    model, ema = nn.Linear(6, 3), nn.Linear(6, 3)
    run = pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=8, state={"ema": wrap(ema)})
    other = torch.optim.SGD(ema.parameters(), lr=0.1)
    for x, y in run.batches(dataset(), size=4):
        run.backward(F.cross_entropy(model(x), y))
        run.step()
        with pytest.raises(pliant.UsageError, match=OWN):
            other.step()
    run.close()
    other.step()


def test_outside_of_a_loop_other_parameters_are_nobodys_business() -> None:
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=8) as run:
        for _ in run.epochs(2):
            optimizer.step()
            for x, y in run.batches(dataset(), size=4):
                run.backward(F.cross_entropy(model(x), y))
                run.step()
            optimizer.step()
            run.evaluate(lambda batch: (optimizer.step() or 1.0, 1), dataset(), size=4)


def test_after_a_failure_everything_is_the_scripts_own() -> None:
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    with pytest.raises(KeyError), pliant.join(model, optimizer, batch=8) as run:
        for _ in run.batches(dataset(), size=4):
            second.step()
            raise KeyError
    for _ in range(3):
        second.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        optimizer.step()


class Halves(torch.optim.Optimizer):
    """One optimizer made of two: what the refusal of Muon + AdamW says to write."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        matrices = [p for group in self.param_groups for p in group["params"] if p.ndim > 1]
        vectors = [p for group in self.param_groups for p in group["params"] if p.ndim == 1]
        self.parts = [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(vectors, lr=0.1)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_an_optimizer_may_be_made_of_others() -> None:
    def worker(handle: Together) -> list[torch.Tensor]:
        torch.manual_seed(handle.place)
        model = nn.Linear(6, 3)
        with handle.join(model, Halves(model.parameters()), batch=8, delay=0) as run:
            for x, y in run.batches(dataset(), size=4):
                run.backward(F.cross_entropy(model(x), y))
                run.step()
        return [p.detach() for p in model.parameters()]

    first, second = together(2, worker)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_other_threads_may_train_what_they_like() -> None:
    """A thread that trains something else is not looked at; one that trains the model is."""
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    raised: list[BaseException] = []

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except BaseException as error:
            raised.append(error)

    def beside(optimizer: torch.optim.Optimizer) -> None:
        thread = threading.Thread(target=stepped, args=(optimizer,))
        thread.start()
        thread.join()

    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=8) as run:
        for x, y in run.batches(dataset(), size=4):
            beside(optimizer)
            run.backward(F.cross_entropy(model(x), y))
            run.step()
        assert not raised
        beside(torch.optim.SGD(model.parameters(), lr=0.1))
    assert [type(error) for error in raised] == [pliant.UsageError]


def test_runs_one_after_the_other_in_one_process() -> None:
    for _ in range(2):
        trained(pliant.join, adversarial)


# -- a second join on the same optimizer


def test_a_second_join_while_the_first_run_is_open() -> None:
    """A notebook's habit: the cell with `run = pliant.join(…)` is run twice."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = pliant.join(model, optimizer, batch=8)
    with pytest.raises(pliant.UsageError, match=r"in a run that is still open: end that one first with run.close\(\)"):
        pliant.join(model, optimizer, batch=8)
    run.close()
    with pliant.join(model, optimizer, batch=8) as run:
        for x, y in run.batches(dataset(), size=4):
            run.backward(F.cross_entropy(model(x), y))
            run.step()
    assert run.round == 4


def test_a_join_that_failed_leaves_the_optimizer_free() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def failing(offer: Any) -> Any:
        offer.prepared(False)
        raise pliant.PliantError("no place")

    with appointed(failing), pytest.raises(pliant.PliantError, match="no place"):
        pliant.join(model, optimizer, batch=8)
    optimizer.step()
    pliant.join(model, optimizer, batch=8).close()
