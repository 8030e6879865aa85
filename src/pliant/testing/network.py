"""Virtual connections between workers, launchers and the coordinator.

Question  What can happen to a message on its way?
Holds     A connection behaves like a TCP stream: messages arrive in order and once. Messages on their way when the
          connection breaks are lost, and each end learns of that at a time of its own. There is no order between
          connections. A blocked direction delays messages and loses none.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosedError

from pliant.testing.clock import World


class End:
    """One end of a connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.other: End
        self.closed = False
        """this end has closed the connection, or knows that it is gone"""
        self.in_good_order = False
        """the other end has closed the connection"""
        self.blocked_until_s = 0.0
        """messages from here do not arrive before"""
        self._last_s = 0.0
        self.received: Callable[[bytes], None] = lambda frame: None
        self.lost: Callable[[], None] = lambda: None

    def send(self, frame: bytes) -> None:
        """Send a frame; raises as a real connection if this end knows that it is gone."""
        if self.closed:
            raise ConnectionClosedError(None, None)
        world, wire = self._wire.world, self._wire
        arrives_s = max(self._last_s, self.blocked_until_s, world.now_s + wire.delay())
        self._last_s = arrives_s
        world.at(arrives_s, lambda: self._arrive(frame))

    def _arrive(self, frame: bytes) -> None:
        wire, other = self._wire, self.other
        if wire.cut or other.closed:
            return
        if self._wire.world.now_s < self.blocked_until_s:
            wire.world.at(self.blocked_until_s, lambda: self._arrive(frame))
            return
        other.received(frame)

    def close(self) -> None:
        """Close the connection; messages sent before still arrive."""
        if not self.closed:
            self.closed = True
            world = self._wire.world
            arrives_s = max(self._last_s, self.blocked_until_s, world.now_s + self._wire.delay())
            self._last_s = arrives_s
            world.at(arrives_s, lambda: self.other.learn(in_good_order=not self._wire.cut))

    def learn(self, *, in_good_order: bool = False) -> None:
        """Learn that the other end has closed, or that the connection broke."""
        if not self.closed:
            self.closed = True
            self.in_good_order = in_good_order
            self.lost()


class Wire:
    """A connection from a process (``near``) to the coordinator (``far``)."""

    def __init__(self, world: World, slowest_s: float) -> None:
        self.world = world
        self.cut = False
        self._slowest_s = slowest_s
        self.near, self.far = End(self), End(self)
        self.near.other, self.far.other = self.far, self.near

    def delay(self) -> float:
        """A random delay of one message."""
        part = self.world.random.random()
        return 0.0001 + self._slowest_s * part * part

    def break_off(self, *, near_s: float, far_s: float) -> None:
        """Break the connection: messages on their way are lost; the ends learn of it after so many seconds."""
        if not self.cut:
            self.cut = True
            self.world.after(near_s, self.near.learn)
            self.world.after(far_s, self.far.learn)


class Network:
    """The coordinator's port and all connections to it."""

    def __init__(self, world: World, slowest_s: float) -> None:
        self.world = world
        self.slowest_s = slowest_s
        self.wires: list[tuple[Any, Wire]] = []
        """each with the process or launcher at its near end"""
        self.accept: Callable[[Wire, bool], None] | None = None
        """called with every new connection; None while no coordinator listens"""
        self.closed_until_s: dict[int, float] = {}
        """id of the owner → until when it cannot reach the coordinator"""

    def dial(self, owner: Any, *, agent: bool = False) -> Wire | None:
        """Open a connection to the coordinator; None if it cannot be reached."""
        if self.accept is None or self.world.now_s < self.closed_until_s.get(id(owner), 0.0):
            return None
        wire = Wire(self.world, self.slowest_s)
        self.wires = [(who, each) for who, each in self.wires if not each.cut and not each.near.closed]
        self.wires.append((owner, wire))
        self.accept(wire, agent)
        return wire

    def of(self, owner: Any) -> list[Wire]:
        """The connections of an owner."""
        return [wire for who, wire in self.wires if who is owner and not wire.cut]
