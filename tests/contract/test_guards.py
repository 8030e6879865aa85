"""Schedulers stepped by the script, two loops at once, wrapped objects, a checkpoint's place: found at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

import pliant
from pliant import settings
from pliant.errors import Drifted
from pliant.testing import Together, together

Join = Callable[..., pliant.Run]


def dataset(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(params=[1, 2], ids=["alone", "group"])
def each(request: pytest.FixtureRequest) -> Callable[[Callable[[Join], Any]], Any]:
    """Run a script that takes its ``join``, alone or on two workers."""

    def each(script: Callable[[Join], Any]) -> Any:
        if request.param == 1:
            return script(pliant.join)
        return together(2, lambda handle: script(handle.join))[0]

    return each


def body(run: pliant.Run, model: nn.Module, batch: Any) -> bool:
    x, y = batch
    run.backward(F.cross_entropy(model(x), y))
    return run.step()


# -- schedulers


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, total_iters=4), schedulers.ExponentialLR(optimizer, 0.99)], optimizer
    )


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.LinearLR(optimizer, total_iters=4), schedulers.ExponentialLR(optimizer, 0.99)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, 3),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=200),
    "chained": chained,
    "sequential": sequential,
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 5),
}


def scheduled_script(
    make: Callable[[torch.optim.Optimizer], Any], *, given: bool, where: str, by: str = "batch"
) -> Callable[[Join], int]:
    def script(join: Join) -> int:
        model, optimizer = problem()
        scheduler = make(optimizer)
        with join(model, optimizer, batch=8, scheduler=scheduler if given else None, schedule_by=by) as run:
            for _ in run.epochs(3):
                for batch in run.batches(dataset(), size=4):
                    if where == "before":
                        scheduler.step()
                    body(run, model, batch)
                    if where == "after":
                        scheduler.step()
                if where == "epoch":
                    scheduler.step()
            return run.round

    return script


STEPPED = r"scheduler.step\(\) was called by the script: remove it from the loop"
UNKNOWN = r"moved by a scheduler that join does not know of: give it to join\(scheduler=…\)"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("where", ["before", "after", "epoch"])
@pytest.mark.parametrize("by", ["batch", "epoch"])
def test_a_given_scheduler_that_the_script_steps_too(
    each: Callable[[Callable[[Join], Any]], Any], where: str, by: str
) -> None:
    with pytest.raises(pliant.UsageError, match=STEPPED):
        each(scheduled_script(KINDS["step"], given=True, where=where, by=by))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scheduler_is_recognised(kind: str) -> None:
    with pytest.raises(pliant.UsageError, match=STEPPED):
        scheduled_script(KINDS[kind], given=True, where="after")(pliant.join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["batch", "epoch"])
def test_pliants_own_steps_are_no_trouble(each: Callable[[Callable[[Join], Any]], Any], kind: str, by: str) -> None:
    assert each(scheduled_script(KINDS[kind], given=True, where="", by=by)) == 12


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("where", ["after", "epoch"])
def test_a_scheduler_that_join_was_not_given(each: Callable[[Callable[[Join], Any]], Any], where: str) -> None:
    with pytest.raises(pliant.UsageError, match=UNKNOWN):
        each(scheduled_script(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9), given=False, where=where))


def test_a_scheduler_that_nobody_steps_is_harmless(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    assert each(scheduled_script(KINDS["step"], given=False, where="")) == 12


def test_a_group_that_is_added_later_brings_its_own_rate(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    def script(join: Join) -> int:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        schedulers.StepLR(optimizer, 3)
        with join(model, optimizer, batch=8, delay=0) as run:
            for epoch in run.epochs(2):
                if epoch == 1:
                    optimizer.add_param_group({"params": [model.bias], "lr": 0.5})
                for batch in run.batches(dataset(), size=4):
                    body(run, model, batch)
            return run.round

    assert each(script) == 8


def test_a_plateau_follows_evaluate_and_is_no_trouble(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    def script(join: Join) -> float:
        model, optimizer = problem()
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0)
        with join(model, optimizer, batch=8, scheduler=plateau) as run:
            for _ in run.epochs(4):
                for batch in run.batches(dataset(), size=4):
                    body(run, model, batch)
                run.evaluate(lambda batch: (1.0, 1), dataset(), size=8)
        return optimizer.param_groups[0]["lr"]

    assert each(script) == pytest.approx(0.1 * 0.1**3)


def test_rates_set_by_hand_stay_legal(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    def script(join: Join) -> float:
        model, optimizer = problem()
        with join(model, optimizer, batch=8) as run:
            for epoch in run.epochs(2):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)
                for batch in run.batches(dataset(), size=4):
                    body(run, model, batch)
            return run.rate

    assert each(script) == pytest.approx(0.05)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model, optimizer = problem()
    other = schedulers.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 3)
    with pytest.raises(pliant.UsageError, match="was made for another optimizer"):
        pliant.join(model, optimizer, batch=8, scheduler=other)


# -- two loops at once


def test_zip_of_two_loops_is_refused(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    seen: list[int] = []

    def script(join: Join) -> None:
        model, optimizer = problem()
        with join(model, optimizer, batch=8) as run:
            for first, _ in zip(run.batches(dataset(), size=4), run.batches(dataset(), size=4), strict=True):
                seen.append(1)
                body(run, model, first)

    with pytest.raises(pliant.UsageError, match=r"while another loop over batches is open.*zip"):
        each(script)
    assert not seen


def test_loops_one_after_the_other_in_all_shapes(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    def script(join: Join) -> int:
        model, optimizer = problem()
        with join(model, optimizer, batch=8, delay=0) as run:
            unused = run.batches(dataset(), size=4)
            for batch in itertools.chain(run.batches(dataset(), size=4), run.batches(dataset(16), size=4)):
                body(run, model, batch)
            assert run.samples == 48
            for _, batch in enumerate(run.batches(dataset(16), size=4)):
                body(run, model, batch)
            assert run.samples == 64
            for batch in itertools.islice(run.batches(dataset(), size=4), 2):
                body(run, model, batch)
            for batch in run.batches(dataset(16), size=4):
                body(run, model, batch)
                break
            late = run.batches(dataset(16), size=4)
            for batch in unused:
                body(run, model, batch)
            for batch in late:
                body(run, model, batch)
            return run.samples

    assert each(script) > 64 + 48


def test_a_loop_begun_and_dropped_lets_the_next_one_begin(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    def script(join: Join) -> int:
        model, optimizer = problem()
        with join(model, optimizer, batch=8, delay=0) as run:
            begun = iter(run.batches(dataset(), size=4))
            body(run, model, next(begun))
            with pytest.raises(pliant.UsageError, match="another loop over batches is open"):
                run.batches(dataset(), size=4)
            del begun
            before = run.samples
            for batch in run.batches(dataset(), size=4):
                body(run, model, batch)
            return run.samples - before

    assert each(script) >= 32


# -- weights that differ


@pytest.mark.parametrize("delay", [0, 1])
def test_weights_that_differ_from_the_start_are_found_at_once(delay: int) -> None:
    """Code of one worker only, in the first round: not 32 rounds later."""
    rounds: list[int] = []

    def script(handle: Together) -> None:
        model, optimizer = problem()
        changed = handle.place == 0
        with handle.join(model, optimizer, batch=8, delay=delay) as run:
            for batch in run.batches(dataset(400), size=4):
                if body(run, model, batch) and not changed:
                    changed = True
                    with torch.no_grad():
                        next(model.parameters())[0, 0] += 1.0
                rounds.append(run.round)

    with pytest.raises(Drifted, match=r"weights differ from the others' after round [1248]:"):
        together(2, script)
    assert max(rounds) <= 10


# -- wrapped objects


class AcceleratedOptimizer(torch.optim.Optimizer):
    """The shape of Accelerate's: an Optimizer that was never initialised as one, around another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class AcceleratedScheduler:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        self.scheduler.step()


def fabric_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """The shape of Fabric's: a class made on the spot, with the dict of the wrapped one."""

    class _FabricOptimizer:
        def __init__(self) -> None:
            self.__dict__.update(optimizer.__dict__)
            self._optimizer = optimizer

        @property
        def optimizer(self) -> torch.optim.Optimizer:
            return self._optimizer

    return type("FabricSGD", (_FabricOptimizer, type(optimizer)), {})()


class _FabricModule(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    @property
    def module(self) -> nn.Module:
        return self._forward_module


@pytest.mark.parametrize("wrap", [AcceleratedOptimizer, fabric_optimizer])
def test_wrapped_optimizers(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    model, optimizer = problem()
    with pytest.raises(pliant.UsageError, match=r"optimizer is wrapped in \w+ .*: give join the plain one, .optimizer"):
        pliant.join(model, wrap(optimizer), batch=8)
    pliant.join(model, optimizer, batch=8).close()


def test_wrapped_schedulers() -> None:
    model, optimizer = problem()
    scheduler = AcceleratedScheduler(schedulers.StepLR(optimizer, 3))
    with pytest.raises(pliant.UsageError, match=r"wrapped in AcceleratedScheduler .*: give join the plain one"):
        pliant.join(model, optimizer, batch=8, scheduler=scheduler)


def test_wrapped_models() -> None:
    model, optimizer = problem()
    with pytest.raises(pliant.UsageError, match=r"wrapped in _FabricModule: give join the plain module, model.module"):
        pliant.join(_FabricModule(model), optimizer, batch=8)
    inside = nn.ModuleDict({"generator": nn.DataParallel(model)})
    with pytest.raises(pliant.UsageError, match=r"generator is wrapped in DataParallel: .*generator.module"):
        pliant.join(inside, optimizer, batch=8)


def test_a_compiled_model_is_a_plain_one() -> None:
    model, optimizer = problem()
    compiled = torch.compile(model, backend="eager")
    with pliant.join(compiled, optimizer, batch=8) as run:  # type: ignore[arg-type]
        for batch in run.batches(dataset(), size=4):
            body(run, compiled, batch)  # type: ignore[arg-type]
    assert run.round == 4


# -- clearing gradients to zero


@pytest.mark.parametrize("size", [4, 8])
def test_clearing_to_zero_is_named_for_what_it_is(each: Callable[[Callable[[Join], Any]], Any], size: int) -> None:
    """Right after an update the cleared gradients are nobody's own backward pass."""

    def script(join: Join) -> None:
        model, optimizer = problem()
        with join(model, optimizer, batch=8, delay=0) as run:
            for batch in run.batches(dataset(), size=size):
                body(run, model, batch)
                optimizer.zero_grad(set_to_none=False)

    with pytest.raises(pliant.UsageError, match=r"gradients were cleared or replaced .*remove optimizer.zero_grad"):
        each(script)


def test_clearing_to_zero_before_the_first_batch_is_harmless(each: Callable[[Callable[[Join], Any]], Any]) -> None:
    def script(join: Join) -> int:
        model, optimizer = problem()
        F.cross_entropy(model(torch.zeros(2, 6)), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.zero_grad(set_to_none=False)
        with join(model, optimizer, batch=8) as run:
            for batch in run.batches(dataset(), size=4):
                body(run, model, batch)
        return run.round

    assert each(script) == 4


# -- where checkpoints go


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    yield tmp_path


def resolved(checkpoint: Any) -> settings.Settings:
    return settings.resolved(
        problem()[1],
        batch=8,
        delay=1,
        correction="none",
        rates=None,
        clip_norm=None,
        schedule_by="batch",
        seed=0,
        dead_after=5.0,
        hung_after=600.0,
        checkpoint=checkpoint,
    )


def test_a_relative_checkpoint_is_where_the_script_was_at_join(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("saved", Path("saved"), "./saved", "../start/saved"):
        assert resolved(name).checkpoint == str(elsewhere / "start" / "saved")
    model, optimizer = problem()
    with pliant.join(model, optimizer, batch=8, checkpoint="saved", checkpoint_every=1e-6) as run:
        (elsewhere / "other").mkdir()
        monkeypatch.chdir(elsewhere / "other")
        for batch in run.batches(dataset(), size=4):
            body(run, model, batch)
    assert list((elsewhere / "start" / "saved").rglob("*")) and not list((elsewhere / "other").iterdir())


def test_a_link_keeps_its_name(elsewhere: Path) -> None:
    (elsewhere / "disk").mkdir()
    (elsewhere / "link").symlink_to(elsewhere / "disk")
    assert resolved(elsewhere / "link" / "saved").checkpoint == str(elsewhere / "link" / "saved")


@pytest.mark.parametrize("address", ["s3://bucket/run", "memory://x", "simplecache::s3://bucket/run", "file:///x/../y"])
def test_addresses_of_fsspec_are_left_as_they_are(address: str) -> None:
    assert resolved(address).checkpoint == address
    assert resolved(address).agreed()["checkpoint"] == address
