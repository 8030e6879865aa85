"""The histories that seeds of the simulator had when they were last recorded.

Question  Has a change that should change nothing changed what happens under any seed?
Holds     One line per scene: its name and the checksums of its first seeds. A checksum covers everything that was
          noted, names of messages and moments of virtual time among it, so it is the same on any machine for the same
          code. Who changes what happens on purpose records anew: ``python tests/sim/golden.py``, and says why.
"""

from __future__ import annotations

from pathlib import Path

from pliant.testing.__main__ import simulated
from pliant.testing.scenes import NAMES

GOLDEN = Path(__file__).with_name("golden.txt")
SEEDS = 20


def checksum(scene: str, seed: int) -> str:
    """Of one history; an error is part of it."""
    outcome = simulated(scene, seed)
    return f"{outcome.checksum:08x}" if outcome.error is None else f"failed:{outcome.error}"


def recorded() -> dict[str, list[str]]:
    """scene → the checksums of its seeds, from 0 on"""
    lines = [line.split() for line in GOLDEN.read_text().splitlines()]
    return {name: checksums for name, *checksums in lines}


def record() -> None:
    """Write down what happens now."""
    lines = (" ".join([scene, *(checksum(scene, seed) for seed in range(SEEDS))]) for scene in NAMES)
    GOLDEN.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    record()
