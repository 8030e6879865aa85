"""What a script trains: data, model, optimizer, loss.

Question  Which objects does a script with these habits make before it joins?
Holds     Made from the habits and a seed alone. No random layers, and nothing that depends on running statistics in the
          training pass: what a micro-batch brings is a function of the weights, of its samples and of nothing else.
Source    ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pliant.testing.habits.values import Event, Habits

_FEATURES, _CLASSES = 6, 3
_NARROW, _WIDE, _LARGE = 5, 96, 1100
"""Of the wide one a synchronous round is summed in two parts or more; gradients of the large one are above 4 MB and
have memory of their own kind (``tensors.allocation``)."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""inputs, labels, tokens, index"""


class KitSamples(Dataset[tuple[Tensor, Tensor, Tensor, int]]):
    """A few samples, the same in every process."""

    def __init__(self, habits: Habits, count: int, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        dtype = torch.float32 if habits.float32 else torch.float64
        shape = (3, 4, 4) if habits.model == "cnn" else (_FEATURES,)
        self.x = torch.randn(count, *shape, generator=draw, dtype=dtype)
        self.y = torch.randint(0, _CLASSES, (count,), generator=draw)
        self.tokens = torch.randint(0, 3, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.x[index], self.y[index], self.tokens[index], index

    def batch(self, indices: tuple[int, ...]) -> Batch:
        """The micro-batch of these samples."""
        taken = torch.tensor(indices)
        return self.x[taken], self.y[taken], self.tokens[taken], taken


def _width(habits: Habits) -> int:
    return _LARGE if habits.large else _WIDE if habits.wide else _NARROW


class Net(nn.Module):
    """A small model with the parts that the habits ask for."""

    def __init__(self, habits: Habits) -> None:
        super().__init__()
        width = _width(habits)
        self.kind, self.layout = habits.model, habits.channels_last
        # A bias before a BatchNorm has no gradient but rounding.
        bias = not habits.norm
        image = habits.model == "cnn"
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=bias) if image else nn.Linear(_FEATURES, width, bias=bias)
        self.norm: nn.Module | None = None
        if habits.norm:
            self.norm = nn.BatchNorm2d(width) if image else nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.side = nn.Linear(width, width) if habits.model == "branch" else None
        self.never = nn.Linear(2, 2) if habits.model == "branch" else None
        self.late = nn.Linear(width, width) if habits.does("add group") else None
        self.head = nn.Linear(width, _CLASSES) if habits.model != "outside" else None

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        if self.layout and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        first = self.first.weight.dtype
        h = self.first(x.to(first)).to(self.middle.weight.dtype)
        # One value has no spread to divide by.
        if self.norm is not None and h.numel() > h.shape[1]:
            h = self.norm(h)
        if h.dim() == 4:
            h = torch.tanh(h).mean((2, 3))
        h = torch.tanh(self.middle(torch.tanh(h)))
        if self.kind == "tied":
            h = torch.tanh(self.middle(h))
        if self.side is not None and self.training and int(index[0]) % 3 == 0:
            h = h + torch.tanh(self.side(h))
        if self.late is not None:
            h = h + torch.tanh(self.late(h))
        return h if self.head is None else self.head(h)


class Head(nn.Module):
    """A head with a temperature that only the optimizer and the loss know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, _CLASSES)
        self.temperature = Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        return self.out(h) * self.temperature


@dataclass
class Kit:
    """What a script holds."""

    habits: Habits
    model: Net
    head: Head | None
    optimizer: Optimizer
    scheduler: Any = None
    ema: nn.Module | None = None
    clip: float | None = None
    """the bound on the gradient's norm in force, where it is computed by hand"""
    done: list[Event] = field(default_factory=list)
    """which changes of the trained set have been made"""

    def named(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, those outside of the model too."""
        yield from self.model.named_parameters()
        if self.head is not None:
            yield from ((f"outside.{name}", p) for name, p in self.head.named_parameters())

    def trained(self) -> frozenset[str]:
        """Which parameters get a gradient that the optimizer uses."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return frozenset(name for name, p in self.named() if p.requires_grad and id(p) in held)

    def loss(self, batch: Batch) -> tuple[Tensor, float]:
        """The mean loss of a micro-batch, and the mean's denominator."""
        _, y, tokens, _ = batch
        each = F.cross_entropy(self.outputs(batch), y, reduction="none")
        if not self.habits.tokens:
            return each.mean(), float(len(y))
        count = float(tokens.sum())
        return (each * tokens).sum() / max(count, 1.0), count

    def state(self) -> dict[str, Tensor]:
        """Everything that must be equal on all workers."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.head is not None:
            found |= {f"outside.{name}": value for name, value in self.head.state_dict().items()}
        if self.ema is not None:
            found |= {f"ema.{name}": value for name, value in self.ema.state_dict().items()}
        for place, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{place}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        return {name: value.detach().clone() for name, value in found.items()}

    def twin(self) -> Kit:
        """A copy of weights and optimizer, without the rest."""
        model, head, optimizer = copy.deepcopy((self.model, self.head, self.optimizer))
        return Kit(self.habits, model, head, optimizer, clip=self.clip)

    def outputs(self, batch: Batch) -> Tensor:
        """What it says of each sample."""
        out = self.model(batch[0], batch[3])
        return out if self.head is None else self.head(out)


def kit_of(habits: Habits, seed: int) -> Kit:
    """Made as a script makes it, with initial weights of its own."""
    torch.manual_seed(seed)
    dtype = torch.float32 if habits.float32 else torch.float64
    model = Net(habits).to(dtype)
    if habits.model == "mixed":
        model.first.float()
    if habits.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = Head(_width(habits)).to(dtype) if habits.model == "outside" else None
    if _first_of_set(habits) == "unfreeze":
        model.first.requires_grad_(False)
    if model.late is not None:
        model.late.requires_grad_(False)
    optimizer = _optimizer(habits, _groups(habits, model, head))
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=habits.hooks) if habits.ema else None
    return Kit(habits, model, head, optimizer, _scheduler(habits, optimizer), ema, habits.clip)


def change(kit: Kit, event: Event) -> None:
    """Freeze, unfreeze or add a group, as scripts do."""
    kit.done.append(event)
    if event.what in ("freeze", "unfreeze", "freeze alone"):
        kit.model.first.requires_grad_(event.what == "unfreeze")
    elif event.what == "add group" and kit.model.late is not None:
        late = list(kit.model.late.parameters())
        if not late[0].requires_grad:
            kit.model.late.requires_grad_(True)
            kit.optimizer.add_param_group({"params": late, "lr": kit.optimizer.param_groups[0]["lr"] / 2})


def _first_of_set(habits: Habits) -> str:
    return next((event.what for event in habits.events if event.what in ("freeze", "unfreeze")), "")


def _groups(habits: Habits, model: Net, head: Head | None) -> list[dict[str, Any]]:
    late = {id(p) for p in model.late.parameters()} if model.late is not None else set[int]()
    own = [p for p in model.parameters() if id(p) not in late]
    outside = list(head.parameters()) if head is not None else []
    if not habits.groups:
        return [{"params": own + outside}]
    middle = len(own) // 2
    return [{"params": own[:middle]}, {"params": own[middle:] + outside, "lr": 0.003, "weight_decay": 0.02}]


def _optimizer(habits: Habits, groups: list[dict[str, Any]]) -> Optimizer:
    common: dict[str, Any] = {"weight_decay": habits.decay, "maximize": habits.maximize}
    if habits.kernel:
        common[habits.kernel] = True
    match habits.optimizer:
        case "sgd":
            moving = {"momentum": habits.momentum, "nesterov": habits.nesterov, "dampening": habits.dampening}
            return torch.optim.SGD(groups, lr=0.05, **moving, **common)
        case "adam":
            return torch.optim.Adam(groups, lr=0.01, amsgrad=habits.amsgrad, **common)
        case "adamw":
            return torch.optim.AdamW(groups, lr=0.01, amsgrad=habits.amsgrad, **common)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=0.003, momentum=habits.momentum, **common)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=0.01, **common)


def _scheduler(habits: Habits, optimizer: Optimizer) -> Any:
    schedules = torch.optim.lr_scheduler
    match habits.schedule:
        case "batch":
            return schedules.LambdaLR(optimizer, _slower)
        case "epoch":
            return schedules.StepLR(optimizer, step_size=1, gamma=0.5)
        case "cycle":
            moves = habits.optimizer in ("adam", "adamw") or (habits.optimizer == "sgd" and habits.momentum > 0)
            return schedules.OneCycleLR(optimizer, max_lr=0.05, total_steps=1000, cycle_momentum=moves)
        case _:
            return None


def _slower(step: int) -> float:
    return 0.9**step
