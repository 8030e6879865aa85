"""Handing this worker's state on.

Question  What does a newcomer get that asks this worker for a part of the state?
Holds     An answer is of one moment between two exchanges, as of the exchange asked for or a later one. Weights are the
          plain ones and buffers the group's. A worker that cannot give what is asked for says so, and another one is
          asked: one whose weights differ, one whose script has other weights in the model for a while, one without the
          user's state of that moment.
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
    """Where newcomers ask (``tensors.handoff.Donor``)."""

    pending: bool
    address: str

    def serve(self, era: int, exchange: int, snapshot: Callable[[Sequence[str], int], dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class NoDonor:
    """Without a coordinator there are no newcomers."""

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
    """How state gets from one worker to another; without a coordinator not at all."""

    donor: StateDonor = _NO_DONOR
    recipient: Callable[[str], StateRecipient] = _no_recipient
    """the line to the donor at an address"""
    share: Callable[[Any, Callable[[], None]], None] = _no_leader
    """(channel, look): before the first exchange everybody takes the leader's state over"""
    say: Callable[[str], None] = say_to_user
    """to whom it is said that the group has to wait for this worker"""


NO_LINES = StateLines()


class StateServer:
    """Answers the newcomers of one worker."""

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
        """Whether a newcomer waits for something."""
        return self._donor.pending

    def serve(self, group: GroupState, *, swapped: bool = False) -> None:
        """Give newcomers what they asked for, as of now.

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
        """While this worker is healed: who waits for its state asks somebody else."""
        if not self._reception.healing:
            return

        def snapshot(want: Sequence[str], as_of: int) -> dict[str, Any]:
            raise LookupError("its state is not that of the others")

        self._donor.serve(group.era, group.exchange, snapshot)

    def close(self) -> None:
        """Nothing more is handed on."""
        self._donor.close()
