"""The first program of every worker's process: it binds the process to the launcher's life, then executes the script.

Question  How are workers ended if their launcher was killed without a chance to clean up?
Holds     Once this has run, the kernel kills the worker when the launcher's thread that started it ends. This module
          imports nothing of Pliant and runs before any thread exists. Arguments: the launcher's pid, then the command
          to execute; they contain no secrets.
Source    prctl(2), PR_SET_PDEATHSIG: kept over exec, cleared in forked children. On systems other than Linux, workers
          end only with a launcher that can clean up.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main() -> None:
    """Never returns."""
    launcher, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        # The launcher died before the kernel was asked to watch it.
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
