"""Checkpoints on a virtual disk.

Question  What is left of a checkpoint when its writer dies, or the disk loses data?
Holds     A checkpoint that was not written completely does not exist. A complete one may be damaged, with the
          probability that the scene sets: reading it then fails, as with a real one.
Source    ours; tensors/checkpoint.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pliant.errors import CheckpointError
from pliant.tensors.checkpoint import Manifest
from pliant.testing.clock import Process, World


class VirtualDisk:
    """``tensors.checkpoint.CheckpointStore`` without files; outlives every process."""

    finished = False
    """there is a journal"""

    def __init__(self, world: World, damaged: float) -> None:
        self._world = world
        self._damaged = damaged
        self._content: dict[str, tuple[Manifest, Any]] = {}
        self._broken: set[str] = set()

    def names(self) -> list[str]:
        return sorted(self._content)

    def write(self, manifest: Manifest, state: Any) -> Manifest:
        self._content[manifest.name] = manifest, copy.deepcopy(state)
        if self._damaged and len(self._content) > 1 and self._world.chance(self._damaged):
            self._broken.add(manifest.name)
        self._world.note("checkpoint", manifest.name, manifest.round)
        return manifest

    def read(self, name: str) -> tuple[Manifest, Any]:
        if name not in self._content or name in self._broken:
            raise CheckpointError(f"checkpoint {name} is damaged")
        self._world.note("restored", name)
        return copy.deepcopy(self._content[name])

    def remove(self, name: str) -> None:
        self._content.pop(name, None)

    def mark(self, *, finished: bool) -> None:
        raise AssertionError("a run with a journal")


class VirtualTask:
    """``worker.checkpoint_writer.Thread`` in virtual time; dies with its process."""

    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.over = False
        self.failed: str | None = None

        def run() -> None:
            work()
            self.over = True

        world = process.world
        world.after(world.between(0.001, 0.08), lambda: process.in_background(run))
