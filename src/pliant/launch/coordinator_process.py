"""The coordinator as a process of its own.

Question  How does a coordinator get its listening socket, its token and the run's specification?
Holds     The socket is inherited, so no other program can take the port between two coordinators. The token and the
          paths of certificate and key are read from the run directory, never from a command line. Files that this
          process writes can be read by their owner only. Torch is not imported.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec

from pliant.control.handshake import host_in
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.service import serve
from pliant.errors import PliantError, UsageError
from pliant.launch import run_directory
from pliant.launch.certificate_check import served
from pliant.launch.coordinator_supervisor import REFUSED_EXIT
from pliant.launch.run_directory import Trust


def main() -> None:
    """The entry point: run directory, descriptor of the socket, ``start``, ``resume`` or ``rewind``, the last term."""
    directory, descriptor, how, term = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    # Signals are the launcher's: it ends this process when the run is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with socket.socket(fileno=descriptor) as listener:
            coordinate(directory, listener, resume=how != "start", rewind=how == "rewind", repeat=True, term=term)
    except PliantError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED_EXIT)


def coordinate(
    directory: Path,
    listener: socket.socket,
    *,
    resume: bool,
    rewind: bool = False,
    repeat: bool = False,
    on_ready: Callable[[], None] | None = None,
    trust: Trust | None = None,
    term: int = 0,
) -> None:
    """Serve the run in ``directory`` until it is over; ``repeat``: if it was over already, answer requests with that.

    ``rewind``: no worker lives, and the run goes on from its last checkpoint. ``term``: that of the last coordinator
    which the launcher has heard from; 0: none.
    """
    # The journal is its owner's alone, in a directory that others may read too.
    os.umask(0o077)
    charter = _charter(directory)
    access = run_directory.access(directory)
    # Not inherited like the socket: a certificate that was renewed meanwhile is taken by the next coordinator.
    tls = served(trust or run_directory.trust_in(directory), host_in(access.address))
    serving = serve(
        charter,
        directory,
        listener,
        access.token,
        resume,
        rewind=rewind,
        repeat=repeat,
        on_ready=on_ready,
        tls=tls,
        least_term=term,
    )
    asyncio.run(serving)


def _charter(directory: Path) -> RunSpec:
    path = directory / run_directory.CHARTER
    try:
        fixed = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        return msgspec.convert({**fixed, "version": version("pliant")}, type=RunSpec)
    except OSError:
        raise UsageError(f"no run in {directory}; give a run's directory with --dir") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is damaged or of another version of Pliant: {error}") from None


if __name__ == "__main__":
    main()
