"""The coordinator's open connections, of workers or of launchers.

Question  Which worker or launcher is at a connection, and by which connection is it reached?
Holds     A connection is known from its opening to its close; it has a name from its introduction on. A name is reached
          by the last connection that was introduced under it. Messages to a name without a connection are dropped.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from pliant.control import messages

Name = TypeVar("Name", bound=str)


class Peer(Protocol):
    """One connection. ``send`` and ``close`` return at once."""

    @property
    def number(self) -> int: ...
    def send(self, message: messages.FromCoordinator | messages.ToAgent) -> None: ...
    def close(self) -> None: ...


class Connections(Generic[Name]):
    """The connections of one kind of peer."""

    def __init__(self) -> None:
        self._open: dict[int, Peer] = {}
        self._names: dict[int, Name] = {}
        self._peers: dict[Name, Peer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, peer: Peer) -> None:
        """A connection was opened; it has no name yet."""
        self._open[peer.number] = peer

    def closed(self, peer: Peer) -> Name | None:
        """A connection was closed; returns its name, if it had one."""
        self._open.pop(peer.number, None)
        return self.forget(peer)

    def introduce(self, peer: Peer, name: Name) -> None:
        """From now on the connection speaks for ``name``."""
        self._names[peer.number] = name
        self._peers[name] = peer

    def forget(self, peer: Peer) -> Name | None:
        """Ignore the connection from now on; returns its name, if it had one."""
        name = self._names.pop(peer.number, None)
        if name is not None and self._peers.get(name) is peer:
            del self._peers[name]
        return name

    def at(self, number: int) -> Peer | None:
        """The open connection of that number."""
        return self._open.get(number)

    def name_at(self, number: int) -> Name | None:
        """The name of that connection; None before the introduction."""
        return self._names.get(number)

    def introduced(self) -> tuple[Peer, ...]:
        """The connections by which names are reached."""
        return tuple(self._peers.values())

    def send(self, message: messages.FromCoordinator | messages.ToAgent, to: Iterable[Name]) -> None:
        """Send a message to those of ``to`` that are connected."""
        for name in to:
            peer = self._peers.get(name)
            if peer is not None:
                peer.send(message)

    def send_all(self, message: messages.FromCoordinator | messages.ToAgent) -> None:
        """Send a message to all introduced connections."""
        for peer in self.introduced():
            peer.send(message)
