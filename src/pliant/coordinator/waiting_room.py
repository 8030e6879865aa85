"""Connections wait here while a coordinator is still starting.

Question  What are workers, launchers and users told while a coordinator still reads the journal?
Holds     No message is lost: the coordinator receives them later in the same order. Waiting connections are told to
          wait, again and again.
Source    ours; docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pliant.control.app import CoordinatorApi, WebSocketPeer
from pliant.control.messages import FromAgent, FromWorker, Hold

READING = 503, "the coordinator still reads the journal; try again in a moment"


class WaitingRoom:
    """The ``CoordinatorApi`` of ``control.app`` until the coordinator has started; then it passes all calls on."""

    def __init__(self) -> None:
        self._desk: CoordinatorApi | None = None
        self._said: list[Callable[[CoordinatorApi], None]] = []
        self._waiting: dict[int, WebSocketPeer] = {}

    def hold(self) -> None:
        """Tell waiting connections that a coordinator is starting."""
        for peer in self._waiting.values():
            peer.send(Hold())

    def lead_on(self, desk: CoordinatorApi) -> None:
        """The coordinator has started: hand over all messages, and pass on further ones."""
        self._desk = desk
        said, self._said, self._waiting = self._said, [], {}
        for tell in said:
            tell(desk)

    def _say(self, tell: Callable[[CoordinatorApi], None]) -> None:
        if self._desk is not None:
            tell(self._desk)
        else:
            self._said.append(tell)

    def _await(self, peer: WebSocketPeer) -> None:
        if self._desk is None:
            self._waiting[peer.number] = peer

    def connected(self, peer: WebSocketPeer) -> None:
        """A worker has connected."""
        self._await(peer)
        self._say(lambda desk: desk.connected(peer))

    def received(self, peer: WebSocketPeer, message: FromWorker) -> None:
        """A worker's message."""
        self._say(lambda desk: desk.received(peer, message))

    def closed(self, peer: WebSocketPeer) -> None:
        """A worker has disconnected."""
        self._waiting.pop(peer.number, None)
        self._say(lambda desk: desk.closed(peer))

    def agent_connected(self, peer: WebSocketPeer) -> None:
        """A launcher has connected."""
        self._await(peer)
        self._say(lambda desk: desk.agent_connected(peer))

    def agent_received(self, peer: WebSocketPeer, message: FromAgent) -> None:
        """A launcher's message."""
        self._say(lambda desk: desk.agent_received(peer, message))

    def agent_closed(self, peer: WebSocketPeer) -> None:
        """A launcher has disconnected."""
        self._waiting.pop(peer.number, None)
        self._say(lambda desk: desk.agent_closed(peer))

    # requests of users

    def status(self) -> bytes:
        """The status; nearly empty until the coordinator has started."""
        return self._desk.status() if self._desk is not None else b'{"job":""}'

    def happenings(self) -> bytes:
        """The events; empty until the coordinator has started."""
        return self._desk.happenings() if self._desk is not None else b"[]"

    def figures(self) -> Mapping[str, float]:
        """The metrics; empty until the coordinator has started."""
        return self._desk.figures() if self._desk is not None else {}

    def scale(self, workers: int) -> tuple[int, str]:
        """Refused until the coordinator has started."""
        return self._desk.scale(workers) if self._desk is not None else READING

    def drain(self, worker: str) -> tuple[int, str]:
        """Refused until the coordinator has started."""
        return self._desk.drain(worker) if self._desk is not None else READING
