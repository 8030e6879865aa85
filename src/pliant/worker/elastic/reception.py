"""Which members this worker receives missing state from.

Question  Which donors does a worker ask, and what becomes of a catch-up when the era changes?
Holds     There is one catch-up at a time. It ends when the user's own state is installed (``user_state``). The donors
          are the members that hold the state: the era's donor first, leaving members last.
Source    docs/design/0007-elastic.md ("Handing the state on"); docs/design/0013-drift.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pliant.control.messages import EraPlan
from pliant.core.group_state import GroupState, Standing
from pliant.types import WorkerId
from pliant.worker.elastic.catch_up import CatchUp, StateRecipient
from pliant.worker.elastic.rendezvous import FormedGroup
from pliant.worker.training import Training


def active(group: GroupState) -> list[WorkerId]:
    """The workers that compute, in the roster's order."""
    pairs = zip(group.roster, group.standings, strict=True)
    return [worker for worker, standing in pairs if standing is Standing.ACTIVE]


def holders(group: GroupState) -> list[WorkerId]:
    """The workers that hold the state, in the roster's order. A leaving worker may be the last one of them."""
    pairs = zip(group.roster, group.standings, strict=True)
    return [worker for worker, standing in pairs if standing is not Standing.FOLLOWING]


class Reception:
    """One worker's catch-ups: a newcomer's, those of one that was away, and those of one whose weights differed."""

    def __init__(
        self,
        me: Callable[[], WorkerId],
        training: Training,
        carried: Mapping[str, Any],
        connect: Callable[[str], StateRecipient],
        say: Callable[[str], None],
    ) -> None:
        """``connect``: to the donor at an address. ``say``: called if the group has to wait for this worker."""
        self._me = me
        self._training = training
        self._carried = carried
        self._connect = connect
        self._say = say
        self.under_way: CatchUp | None = None
        self.healing = False
        """this worker's weights differed from the others', and it receives theirs"""
        self._addresses: Mapping[str, str] = {}
        """the addresses of the donors of the present era's members"""

    @property
    def holds_all(self) -> bool:
        """Whether nothing is missing, not even the user's own state."""
        return self.under_way is None

    @property
    def complete(self) -> bool:
        """Whether this worker holds everything but the user's own state."""
        return self.under_way is None or self.under_way.complete

    # -- beginning, and the end

    def expect(self, plan: EraPlan) -> None:
        """Ask for the state that a planned era will begin with, while its group is formed."""
        self._begun().expect(plan.addresses[plan.donor], plan.era)

    def take_over(self, group: GroupState, seat: FormedGroup, *, keep: bool) -> None:
        """Begin to receive the state from the holders in this era; with ``keep``, go on."""
        self._begun().restart(self.donors(group, seat), group.era, group.exchange, keep=keep)

    def take_users_state(self, donors: Sequence[str], group: GroupState) -> None:
        """Begin a catch-up in which only the user's own state is missing."""
        self.under_way = CatchUp(self._training, self._carried, self._connect, tensors=False)
        self.under_way.restart(donors, group.era, group.exchange, keep=True)

    def heal(self, group: GroupState, donor: int) -> None:
        """This worker's weights differ from the others': receive the state again, from ``donor`` first."""
        assert self.under_way is None, "what was under way is dropped first"
        first = self._addresses.get(group.roster[donor])
        addresses = sorted(self.others_computing(group), key=lambda address: address != first)
        self._begun().restart(addresses, group.era, group.exchange, keep=False)
        self.healing = True

    def _begun(self) -> CatchUp:
        if self.under_way is None:
            self.under_way = CatchUp(self._training, self._carried, self._connect, say=self._say)
        return self.under_way

    def drop(self) -> None:
        """End the catch-up. Called by ``UserState``, which waits for its last part."""
        if self.under_way is not None:
            self.under_way.close()
            self.under_way = None
        self.healing = False

    # -- whom to ask

    def entered(self, seat: FormedGroup) -> None:
        """An era has begun."""
        self._addresses = seat.addresses

    def donors(self, group: GroupState, seat: FormedGroup) -> list[str]:
        """The addresses of the members that hold the state, the era's donor first."""
        standings = dict(zip(group.roster, group.standings, strict=True))
        first = seat.roster[seat.donor]
        donors = sorted(holders(group), key=lambda worker: (standings[worker] is Standing.LEAVING, worker != first))
        return [seat.addresses[worker] for worker in donors if worker in seat.addresses and worker != self._me()]

    def others_computing(self, group: GroupState) -> list[str]:
        """The addresses of all other members that compute now."""
        return self.addresses_of(worker for worker in active(group) if worker != self._me())

    def addresses_of(self, workers: Iterable[WorkerId]) -> list[str]:
        """The addresses of these workers, as far as they are known."""
        return [self._addresses[worker] for worker in workers if worker in self._addresses]

    # -- while the rounds go on

    def pursue(self, exchange: int) -> None:
        """Install what has arrived and ask for what is missing."""
        if self.under_way is not None:
            self.under_way.pursue(exchange)

    def holds_up(self, coming: int) -> bool:
        """Whether a large tensor must arrive before this worker takes part in another round."""
        return self.under_way is not None and self.under_way.holds_up(coming)

    @property
    def kept_bytes(self) -> int:
        """Bytes of gradients of past rounds that are kept for requested tensors."""
        return 0 if self.under_way is None else self.under_way.kept_bytes

    def averaged(
        self, exchange: int, present: int, factor: float, scheduled: tuple[float, float], *, finite: bool
    ) -> Callable[[Any], bool] | None:
        """What to call with a round's mean gradients; it returns whether it keeps the buffer."""
        pursuing = self.under_way
        if pursuing is None:
            return None
        return lambda means: pursuing.note(exchange, means, present, factor, scheduled, finite=finite)

    def lacks(self, parameters: Sequence[int]) -> None:
        """The group trains parameters that this newcomer's optimizer does not have: ask for them again."""
        if self.under_way is not None:
            self.under_way.lose(parameters)

    def evaluated(self, exchange: int, result: float) -> None:
        """A top-level ``evaluate`` has ended: a schedule that is still to arrive may not have counted it."""
        if self.under_way is not None:
            self.under_way.note_result(exchange, result)

    def drained(self, exchange: int) -> None:
        """The buffers were made equal: buffers that are still to arrive may be older."""
        if self.under_way is not None:
            self.under_way.note_drain(exchange)
