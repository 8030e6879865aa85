"""Handing this worker's state to newcomers.

Question  How does this worker answer a newcomer that asks for a part of the state?
Holds     An answer is of one moment between two exchanges, as of the exchange asked for or a later one. It has the
          plain weights and the group's buffers. A worker refuses what it cannot give, and the newcomer asks another
          one: if its weights differ, if its script has put other weights into the model for a while, or if it does not
          have the user's state of that moment.
Source    docs/design/0007-elastic.md ("Handing the state on").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pliant.core.group_state import GroupState
from pliant.worker import snapshot as states
from pliant.worker.elastic.catch_up import StateRecipient, say_to_user
from pliant.worker.elastic.reception import Reception
from pliant.worker.elastic.user_state import STATE, UserState, users_state_of
from pliant.worker.training import Training


class StateDonor(Protocol):
    """Receives the newcomers' requests and sends the answers (``tensors.handoff.Donor``)."""

    pending: bool
    address: str

    def serve(self, era: int, exchange: int, snapshot: Callable[[Sequence[str], int], dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class NoDonor:
    """The donor of a worker without a coordinator: there are no newcomers."""

    pending = False
    address = ""

    def serve(self, era: int, exchange: int, snapshot: Callable[[Sequence[str], int], dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


def _no_recipient(address: str) -> StateRecipient:
    raise AssertionError("there is no other worker to ask")


def _no_leader(channel: Any, look: Callable[[], None]) -> None:
    raise AssertionError("there is no era to begin")


_NO_DONOR = NoDonor()


@dataclass(frozen=True, slots=True)
class StateLines:
    """How state gets from one worker to another. The defaults: not at all, without a coordinator."""

    donor: StateDonor = _NO_DONOR
    recipient: Callable[[str], StateRecipient] = _no_recipient
    """the connection to the donor at an address"""
    share: Callable[[Any, Callable[[], None]], None] = _no_leader
    """(channel, look): before the first exchange all workers take over the leader's state"""
    say: Callable[[str], None] = say_to_user
    """called if the group has to wait for this worker"""


NO_LINES = StateLines()


class StateServer:
    """Answers the requests of newcomers."""

    def __init__(
        self,
        donor: StateDonor,
        training: Training,
        carried: Mapping[str, Any],
        reception: Reception,
        users_state: UserState,
    ) -> None:
        self._donor = donor
        self._training = training
        self._carried = carried
        self._reception = reception
        self._users_state = users_state

    @property
    def wanted(self) -> bool:
        """Whether a request waits for an answer."""
        return self._donor.pending

    def serve(self, group: GroupState, *, swapped: bool = False) -> None:
        """Answer the requests, as of now.

        ``swapped``: the script has put other weights into the model for a while.
        """

        def snapshot(want: Sequence[str], as_of: int) -> dict[str, Any]:
            kept = self._users_state.answer(want, as_of, group)
            if kept is not None:
                return kept
            with_weights = want != [STATE]
            if swapped and with_weights:
                raise LookupError("its script has other weights in the model for a while")
            with self._training.plain():
                if with_weights:
                    return states.snapshot(self._training, self._carried, want)
                return {STATE: users_state_of(self._carried)}

        self._donor.serve(group.era, group.exchange, snapshot)

    def refuse(self, group: GroupState) -> None:
        """Refuse the requests while this worker's own weights are replaced; the newcomers ask other members."""
        if not self._reception.healing:
            return

        def snapshot(want: Sequence[str], as_of: int) -> dict[str, Any]:
            raise LookupError("its state is not that of the others")

        self._donor.serve(group.era, group.exchange, snapshot)

    def close(self) -> None:
        """Nothing more is handed on."""
        self._donor.close()
