"""Which members' data ports can be reached from here.

Question  Before a group is formed: between which of its members can no connection be opened?
Holds     Each member listens at the address of its data ports, and opens a connection to every other one. No data is
          sent: a connection that opens is the answer. Both directions are tried, because in a group either of two
          members may connect to the other. The time is bounded; if all can be reached it is one round trip.
Source    ours; docs/design/0021-formation.md.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from pliant.tensors.process_group import teardown

PATIENCE_S = 3.5
"""A lost first packet is sent again after one second, and after three."""

REFUSED_S = 1.0
"""The machine refuses the connection: the member's process may be about to listen, or is gone."""

LINGER_S = 2.0
"""After this member has failed, its port stays open for this long for the attempts of the others."""

_REFUSED_AGAIN_S = 0.1
# Results of ``connect_ex`` for a connection that is being opened.
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK)


class Unconnected(RuntimeError):
    """No group can be formed: the members at these indices cannot be reached. Empty: the reason is not known."""

    def __init__(self, message: str, places: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.places = places


class ProbePort:
    """A listening port that shows the others that this member can be reached; connections are never accepted."""

    def __init__(self, address: str, members: int) -> None:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        # The kernel completes up to ``backlog`` connections without ``accept``.
        self._listener = socket.create_server((address, 0), family=family, backlog=members + 8)
        self._enough = threading.Event()

    @property
    def address(self) -> bytes:
        """Host and port, to be published to the others."""
        host, port = self._listener.getsockname()[:2]
        return f"{host} {port}".encode()

    def __enter__(self) -> ProbePort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            # The group is formed, so all members have finished their attempts.
            self._listener.close()
        else:
            try:
                teardown.in_background(self._linger, "pliant-doorbell", self._enough.set)
            except RuntimeError:  # the interpreter is shutting down and starts no threads any more
                self._listener.close()

    def _linger(self) -> None:
        """Keep listening: others may still try, and would blame this member, which only gave up sooner."""
        self._enough.wait(LINGER_S)
        self._listener.close()


def unreached(addresses: Mapping[int, bytes], patience_s: float = PATIENCE_S) -> tuple[int, ...]:
    """The indices of the members that cannot be reached from here, given the addresses of their probe ports."""
    start_s = time.monotonic()
    deadline_s = start_s + patience_s
    missing = {place: _target(address) for place, address in addresses.items()}
    while missing:
        for place in _reached(missing, deadline_s):
            del missing[place]
        if not missing or time.monotonic() - start_s > min(REFUSED_S, patience_s):
            break
        time.sleep(_REFUSED_AGAIN_S)
    return tuple(sorted(missing))


def _target(address: bytes) -> tuple[str, int]:
    host, _, port = address.decode().partition(" ")
    return host, int(port)


def _reached(targets: Mapping[int, tuple[str, int]], deadline_s: float) -> list[int]:
    """The indices that one attempt has reached; it ends when all are decided, or at the deadline."""
    reached: list[int] = []
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for place, target in targets.items():
            opened = _opening(target)
            if opened is not None:
                selector.register(stack.enter_context(opened), selectors.EVENT_WRITE, place)
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                selector.unregister(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    reached.append(key.data)
    return reached


def _opening(target: tuple[str, int]) -> socket.socket | None:
    """A connection that is being opened; None if that fails at once."""
    try:
        family = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0][0]
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    connection.setblocking(False)
    if connection.connect_ex(target) in _UNDER_WAY:
        return connection
    connection.close()
    return None
