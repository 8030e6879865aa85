"""How a worker reaches the other members.

Question  What is posted in the group of the present era, what comes back, and when is an earlier group let go?
Holds     A failure of the members' connections is the end of the era, whatever the error: the coordinator finds out
          who is lost. What no group could do is an error of this worker. The group of a planned era that is over is
          kept until its last exchange is, for those who go along have yet to learn that it was settled.
Source    docs/protocol.md ("Following", "Planned change").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from pliant.core import evaluation, tickets
from pliant.core.evaluation import Appendix
from pliant.core.tickets import Ticket
from pliant.tensors.process_group import failures
from pliant.tensors.process_group.channel import Channel, Summation
from pliant.worker.elastic.rendezvous import EraBroken
from pliant.worker.evaluation.appendices import Appended

Answer = TypeVar("Answer")


def reached(ask: Callable[[], Answer], what: str = "the exchange with the other workers") -> Answer:
    """Post something to the others, or read what they have posted. Raises ``EraBroken`` where connections fail."""
    try:
        return ask()
    except RuntimeError as error:
        own = failures.as_own(error)
        if own is not None:
            raise own from (None if own is error else error)
        raise EraBroken(f"{what} failed: {error}") from error


class Collectives:
    """The group of the present era, and those that are ending."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._retired: list[tuple[Channel, Summation]] = []
        """groups of planned eras that are over, with their last exchange"""

    # -- the present one

    def exchange(self, packed: bytes, sums: Sequence[Tensor]) -> Summation:
        """Begin to gather tickets and to add up tensors, in place."""
        return reached(lambda: self._channel.exchange(packed, sums))

    def gather(self, packed: bytes) -> Summation:
        """Begin to gather tickets only."""
        return reached(lambda: self._channel.gather(packed))

    def exchange_appended(self, packed: bytes, appendix: bytes) -> Summation:
        """Begin to gather tickets and, where anybody has one, appendices; nothing is added up."""
        channel = self._channel
        return reached(lambda: Appended(channel.gather, channel.exchange(packed, []), appendix))

    def gather_appendices(self, gathered: Summation) -> Summation:
        """Begin to gather the appendices of an exchange whose tickets are known; this worker has none."""
        return Appended(self._channel.gather, gathered, b"")

    def appendices(self, summation: Summation) -> list[Appendix]:
        """The appendices of an exchange that was begun with them, and is over."""
        assert isinstance(summation, Appended)
        return [evaluation.unpacked(data) for data in reached(summation.appendices)]

    def add_up(self, sums: Sequence[Tensor]) -> Summation:
        """Begin to add up the tensors of an exchange whose tickets are known."""
        return reached(lambda: self._channel.add_up(sums))

    def begin(self, packed: bytes) -> Summation:
        """Begin an exchange whose sums come in parts."""
        return reached(lambda: self._channel.begin(packed))

    def go_on(self, summation: Summation, sums: Sequence[Tensor], *, last: bool = False) -> None:
        """Begin to add up more of it; ``last``: that is all."""
        reached(lambda: self._channel.go_on(summation, sums, last=last))

    def gathered(self, summation: Summation) -> tuple[list[Ticket], int]:
        """The tickets of an exchange that is over, and the union of their bitmaps."""
        unpacked = [tickets.unpack(data) for data in reached(summation.tickets)]
        bitmap = functools.reduce(int.__or__, (bits for _, bits in unpacked))
        return [ticket for ticket, _ in unpacked], bitmap

    def added_up(self, summation: Summation) -> None:
        """Make sure that an exchange without tickets has succeeded."""
        reached(summation.tickets)

    def enter(self, channel: Channel) -> None:
        """Go on in another era's group."""
        self._channel = channel

    def leave(self) -> None:
        """Give the present group up, whatever is under way in it."""
        self._channel.leave()

    # -- those that are ending

    def retire(self, packed: bytes | None) -> None:
        """The present group's last exchange: ``packed`` is for those who go along; None: they know."""
        if packed is None:
            self._channel.leave()
            return
        try:
            self._retired.append((self._channel, self._channel.gather(packed)))
        except RuntimeError:
            # Somebody of the old era has died; whether that matters to the new one shows there.
            self._channel.leave()

    @property
    def ended(self) -> bool:
        """Whether the last exchange of every retired group is over."""
        return all(last.over for _, last in self._retired)

    def tidy(self) -> None:
        """Leave the groups whose last exchange is over."""
        going_on: list[tuple[Channel, Summation]] = []
        for channel, last in self._retired:
            if last.over:
                channel.leave()
            else:
                going_on.append((channel, last))
        self._retired = going_on

    def close(self) -> None:
        """Leave all of them."""
        self._channel.leave()
        for channel, _ in self._retired:
            channel.leave()
