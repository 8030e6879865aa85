"""The coordinator's open connections, of workers or of launchers.

Question  Who is at which connection, and where is somebody reached?
Holds     A connection is known from its opening to its close; it has a name from its introduction on. A name is reached
          at the last connection that it was introduced at. Messages to whoever is not there go nowhere.
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
    """Those of one kind of peer."""

    def __init__(self) -> None:
        self._open: dict[int, Peer] = {}
        self._names: dict[int, Name] = {}
        self._peers: dict[Name, Peer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, peer: Peer) -> None:
        """It has to introduce itself before anything else."""
        self._open[peer.number] = peer

    def closed(self, peer: Peer) -> Name | None:
        """It is gone; whose it was."""
        self._open.pop(peer.number, None)
        return self.forget(peer)

    def introduce(self, peer: Peer, name: Name) -> None:
        """From now on it speaks for ``name``, who is reached here."""
        self._names[peer.number] = name
        self._peers[name] = peer

    def forget(self, peer: Peer) -> Name | None:
        """Whatever it still says does not count; whose it was."""
        name = self._names.pop(peer.number, None)
        if name is not None and self._peers.get(name) is peer:
            del self._peers[name]
        return name

    def at(self, number: int) -> Peer | None:
        """The open connection of that number."""
        return self._open.get(number)

    def name_at(self, number: int) -> Name | None:
        """Who speaks there; None before the introduction."""
        return self._names.get(number)

    def introduced(self) -> tuple[Peer, ...]:
        """Where somebody is reached."""
        return tuple(self._peers.values())

    def send(self, message: messages.FromCoordinator | messages.ToAgent, to: Iterable[Name]) -> None:
        """Tell those who are there."""
        for name in to:
            peer = self._peers.get(name)
            if peer is not None:
                peer.send(message)

    def send_all(self, message: messages.FromCoordinator | messages.ToAgent) -> None:
        """Tell everybody who has been introduced."""
        for peer in self.introduced():
            peer.send(message)
