"""The output of processes on disk.

Question  Where is the output of a process written, and what happens if the file is removed?
Holds     If the disk is full, output is lost, but the run goes on. A log that is removed while its process runs is
          restored with its content.
Source    ours; docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

from pliant.launch.run_directory import PRIVATE

_CHUNK = 1 << 20


def opened(log: Path) -> IO[bytes]:
    """The file, opened for appending, without a buffer: what a full disk has refused must not fail again on close."""
    try:
        # To be read too: what was removed can be, as long as it is open.
        descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)


class Log:
    """The log of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = opened(path)

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``, as far as the disk has room."""
        with contextlib.suppress(OSError):
            self._file.write(chunk)

    def mend(self) -> None:
        """Write the file again if it was removed. Costs one lookup if it was not."""
        if self._file.closed or self._path.exists():
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(PRIVATE, parents=True, exist_ok=True)
        fresh = opened(self._path)
        if not self._path.exists():
            # It is tried again, with the same content.
            fresh.close()
            return
        old, self._file = self._file, fresh
        with old, contextlib.suppress(OSError):
            place = 0
            while chunk := os.pread(old.fileno(), _CHUNK, place):
                self._file.write(chunk)
                place += len(chunk)

    def close(self) -> None:
        """Close the file; no more output comes."""
        self._file.close()
