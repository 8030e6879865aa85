"""What a run of the recovery benchmark tells its workers beside the plan."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

OPTIONS = "options.json"


@dataclass(frozen=True, slots=True)
class Options:
    """``tight``: a rival's timeouts as short as this machine bears, instead of its defaults."""

    dead_after_s: float = 5.0
    hung_after_s: float = 600.0
    frozen_mb: int = 0
    tight: bool = False


def write(directory: Path, options: Options) -> None:
    (directory / OPTIONS).write_bytes(msgspec.json.encode(options))


def read(directory: Path) -> Options:
    return msgspec.json.decode((directory / OPTIONS).read_bytes(), type=Options)
