"""What the runner tells one worker to do after its next update: save for a long time, or hang.

Holds     An order is for one process, by its number, and is taken once. It is whole when it is seen.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

SAVED = "saved.safetensors"


@dataclass(frozen=True, slots=True)
class Order:
    """``save``: for so many seconds."""

    what: Literal["save", "hang"]
    seconds: float = 0.0


def _file(directory: Path, pid: int) -> Path:
    return directory / f"order-{pid}"


def give(directory: Path, pid: int, order: Order) -> None:
    partial = directory / "order.partial"
    partial.write_bytes(msgspec.json.encode(order))
    partial.rename(_file(directory, pid))


def taken(directory: Path) -> Order | None:
    """The order for this process, if there is one."""
    file = _file(directory, os.getpid())
    if not file.exists():
        return None
    order = msgspec.json.decode(file.read_bytes(), type=Order)
    file.unlink()
    return order
