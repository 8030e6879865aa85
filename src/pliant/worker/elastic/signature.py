"""What a worker reports of itself before it is admitted.

Question  What must be equal on all workers of a group, and how does this worker report it?
Holds     Software and kind of device are reported beside model and settings, because unlike ones cannot form a group,
          or make decisions that differ in the last bit. A device on which no group can be formed is refused here, at
          ``join``; otherwise every era would break.
Source    ours; docs/protocol.md, core.membership.compatibility.
"""

from __future__ import annotations

import math
import sys
from importlib.metadata import version

import torch
from torch import nn
from torch.optim import Optimizer

from pliant.control.messages import Signature
from pliant.core.journal import records as journal
from pliant.errors import UsageError

_GROUPED = ("cpu", "cuda")
"""kinds of devices on which gradients can be summed: by gloo, by NCCL"""


def summary(described: Signature) -> str:
    """The trained parameters in a few words, which differ if any name, shape or type differs."""
    numbers = sum(math.prod(shape) for _, shape, _ in described.parameters)
    checksum = journal.digest_of(
        *(repr((name, list(shape), dtype)).encode() for name, shape, dtype in described.parameters)
    )
    return f"{len(described.parameters)} tensors, {numbers} numbers, {checksum}"


def device_of(optimizer: Optimizer) -> torch.device:
    """The device of the parameters."""
    return optimizer.param_groups[0]["params"][0].device


def check_device(optimizer: Optimizer) -> None:
    """Refuse a device on which no group can be formed. A script without a job may train there."""
    kind = device_of(optimizer).type
    if kind not in _GROUPED:
        raise UsageError(
            f"the model is on {kind!r}, where the gradients of several workers cannot be summed: move it to the CPU "
            'or to CUDA before it goes to the optimizer, e.g. model.to("cpu"), or start the script without `pliant run`'
        )


def signature(model: nn.Module, optimizer: Optimizer, agreed: dict[str, str]) -> Signature:
    """What must be equal on all workers: software, kind of device, the trained parameters and the settings."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return Signature(
        version=version("pliant"),
        parameters=[
            (names.get(id(p), f"parameter {index}"), list(p.shape), str(p.dtype).removeprefix("torch."))
            for index, p in enumerate(trained)
        ],
        settings=agreed,
        torch=".".join(torch.__version__.split(".")[:2]),
        python=".".join(map(str, sys.version_info[:2])),
        device=device_of(optimizer).type,
    )
