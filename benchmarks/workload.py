"""What is trained, and how a slower device is emulated on this machine's cores.

Question  What do all systems compute, and how long must it take on a device of a given speed?
Holds     A micro-batch of n samples on a device of d ms per 16 takes d·n/16 ms in all, of which the
          first third is the forward pass. What the cores really compute counts towards it as thread
          CPU time (wall time would hide contention), the rest is slept. The backward pass sleeps
          before each layer's gradient appears, so that a system which starts to communicate while
          the backward pass goes on (DDP's buckets) has the same overlap as on a real device.
Source    ours.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10
# Longer than any run: the end of an epoch belongs to no rival's measured loop, so it is in none.
SAMPLES = 2**17
STAGES = 4
FEATURES = 32
SMALL_WIDTH = 512  # 4 square layers: 1.07 million parameters, 4.3 MB
TABLE_ROWS, TABLE_WIDTH = 10_740, 256  # 4 tables: 11.0 million parameters, 44 MB of dense gradient
FORWARD_SHARE = 1 / 3


class Device:
    """The emulated device of one worker; ``milliseconds`` tells its present time per 16 samples."""

    def __init__(self, milliseconds: Callable[[], float]) -> None:
        self._milliseconds = milliseconds
        self._due_s = 0.0
        self._cpu_s = 0.0
        self._slept_s = 0.0
        self.busy_s = 0.0

    def begin(self, samples: int) -> None:
        """A micro-batch starts here; its duration is fixed now."""
        self._due_s = self._milliseconds() * samples / 16 / 1000
        self._cpu_s = time.thread_time()
        self._slept_s = 0.0

    def reach(self, share: float) -> None:
        """Sleep until ``share`` of the micro-batch's time is spent, computing and sleeping together."""
        spent = time.thread_time() - self._cpu_s + self._slept_s
        missing = self._due_s * share - spent
        if missing > 0:
            before = time.perf_counter()
            time.sleep(missing)
            self._slept_s += time.perf_counter() - before
        self.busy_s = time.thread_time() - self._cpu_s + self._slept_s


class _Pause(torch.autograd.Function):
    """The identity; its backward pass waits for the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Device, share: float) -> Tensor:
        ctx.device, ctx.share = device, share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.device.reach(ctx.share)
        return grads[0], None, None


class Staged(nn.Module):
    """A first layer, four stages that hold nearly all parameters, a head; paced by a device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def paused(self, x: Tensor, number: int) -> Tensor:
        """Mark a stage's output: its gradient appears when its time and all later stages' is spent."""
        passed = (STAGES + 1 - number) / (STAGES + 1)
        return _Pause.apply(x, self.device, FORWARD_SHARE + (1 - FORWARD_SHARE) * passed)  # type: ignore[no-any-return]


class Small(Staged):
    """Four square layers."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.first = nn.Linear(FEATURES, SMALL_WIDTH)
        self.stages = nn.ModuleList(nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(STAGES))
        self.head = nn.Linear(SMALL_WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.paused(self.first(x), 0))
        for number, stage in enumerate(self.stages, 1):
            hidden = torch.relu(self.paused(stage(hidden), number))
        logits = self.head(hidden)
        self.device.reach(FORWARD_SHARE)
        return logits


class Large(Staged):
    """Four wide tables: a large dense gradient for little arithmetic, so that two cores carry four workers."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.first = nn.Linear(STAGES, TABLE_WIDTH)
        self.stages = nn.ModuleList(nn.Embedding(TABLE_ROWS, TABLE_WIDTH) for _ in range(STAGES))
        self.head = nn.Linear(TABLE_WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.paused(self.first(x / TABLE_ROWS), 0))
        for number, stage in enumerate(self.stages, 1):
            hidden = torch.relu(self.paused(hidden + stage(x[:, number - 1]), number))
        logits = self.head(hidden)
        self.device.reach(FORWARD_SHARE)
        return logits


MODELS: dict[str, type[Staged]] = {"small": Small, "large": Large}


def make_model(name: str, device: Device) -> nn.Module:
    """The same initial weights in every process."""
    torch.manual_seed(1)
    return MODELS[name](device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused: one pass over the memory, so that updates of 11 million weights leave the cores room."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)


def make_dataset(name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    if name == "large":
        return TensorDataset(torch.randint(TABLE_ROWS, (SAMPLES, STAGES), generator=generator), labels)
    return TensorDataset(torch.randn(SAMPLES, FEATURES, generator=generator), labels)
