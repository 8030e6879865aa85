"""The lab's trainer: equal to plain PyTorch where it must be, and to the library's look-ahead."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from benchmarks.lab import models
from benchmarks.lab.data import Data
from benchmarks.lab.trainer import Learner, Plan, Trainer, orders, scheduled
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

SEEDS = (3, 5)


def images(count: int = 96) -> Data:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 1, 14, 14, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return Data("noise", pixels, labels, pixels[:20], labels[:20], 10)


class Plain(nn.Module):
    """The same network of one seed in torch's own layers."""

    def __init__(self, stack: models.Stack, place: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, models.FIRST, models.KERNEL, stride=models.STRIDE)
        self.second = nn.Conv2d(models.FIRST, models.SECOND, 2, stride=2)
        self.last = nn.Linear(models.BLOCKS * models.SECOND, 10)
        norms = [nn.BatchNorm2d(models.FIRST), nn.BatchNorm2d(models.SECOND)] if stack.running else []
        self.norms = nn.ModuleList(norms)
        own = {name: value[place] for name, value in stack.named_parameters()}
        with torch.no_grad():
            self.first.weight.copy_(own["w1"].t().view(models.FIRST, 1, models.KERNEL, models.KERNEL))
            self.first.bias.copy_(own["b1"][0])  # type: ignore[union-attr]
            second = own["w2"].view(2, 2, models.FIRST, models.SECOND).permute(3, 2, 0, 1)
            self.second.weight.copy_(second)
            self.second.bias.copy_(own["b2"][0])  # type: ignore[union-attr]
            self.last.weight.copy_(own["w3"].t())
            self.last.bias.copy_(own["b3"][0])

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(F.pad(images, (1, 0, 1, 0)))
        hidden = (self.norms[0](hidden) if len(self.norms) else hidden).relu()
        hidden = self.second(hidden)
        hidden = (self.norms[1](hidden) if len(self.norms) else hidden).relu()
        return self.last(hidden.permute(0, 2, 3, 1).flatten(1))


def optimizer(plan: Plan, model: nn.Module) -> Optimizer:
    if plan.optimizer == "adamw":
        return AdamW(model.parameters(), lr=plan.rate, betas=(plan.momentum, 0.999), weight_decay=0.01)
    return SGD(model.parameters(), lr=plan.rate, momentum=0.9, nesterov=plan.optimizer == "nesterov")


def plan(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "model": "cnn",
        "optimizer": "sgd",
        "rate": 0.02,
        "rounds": ((16,),) * 10,
        "reference": 16,
    }
    return Plan(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_without_delay_every_seed_equals_plain_pytorch(kind: str) -> None:
    data = images()
    shared = plan(optimizer=kind, rate=0.002, rounds=((10, 5, 1),) * 10)
    trainer = Trainer(shared, models.prepared("cnn", data), SEEDS)
    plain = [Plain(trainer.model, place).double() for place in range(len(SEEDS))]
    trainer.model.double()
    trainer.data = models.prepared("cnn", Data("", data.inputs.double(), data.targets, *[data.inputs.double()] * 2, 10))
    trainer.data = Data("", trainer.data.inputs, data.targets, trainer.data.inputs, data.targets, 10)
    trainer.run()
    order = orders(SEEDS, len(data.inputs), shared.samples)
    for place, model in enumerate(plain):
        stepping = optimizer(shared, model)
        for number in range(10):
            chosen = order[place, 16 * number : 16 * number + 16]
            stepping.param_groups[0]["lr"] = scheduled(shared, 16 * number)
            stepping.zero_grad()
            F.cross_entropy(model(data.inputs[chosen].double()), data.targets[chosen]).backward()
            stepping.step()
        wanted = Plain(trainer.model, place).double()
        for name, value in wanted.named_parameters():
            if not name.startswith("norms"):
                torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-5, atol=1e-6)


def test_batchnorm_equals_torchs_own() -> None:
    data = images(32)
    stack = models.build("batchnorm", SEEDS)
    plain = Plain(stack, 1)
    chosen = torch.arange(32).expand(2, 32)
    ready = models.prepared("batchnorm", data)
    losses = stack.losses(ready.inputs[chosen], ready.targets[chosen])
    wanted = F.cross_entropy(plain(data.inputs), data.targets, reduction="none")
    torch.testing.assert_close(losses[1], wanted, rtol=1e-4, atol=1e-5)
    assert isinstance(plain.norms[1], nn.BatchNorm2d)
    torch.testing.assert_close(stack.running[2][1, 0] + 0.1 * stack.weights("b2")[1, 0], plain.norms[1].running_mean)
    torch.testing.assert_close(stack.running[3][1, 0], plain.norms[1].running_var)


def test_a_seed_does_not_notice_its_neighbours() -> None:
    data = models.prepared("cnn", images())
    together = Trainer(plan(), data, SEEDS).run()
    alone = Trainer(plan(), data, SEEDS[1:]).run()
    assert together[1].accuracy == alone[0].accuracy
    assert math.isclose(together[1].loss, alone[0].loss, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("kind", "rule"), [("sgd", "adascale"), ("nesterov", "adascale"), ("adamw", "adascale_moments")]
)
def test_at_the_reference_batch_what_learns_equals_what_does_not(kind: str, rule: str) -> None:
    data = models.prepared("cnn", images())
    fixed = Trainer(plan(optimizer=kind, rate=0.002), data, SEEDS)
    learner = Learner(plan(optimizer=kind, rate=0.002, rule=rule), data, SEEDS)
    for trainer in (fixed, learner):
        trainer.run()
    assert fixed.consumed == learner.consumed
    for mine, theirs in zip(learner.parameters, fixed.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_what_learns_goes_on_until_every_schedule_is_through() -> None:
    data = models.prepared("cnn", images())
    shared = plan(rule="adascale", rounds=((16,),) * 8 + ((64,),) * 10)
    learner = Learner(shared, data, SEEDS)
    outcomes = learner.run()
    done = learner.followers.scheduled
    assert shared.samples <= learner.consumed <= learner.longest * shared.samples
    assert min(done) >= shared.samples and done[0] != done[1], "a gain of its own for every seed"
    assert {one.samples for one in outcomes} == {learner.consumed}
    assert not learner._delayed(), "nothing is one round late, beyond the plan's samples either"
    alone = Learner(shared, data, SEEDS[1:])
    alone.run()
    assert math.isclose(alone.followers.scheduled[0], done[1], rel_tol=0.05)
    with pytest.raises(ValueError, match="without delay"):
        Learner(plan(rule="adascale", method="plain"), data, SEEDS)


def mean_gradient(model: models.Stack, data: Data, chosen: Tensor) -> list[Tensor]:
    losses = model.losses(data.inputs[chosen], data.targets[chosen])
    return list(torch.autograd.grad(losses.sum() / chosen.shape[1], list(model.parameters())))


@pytest.mark.parametrize("method", ["plain", "lookahead"])
def test_delayed_rounds_equal_the_formula(method: str) -> None:
    """w' = w − η(μu + Σ/Σ) with gradients one round old, taken at ŵ = w − η(μu + ḡ) of each worker."""
    data = models.prepared("cnn", images())
    shared = plan(method=method, rounds=((12, 4),) * 5)
    trainer = Trainer(shared, data, SEEDS)
    model = models.build("cnn", SEEDS)
    weights = list(model.parameters())
    buffers = [torch.zeros_like(p) for p in weights]
    order = orders(SEEDS, len(data.inputs), shared.samples)
    flying: list[list[Tensor]] = []
    applied = 0
    for number in range(6):
        plain = [p.detach().clone() for p in weights]
        rate = scheduled(shared, 16 * applied)
        handed_in: list[list[Tensor]] = []
        for worker, (begin, end) in enumerate(((0, 12), (12, 16)) if number < 5 else ()):
            with torch.no_grad():
                for place, p in enumerate(weights):
                    p.copy_(plain[place])
                    if method == "lookahead" and flying:
                        p.sub_(rate * (0.9 * buffers[place] + flying[worker][place]))
            handed_in.append(mean_gradient(model, data, order[:, 16 * number + begin : 16 * number + end]))
        with torch.no_grad():
            for place, p in enumerate(weights):
                p.copy_(plain[place])
                if flying:
                    buffers[place].mul_(0.9).add_((12 * flying[0][place] + 4 * flying[1][place]) / 16)
                    p.sub_(rate * buffers[place])
        applied += bool(flying)
        flying = handed_in
    trainer.run()
    assert applied == 5
    for ours, wanted in zip(trainer.parameters, weights, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["cnn", "batchnorm"])
def test_every_method_trains_through_workers_that_come_and_go(model: str) -> None:
    from benchmarks.lab.points import METHODS

    data = models.prepared(model, images())
    rounds = ((12, 4), (16, 0), (12, 4), (0, 16), (10, 6), (8, 8))
    for method in METHODS:
        outcomes = Trainer(plan(model=model, method=method, rounds=rounds), data, SEEDS).run()
        assert all(math.isfinite(one.loss) for one in outcomes)


def test_the_transformer_learns_a_repetition() -> None:
    line = torch.arange(33) % 4 + 1
    inputs, targets = line[:32].expand(8, 32), line[1:].expand(8, 32)
    shared = plan(model="transformer", optimizer="adamw", rate=0.01, rounds=((8,),) * 30, reference=8)
    outcome = Trainer(shared, Data("", inputs, targets, inputs, targets, 64), (0,)).run()[0]
    assert outcome.accuracy > 90
