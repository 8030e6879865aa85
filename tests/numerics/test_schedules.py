"""Any of torch's schedulers, counted in samples, the same on all workers; Adam's moments as the rule says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

import pliant
from numerics.trainings import training_of
from pliant.core.tickets import Kind
from pliant.tensors import serialize
from pliant.tensors.gradients import FlatGradients
from pliant.testing import Together, together
from pliant.worker.elastic.catch_up import CatchUp
from pliant.worker.snapshot import META, snapshot
from pliant.worker.training import Training

SAMPLES, REFERENCE = 203, 16
STEPS = 2 * SAMPLES // REFERENCE


def warmed(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.CosineAnnealingLR(optimizer, STEPS)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[5])


MAKERS: dict[str, Callable[[Any], Any]] = {
    "warm-up and cosine": warmed,
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 5),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def dataset(n: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def hyper(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    group = optimizer.param_groups[0]
    return tuple(group[name] for name in ("lr", "momentum", "betas") if name in group)


def train(run: pliant.Run, mine: nn.Module, epochs: int = 2) -> None:
    for _ in run.epochs(epochs):
        for x, y in run.batches(dataset(), size=5):
            run.backward(F.cross_entropy(mine(x), y))
            run.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "plateau"])
@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_a_schedule_is_stepped_once_per_reference_batch_of_samples(optimizer: str, name: str, rule: str) -> None:
    def script(handle: Together) -> Any:
        mine = model()
        own = OPTIMIZERS[optimizer](mine.parameters())
        batch = pliant.Floating(REFERENCE, at_most=64)
        with handle.join(mine, own, batch=batch, delay=1, scheduler=MAKERS[name](own), rates=rule) as run:
            train(run, mine)
            return hyper(own), run.samples, run.scheduled, handle.record

    results = together(3, script, paces=(1.0, 0.5, 0.3))
    _, samples, scheduled, record = results[0]
    assert samples == 2 * SAMPLES and (scheduled == samples if rule == "linear" else 0 < scheduled < 1.2 * samples)
    alone = OPTIMIZERS[optimizer]([nn.Parameter(torch.zeros(1))])
    stepped = MAKERS[name](alone)
    for _ in range(int(scheduled // REFERENCE)):
        alone.step()
        stepped.step()
    for values, *_ in results:
        assert values == hyper(alone)
    # The ramp is told the momentum in force, wherever the schedule has moved it.
    momenta = {outcome.momentum for outcome in record.outcomes if outcome.kind is Kind.TRAIN}
    assert len(momenta) > 3 if name == "one cycle" else len(momenta) == 1


def test_a_plateau_follows_every_evaluate_outside_of_a_loop_on_all_workers() -> None:
    results = [0.5, 0.7, 0.7, 0.7, 0.7, 0.2]

    def script(handle: Together) -> Any:
        mine = model()
        own = torch.optim.SGD(mine.parameters(), lr=0.08)
        scheduler = schedulers.ReduceLROnPlateau(own, factor=0.5, patience=1)
        rates: list[float] = []
        with handle.join(mine, own, batch=REFERENCE, scheduler=scheduler) as run:
            for epoch in run.epochs(len(results)):
                for x, y in run.batches(dataset(), size=5):
                    run.backward(F.cross_entropy(mine(x), y))
                    if run.step():
                        # Inside a loop: a question of the script's own.
                        run.evaluate(lambda batch: (9.0 * len(batch[1]), len(batch[1])), dataset(12), size=4)
                mean = run.evaluate(
                    lambda batch, epoch=epoch: (results[epoch] * len(batch[1]), len(batch[1])), dataset(30), size=7
                )
                assert mean == pytest.approx(results[epoch])
                rates.append(own.param_groups[0]["lr"])
        return rates, scheduler.state_dict()

    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.08)
    plain, expected = schedulers.ReduceLROnPlateau(alone, factor=0.5, patience=1), []
    for result in results:
        plain.step(result)
        expected.append(alone.param_groups[0]["lr"])
    assert expected[-1] < expected[0]
    for rates, told in together(3, script, paces=(1.0, 0.5, 0.3)):
        assert rates == expected
        assert told["num_bad_epochs"] == plain.num_bad_epochs and told["best"] == pytest.approx(plain.best)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_schedulers_state_travels_without_pickle_and_goes_on(name: str, optimizer: str) -> None:
    def made() -> tuple[Any, Any]:
        own = OPTIMIZERS[optimizer]([nn.Parameter(torch.zeros(1))])
        return own, MAKERS[name](own)

    def stepped(own: Any, scheduler: Any, number: int) -> None:
        own.step()
        scheduler.step(*((1.0 + number,) if name == "plateau" else ()))

    (one, giving), (other, taking) = made(), made()
    for number in range(7):
        stepped(one, giving, number)
    taking.load_state_dict(serialize.rebuilt(*serialize.flattened(giving.state_dict())))
    other.param_groups[0].update({name: one.param_groups[0][name] for name in one.param_groups[0] if name != "params"})
    other.step()
    for number in range(7, 14):
        stepped(one, giving, number)
        stepped(other, taking, number)
        assert hyper(other) == hyper(one)


class Line:
    """A donor's answers, when they are asked for."""

    failed = None

    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.answer: Any = None

    def request(self, era: int, as_of: int, want: Any) -> None:
        self.wanted = list(want)

    def arrived(self) -> Any:
        answer, self.answer = self.answer, None
        return answer

    def begun(self) -> None:
        return None

    def close(self) -> None: ...


@pytest.mark.parametrize("name", ["one cycle", "plateau"])
def test_a_newcomer_catches_up_with_rounds_and_results_in_their_order(name: str) -> None:
    """What happens while its state is on the way: a round, an ``evaluate``'s result, another round."""

    def made(seed: int) -> tuple[Training, dict[str, Any], nn.Module]:
        torch.manual_seed(seed)
        mine = nn.Linear(4, 2)
        own = torch.optim.SGD(mine.parameters(), lr=0.05, momentum=0.9)
        scheduler = MAKERS[name](own)
        training = training_of(mine, own, scheduler)
        return training, {"optimizer": own, "scheduler": scheduler, "scaler": None, "state": {}}, mine

    (donor, carried, given), (newcomer, taken, mine) = made(1), made(2)
    line = Line()
    takeover = CatchUp(newcomer, taken, lambda address: line)
    takeover.restart(["there"], 1, 10, keep=False)
    takeover.pursue(10)

    def updated(exchange: int, factor: float, samples: tuple[float, float]) -> None:
        means = FlatGradients(donor.parameters)
        for view in means.views:
            view.fill_(0.1 * exchange)
        gradients = {index: view.clone() for index, view in enumerate(means.views)}
        assert takeover.note(exchange, means, 0b11, factor, samples), "all of it is asked for, so it is kept"
        donor.catch_up(gradients, factor, None)
        donor.advance_schedule(*samples)

    # The newcomer has asked as of exchange 10; the donor answers as of 11.
    updated(11, 1.0, (0.0, 8.0))
    line.answer = 11, snapshot(donor, carried, line.wanted)
    assert META in line.wanted
    updated(12, 2.0, (8.0, 24.0))
    for exchange, result in ((13, 1.0), (14, 2.0), (15, 2.0), (16, 2.0)):
        takeover.note_result(exchange, result)
        donor.evaluated(result)
    updated(17, 3.0, (24.0, 48.0))
    takeover.pursue(17)
    assert takeover.complete
    for theirs, ours in zip(given.parameters(), mine.parameters(), strict=True):
        assert torch.equal(theirs, ours)
    assert hyper(newcomer.optimizer) == hyper(donor.optimizer)
    assert taken["scheduler"].state_dict() == carried["scheduler"].state_dict()
    takeover.close()
    donor.close()
    newcomer.close()


@pytest.mark.parametrize("correction", ["none", "lookahead"])
def test_moments_follow_the_batch_for_the_update_only(correction: str) -> None:
    """AdamW with betas and epsilon set by hand in every update, against ``sqrt(moments=True)``."""

    def script(handle: Together) -> Any:
        mine = model().double()
        own = torch.optim.AdamW(mine.parameters(), lr=0.01)
        seen: list[tuple[float, list[Tensor]]] = []
        used: list[tuple[float, tuple[float, float], float]] = []
        own.register_step_pre_hook(
            lambda *_: used.append(
                (own.param_groups[0]["lr"], own.param_groups[0]["betas"], own.param_groups[0]["eps"])
            )
        )
        rates = pliant.rates.sqrt(moments=True)
        batch = pliant.Floating(REFERENCE)
        with handle.join(mine, own, batch=batch, delay=1, rates=rates, correction=correction) as run:
            for _ in run.epochs(2):
                for x, y in run.batches(dataset(), size=9):
                    run.backward(F.cross_entropy(mine(x.double()), y))
                    run.step()
        assert own.param_groups[0]["betas"] == (0.9, 0.999) and own.param_groups[0]["eps"] == 1e-8
        return used, handle.record, seen

    for used, record, _ in together(2, script):
        factors = [o.factor for o in record.outcomes if o.kind is Kind.TRAIN and o.applied]
        assert len(used) == len(factors) and max(factors) > 1.0
        for (rate, betas, eps), factor in zip(used, factors, strict=True):
            assert rate == pytest.approx(0.01 * factor)
            assert eps == pytest.approx(1e-8 / factor)
            expected = [max(0.0, 1.0 - factor**2 * (1.0 - beta)) for beta in (0.9, 0.999)]
            assert betas == pytest.approx(expected)


def test_moments_belong_to_adam() -> None:
    mine = model()
    with pytest.raises(pliant.UsageError, match="only Adam and AdamW have those moments, leave moments=True out"):
        pliant.join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), batch=8, rates=pliant.rates.sqrt(moments=True))


def test_facts_are_there_from_the_start_and_after() -> None:
    def script(handle: Together) -> Any:
        mine = copy.deepcopy(model())
        own = torch.optim.SGD(mine.parameters(), lr=0.05, momentum=0.9)
        with handle.join(mine, own, batch=pliant.Floating(REFERENCE), delay=1) as run:
            assert (run.noise_scale, run.efficiency, run.scheduled) == (None, None, 0.0)
            train(run, mine, epochs=4)
            return run.noise_scale, run.efficiency, run.scheduled

    first, *others = together(3, script)
    assert all(other == first for other in others)
    scale, efficiency, scheduled = first
    assert scale is not None and scale >= 0.0 and scheduled == 4 * SAMPLES
    assert efficiency is not None and 0.0 < efficiency <= 16.0 and math.isfinite(efficiency)
