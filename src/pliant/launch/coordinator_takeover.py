"""A coordinator started by hand.

Question  How does a run go on if its launcher was lost with the coordinator, while workers of other launchers live?
Holds     The new coordinator listens at the address of the lost one, so that workers find it by themselves. It is
          refused while another one is alive: by the port, and by the lock in the run directory.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pliant.control.handshake import address_of, host_in
from pliant.errors import UsageError
from pliant.launch import run_directory
from pliant.launch.certificate_check import served
from pliant.launch.coordinator_process import coordinate
from pliant.launch.run_directory import NO_TLS, Trust


def take_over(directory: Path, port: int, say: Callable[[str], None], trust: Trust = NO_TLS) -> None:
    """Coordinate the run in ``directory`` until it is over; ``port`` 0 is the lost coordinator's.

    With a ``trust`` of its own it shows another certificate than the lost one, of an authority the workers know.
    """
    access = run_directory.access(directory)
    host, old = host_in(access.address), access.address.rpartition(":")[2]
    kept = run_directory.trust_in(directory)
    if trust.tls and not kept.tls:
        raise UsageError(
            f"the workers of the run in {directory} know no TLS; leave out --tls-cert, --tls-key and --tls-ca"
        )
    trust = replace(trust if trust.tls else kept, insecure=kept.insecure or trust.insecure)
    run_directory.check_exposure(host, trust)
    served(trust, host)
    with _bound(directory, host, port or int(old)) as listener:
        address = address_of(host, listener.getsockname()[1])

        def ready() -> None:
            # Not before: only now is it certain that no other one holds the lock.
            if address != access.address:
                run_directory.publish(directory, replace(access, address=address))
            say(f"coordinating the run at {address}")

        try:
            coordinate(directory.resolve(), listener, resume=True, on_ready=ready, trust=trust)
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
