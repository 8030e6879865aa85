"""A coordinator started by hand.

Question  How does a run go on whose launcher, and with it the coordinator, was lost while workers of others live?
Holds     It listens where the lost one did, so that workers find it by themselves. It is refused while one is alive:
          by the port, and by the lock in the run directory.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from pliant.errors import UsageError
from pliant.launch import directory as run_directory
from pliant.launch.coordinating import coordinate
from pliant.launch.directory import Access


def take_over(directory: Path, port: int, say: Callable[[str], None]) -> None:
    """Coordinate the run in ``directory`` until it is over; ``port`` 0 is the lost coordinator's."""
    access = run_directory.access(directory)
    host, _, old = access.address.rpartition(":")
    with _bound(directory, host, port or int(old)) as listener:
        address = f"{host}:{listener.getsockname()[1]}"

        def ready() -> None:
            # Not before: only now is it certain that no other one holds the lock.
            if address != access.address:
                run_directory.publish(directory, Access(address, access.token))
            say(f"coordinating the run at {address}")

        try:
            coordinate(directory.resolve(), listener, resume=True, on_ready=ready)
        except KeyboardInterrupt:
            say("interrupted; the workers go on, and wait for another coordinator")


def _bound(directory: Path, host: str, port: int) -> socket.socket:
    try:
        return run_directory.bound(host, port)
    except UsageError as error:
        if "in use" not in str(error):
            raise
        raise UsageError(
            f"port {port} is in use: the coordinator of the run in {directory} is alive; "
            "if that is something else, give another --port"
        ) from None
