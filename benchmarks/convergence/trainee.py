"""One worker process of a training run: its device, its data, its snapshots.

Question  Which weights did the group have after so many samples and so many seconds?
Holds     The clock starts when every worker of the group stands ready, its group formed, before the first sample. One
          worker keeps the snapshots: copies of the plain weights in memory (0.7 MB, well below a millisecond), written
          only after the last sample. Accuracy is measured by the runner, afterwards.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from benchmarks.convergence import course as courses
from benchmarks.convergence.workload import make_model, make_optimizer, make_scheduler, training_set
from benchmarks.waiting import wait_for
from benchmarks.workload import Device

START_S = 180.0  # until the last worker stands ready
KEPT = "kept.json"


@dataclass(slots=True)
class Kept:
    """What the one that keeps the snapshots tells the runner beside them."""

    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Trainee:
    """What a system's ``train`` gets."""

    def __init__(self, directory: Path, index: int) -> None:
        self.directory, self.index = directory, index
        (directory / f"process-{os.getpid()}").touch()
        self.course = courses.read(directory)
        self.device = Device(lambda: self.device_ms(self.index))
        self.model = make_model(self.course.seed, self.device)
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer, self.course)
        self.dataset = training_set(self.course.images)
        self._started_s: float | None = None
        self._kept = Kept()
        self._weights: dict[str, Tensor] = {}

    def begin(self) -> None:
        """The group is formed: go on when everybody is here."""
        (self.directory / f"ready-{self.index}").touch()
        start = self.directory / "start"
        if not wait_for(start.exists, START_S):
            raise TimeoutError("the other workers did not come")
        self._started_s = float(start.read_text())
        time.sleep(max(self._started_s - time.monotonic(), 0.0))

    @property
    def now_s(self) -> float:
        """Seconds of training."""
        return 0.0 if self._started_s is None else time.monotonic() - self._started_s

    def device_ms(self, index: int) -> float:
        """The present time per 16 samples of any worker (only the oracle asks for another's)."""
        return courses.milliseconds(self.course, index, self.now_s)

    def order(self, epoch: int) -> list[int]:
        return courses.order(self.course.seed, epoch, self.course.images)

    def taken(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """These samples."""
        images, labels = self.dataset.tensors
        return images[positions], labels[positions]

    def loss(self, model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Forward pass on the emulated device; the backward pass takes the rest of its time."""
        self.device.begin(len(x))
        return F.cross_entropy(model(x), y)

    def due(self, samples: int) -> bool:
        """Whether the next snapshot is to be kept after so many samples."""
        last = self._kept.samples[-1] if self._kept.samples else 0
        return samples // self.course.every > last // self.course.every

    def keep(self, samples: int) -> None:
        """The model holds the group's plain weights after so many samples."""
        if self._kept.samples and self._kept.samples[-1] == samples:
            return
        number = len(self._kept.samples)
        self._kept.samples.append(samples)
        self._kept.seconds.append(round(self.now_s, 4))
        for name, tensor in self.model.state_dict().items():
            self._weights[f"{number}/{name}"] = tensor.detach().clone()

    def end(self, *, keeper: bool, **figures: float) -> None:
        """All samples are done."""
        if keeper:
            self._kept.figures = figures
            save_file(self._weights, str(self.directory / "weights"))
            (self.directory / KEPT).write_bytes(msgspec.json.encode(self._kept))
        (self.directory / f"done-{self.index}").touch()
