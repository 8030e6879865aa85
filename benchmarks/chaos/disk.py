"""A disk of our own that can be full.

Question  How does a run meet a full disk that nobody else notices?
Holds     A tmpfs, shrunk to what is on it and grown again: every write that needs a page fails with "no space left on
          device" meanwhile, as on any full disk. Unmounted at the end, whatever happens. Needs the right to mount.
Source    tmpfs(5), remounting with another size.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOMY = "4g"  # a bound, not an allocation
_PAGE = 4096
_TRIES = 20


class NoDisk(Exception):
    """The disk could not be made, and why."""


def _done(*line: str) -> None:
    outcome = subprocess.run(line, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise NoDisk(f"{' '.join(line)}: {outcome.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Disk:
    """``path`` is where it is mounted."""

    path: Path

    def fill(self) -> None:
        """No page is free any more."""
        for _ in range(_TRIES):
            facts = os.statvfs(self.path)
            used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
            # Somebody may take one more page right now: then the size is too small for it, and refused.
            with suppress(NoDisk):
                return _done("mount", "-o", f"remount,size={max(used, _PAGE)}", str(self.path))
        raise NoDisk("the disk could not be filled")

    def empty(self) -> None:
        _done("mount", "-o", f"remount,size={ROOMY}", str(self.path))


@contextmanager
def disk(path: Path) -> Iterator[Disk]:
    """Mounted at ``path``; ``NoDisk`` where that cannot be."""
    path.mkdir()
    _done("mount", "-t", "tmpfs", "-o", f"size={ROOMY},mode=700", "pliant-chaos", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
