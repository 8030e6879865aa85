"""What a worker in a job needs besides its loop to get from one era into the next.

Question  What does a member tell a newcomer, what does a newcomer ask for, and what does everybody bring along?
Holds     The state that is handed round is the replicated one: every member that settled the same exchange would write
          the same bytes. Entries have one fixed form, so that they can be gathered like tickets.
Source    docs/design/0007-elastic.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from pliant.control import messages
from pliant.control.messages import EraPlan
from pliant.core import allowance
from pliant.core.finished_calls import NONE, FinishedCall, FinishedCalls
from pliant.core.group_state import FinishedPhase, GroupState, Standing
from pliant.core.regrouping import Entry
from pliant.core.tickets import NOWHERE, Kind, point
from pliant.tensors.process_group.channel import Channel
from pliant.types import WorkerId
from pliant.worker.elastic import catch_up
from pliant.worker.elastic.catch_up import CatchUp, StateRecipient
from pliant.worker.elastic.rendezvous import FormedGroup, Rendezvous
from pliant.worker.progress import LoopPoint, Progress
from pliant.worker.training import Training

_ENTRY = struct.Struct("<qqqqqqqqqBqqqB")
# A loop over batches, and an evaluate inside it.
_DEPTH = 2


class GroupSnapshot(msgspec.Struct, frozen=True):
    """The replicated state, as the donor hands it round at the start of an era."""

    group: GroupState
    records: int
    live: int
    """the bitmap of buffers that are merged"""
    undrained: bool
    """the exchange that makes the buffers equal is still to come"""
    known: int = 0
    """so many calls of the script all who are told know already"""
    calls: list[FinishedCall] = []
    """those that ``group`` has left since; in there they are only while nothing travels"""

    def packed(self, known: int) -> GroupSnapshot:
        """As it travels to workers that know so many calls."""
        first = min(known, len(self.group.past))
        return replace(self, group=replace(self.group, past=NONE), known=first, calls=self.group.past.since(first))

    def unpacked(self, own: FinishedCalls) -> GroupSnapshot:
        """As it was, for a worker that knows ``own`` calls."""
        assert len(own) >= self.known, "the donor was told how many"
        past = own.up_to(self.known).joined(self.calls)
        return replace(self, group=replace(self.group, past=past), known=0, calls=[])


_KNOWN = struct.Struct("<q")


def packed_count(past: FinishedCalls) -> bytes:
    """How many calls a worker knows for certain: to the last one something may still be added."""
    return _KNOWN.pack(max(0, len(past) - 1))


def unpacked_count(data: bytes) -> int:
    return _KNOWN.unpack(data)[0]


_decoder = msgspec.msgpack.Decoder(tuple[GroupSnapshot, bytes])


def encoded(handed: GroupSnapshot, known: int) -> bytes:
    """For workers that know so many calls."""
    # msgpack has no numbers above 64 bits, and a model may have more buffers than that.
    live = handed.live.to_bytes((handed.live.bit_length() + 7) // 8, "little")
    return msgspec.msgpack.encode((replace(handed.packed(known), live=0), live))


def decoded(payload: bytes, own: FinishedCalls) -> GroupSnapshot:
    """For a worker that knows ``own`` calls."""
    handed, live = _decoder.decode(payload)
    return replace(handed, live=int.from_bytes(live, "little")).unpacked(own)


def packed_entry(entry: Entry) -> bytes:
    dropped, kept = (
        (*values, *(0,) * (_DEPTH - len(values))) for values in (entry.dropped[:_DEPTH], entry.kept[:_DEPTH])
    )
    points = (*entry.points, *(NOWHERE,) * (_DEPTH - len(entry.points)))[:_DEPTH]
    return _ENTRY.pack(
        entry.active, len(entry.kept), *dropped, *kept, *(number for point in points for number in point.packed)
    )


def unpacked_entry(data: bytes) -> Entry:
    active, depth, *counts = _ENTRY.unpack(data)
    points = [point(*counts[at : at + 4]) for at in range(2 * _DEPTH, len(counts), 4)]
    dropped, kept = counts[:_DEPTH], counts[_DEPTH : 2 * _DEPTH]
    return Entry(bool(active), tuple(dropped[:depth]), tuple(kept[:depth]), tuple(points[:depth]))


def _active(group: GroupState) -> list[WorkerId]:
    """Who computes, in the roster's order."""
    pairs = zip(group.roster, group.standings, strict=True)
    return [worker for worker, standing in pairs if standing is Standing.ACTIVE]


def _holders(group: GroupState) -> list[WorkerId]:
    """Who holds the state, in the roster's order. Who leaves does, too, and may be the last one to hold it."""
    pairs = zip(group.roster, group.standings, strict=True)
    return [worker for worker, standing in pairs if standing is not Standing.FOLLOWING]


class StateDonor(Protocol):
    """Hands this worker's state on (``tensors.handoff.Donor``)."""

    pending: bool

    def serve(self, era: int, exchange: int, snapshot: Callable[[Sequence[str], int], dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class Eras:
    """This worker's dealings with the coordinator and with newcomers."""

    def __init__(
        self,
        place: Rendezvous,
        donor: StateDonor,
        connect: Callable[[str], StateRecipient],
        carried: Mapping[str, Any],
        share: Callable[[Channel, Callable[[], None]], None],
        come_back: Callable[[], Rendezvous],
        overdue: Callable[[], Callable[[], None] | None] = lambda: None,
        say: Callable[[str], None] = catch_up.say_to_user,
    ) -> None:
        self.place = place
        self.enlisted = False
        self.leaving = False
        self._leaving_for = ""
        self._donor = donor
        self._connect = connect
        self._carried = carried
        self.share = share
        """(channel, look): before the first exchange, everybody takes the leader's state over"""
        self._come_back = come_back
        self._overdue = overdue
        """called once this worker is asked to go: sees to it that it does not take for ever; the answer calls it off"""
        self._say = say
        """to whom it is said that the group has to wait for this worker"""
        self._in_time: Callable[[], None] | None = None
        self._takeover: CatchUp | None = None
        self._healing = False
        """its state was not that of the others, and it is taking theirs over"""
        self._asked_state: int | None = None
        self._own_is_newest = False
        """it was the last one to compute: of the user's state it has the newest, whatever else it takes over"""
        self.lost_users_state = False
        """the user's state was on its way here, and has gone with the last worker that had it"""
        self._left: dict[str, Any] = {}
        """the user's state at the end of the last calls to whose end somebody came without it"""
        self._kept: dict[int, Any] = {}
        """by exchange, the user's state after it, for one that asks when the next is settled already"""
        self._before_hooks: tuple[str, Any] | None = None
        """the last update with which somebody began to compute, and the user's state before what was done with it"""
        self._missed = math.inf
        """the first exchange with an update whose code this worker, about to go, has not run"""
        self._ahead: frozenset[WorkerId] = frozenset()
        """who has run it for the last such update"""
        self._addresses: Mapping[str, str] = {}
        """where the members of the present era hand their state on"""
        self.loop = Progress()
        """what the coordinator hears about the main loop"""

    @property
    def rewinds(self) -> int:
        """How often the run had gone back to a checkpoint when this worker came."""
        return self.place.link.mailbox.welcome.rewinds

    # -- past calls, enlisting

    def past_call(self, index: int) -> FinishedPhase | None:
        """How the script's call number ``index`` ended, as far as the coordinator knew when this worker came."""
        past = self.place.link.mailbox.welcome.past
        if index >= len(past):
            return None
        found = past[index]
        return FinishedPhase(Kind[found.task.upper()], found.epoch, found.result, results=found.results)

    def last_past_epoch(self) -> int:
        """The last epoch of which the coordinator knew a finished call."""
        past = self.place.link.mailbox.welcome.past
        return past[-1].epoch if past else -1

    def enlist(self, index: int, task: str, length: int) -> None:
        """Ask to become a member, from this call on."""
        self.enlisted = True
        self.place.enlist(messages.Call(index, task, length))

    def returned(self) -> None:
        """Back under a new name, as a newcomer."""
        self.place.close()
        self.place = self._come_back()
        self.enlisted = False
        self._drop_takeover()
        if self.leaving:
            # It was said to a coordinator that did not hear it, or under a name that is gone.
            self.place.link.leaving(self._leaving_for)

    def leave(self, reason: str) -> None:
        """Ask for an era without this worker. Safe in a signal handler."""
        if not self.leaving:
            self.leaving, self._leaving_for = True, reason
            self.place.link.leaving(reason)
            self._in_time = self._overdue()

    def progress(self, group: GroupState, standing: Standing, now_s: float, at: LoopPoint, *, ending: bool) -> None:
        """Note how far the main loop is; the link's thread tells it."""
        self.place.link.position = self.loop.noted(
            self.place.me, group, standing, now_s, holds_all=self.holds_all, at=at, ending=ending
        )

    # -- handing on

    def serve(
        self, training: Training, group: GroupState, restored: Mapping[str, Any] | None, *, swapped: bool = False
    ) -> None:
        """Give newcomers what they asked for, as of now; ``restored``: the user's state that is yet to be installed.

        ``swapped``: the script has put other weights into the model for a while.
        """
        active = _active(group)

        def snapshot(want: Sequence[str], as_of: int) -> dict[str, Any]:
            at_end, before_hooks = catch_up.is_of_end(want), catch_up.is_before_hooks(want)
            if (
                (at_end or before_hooks or catch_up.STATE in want)
                and as_of >= self._missed
                and not self._ahead.isdisjoint(active)
            ):
                raise LookupError("it leaves, and others have a newer one")
            if before_hooks:
                if self._before_hooks is None or want != [self._before_hooks[0]]:
                    raise LookupError("it has not kept that")
                return {want[0]: self._before_hooks[1]}
            if at_end:
                if len(want) != 1 or want[0] not in self._left:
                    raise LookupError("it has not kept that")
                return {want[0]: self._left[want[0]]}
            if catch_up.STATE in want and not self.holds_all:
                raise LookupError("it waits for the user's state itself")
            if want == [catch_up.STATE] and restored is not None:
                return {catch_up.STATE: restored}
            if want == [catch_up.STATE] and as_of < group.exchange and as_of in self._kept:
                # It has handed in nothing to the exchange since, and runs the code for that itself.
                return {catch_up.STATE: self._kept[as_of]}
            if swapped and want != [catch_up.STATE]:
                raise LookupError("its script has other weights in the model for a while")
            with training.plain():
                return catch_up.snapshot(training, self._carried, want)

        self._donor.serve(group.era, group.exchange, snapshot)

    @property
    def wanted(self) -> bool:
        """Whether a newcomer waits for something."""
        return self._donor.pending

    # -- taking over

    @property
    def holds_all(self) -> bool:
        """Whether nothing is still to come, the user's own state included."""
        return self._takeover is None

    @property
    def _holds_users_state(self) -> bool:
        """Whether the user's state here is that of the last update: nobody is to get another one, now or later."""
        return self._takeover is None or self._own_is_newest

    @property
    def complete(self) -> bool:
        """Whether this worker holds everything but the user's own state."""
        return self._takeover is None or self._takeover.complete

    def expect(self, training: Training, plan: EraPlan) -> None:
        """A planned era will have this worker in it: ask for the state that it begins with, while its group forms."""
        self._taking(training).expect(plan.addresses[plan.donor], plan.era)

    def take_over(self, training: Training, group: GroupState, seat: FormedGroup, *, keep: bool) -> None:
        """Begin (or, with ``keep``, go on) to take the state over from the active members of the era."""
        self._taking(training).restart(self._donors(group, seat), group.era, group.exchange, keep=keep)

    def _taking(self, training: Training) -> CatchUp:
        if self._takeover is None:
            self._takeover = CatchUp(training, self._carried, self._connect, say=self._say)
        return self._takeover

    def trust_own_state(self, group: GroupState, *, was_active: bool) -> None:
        """A new era begins with ``group``. Where nobody else computed, nobody has a newer user's state to ask for."""
        held = self._own_is_newest or (was_active and self.holds_all)
        self._own_is_newest = held and set(_active(group)) <= {self.place.me}

    def go_on(self, group: GroupState, seat: FormedGroup, *, knows_best: bool) -> None:
        """An era has begun while something is still to come: ask those who are in it.

        ``knows_best``: of all who are left this worker is the donor, whatever it lacks.
        """
        # Who takes the state over has run that code, too, but waits for the outcome like any newcomer.
        self._ahead &= set(_holders(group))
        if self._takeover is None:
            self._own_is_newest = False
            return
        donors = self._donors(group, seat)
        following = group.standings[group.roster.index(self.place.me)] is Standing.FOLLOWING
        if not following and (not donors or knows_best):
            # Only the user's own state is missing, and nobody has a newer one.
            self.lost_users_state = self.lost_users_state or self.lacks_users_state
            self._drop_takeover()
        else:
            self._asked_state = None
            self._takeover.restart(donors, group.era, group.exchange, keep=True)

    def _donors(self, group: GroupState, seat: FormedGroup) -> list[str]:
        """The addresses of those who hold the state, the era's donor first."""
        standings = dict(zip(group.roster, group.standings, strict=True))
        first = seat.roster[seat.donor]
        donors = sorted(_holders(group), key=lambda worker: (standings[worker] is Standing.LEAVING, worker != first))
        return [seat.addresses[worker] for worker in donors if worker in seat.addresses and worker != self.place.me]

    def _others_computing(self, group: GroupState) -> list[str]:
        """The addresses of all others that compute now."""
        others = [worker for worker in _active(group) if worker != self.place.me]
        return [self._addresses[worker] for worker in others if worker in self._addresses]

    def pursue(self, exchange: int) -> None:
        """Ask for what is missing and install what has come."""
        if self._takeover is not None:
            self._takeover.pursue(exchange)

    def holds_up(self, coming: int) -> bool:
        """Whether a large tensor is to arrive before this worker takes part in another round."""
        return self._takeover is not None and self._takeover.holds_up(coming)

    @property
    def kept_bytes(self) -> int:
        """Gradients of past rounds that are kept for what is on its way."""
        return 0 if self._takeover is None else self._takeover.kept_bytes

    def averaged(
        self, exchange: int, present: int, factor: float, scheduled: tuple[float, float], *, finite: bool
    ) -> Callable[[Any], bool] | None:
        """Whom to show a round's mean gradients; it says whether it keeps them."""
        pursuing = self._takeover
        if pursuing is None:
            return None
        return lambda means: pursuing.note(exchange, means, present, factor, scheduled, finite=finite)

    def lacks(self, parameters: Sequence[int]) -> None:
        """The group has come to train parameters that this newcomer's optimizer does not have: ask for them again."""
        if self._takeover is not None:
            self._takeover.lose(parameters)

    def evaluated(self, exchange: int, result: float) -> None:
        """A top-level ``evaluate`` has ended: a schedule that is still to come may not know of it."""
        if self._takeover is not None:
            self._takeover.note_result(exchange, result)

    def drained(self, exchange: int) -> None:
        """The buffers were made equal: those that are still to come are older."""
        if self._takeover is not None:
            self._takeover.note_drain(exchange)

    def entered(self, seat: FormedGroup) -> None:
        """An era has begun."""
        self._addresses = seat.addresses

    def fell_behind(self, training: Training, before: GroupState, group: GroupState, *, leaving: bool) -> None:
        """The script's code for an update runs on those who computed in ``before``, and not here: ask one of them.

        Whoever does not hold the state in ``group``, that of now, does not run it either: an era has ended meanwhile.
        Who leaves needs it no more.
        """
        spoke = {worker for member, worker in enumerate(before.roster) if allowance.speaks(before, member)}
        computing = [worker for worker in _holders(group) if worker in spoke]
        if leaving and computing:
            self._missed, self._ahead = min(self._missed, before.exchange + 1), frozenset(computing)
        if leaving or self._takeover is not None:
            return
        donors = [self._addresses[worker] for worker in computing if worker in self._addresses]
        if donors and self.place.me not in computing:
            self._own_is_newest = False
            self._takeover = CatchUp(training, self._carried, self._connect, tensors=False)
            self._takeover.restart(donors, group.era, group.exchange, keep=True)

    def heal(self, training: Training, group: GroupState, donor: int) -> None:
        """This worker's state is not that of the others: begin anew, in the same era, with ``donor``'s."""
        self._drop_takeover()
        first = self._addresses.get(group.roster[donor])
        addresses = sorted(self._others_computing(group), key=lambda address: address != first)
        self._taking(training).restart(addresses, group.era, group.exchange, keep=False)
        self._healing = True

    def refuse(self, group: GroupState) -> None:
        """While this worker is healed: who waits for its state asks somebody else."""
        if not self._healing:
            return

        def snapshot(want: Sequence[str], as_of: int) -> dict[str, Any]:
            raise LookupError("its state is not that of the others")

        self._donor.serve(group.era, group.exchange, snapshot)

    def ask_users_state(self, as_of: int) -> None:
        """Ask for the user's own state as of the exchange from which this worker computes."""
        if self._takeover is not None and self._asked_state != as_of:
            self._asked_state = as_of
            self._takeover.ask_state(as_of)

    def keep_users_state(self, left: str) -> None:
        """Somebody may come to the end of this call without the user's state: keep it as it is now."""
        if not self._holds_users_state:
            return
        # Between two exchanges a script may leave a call and the loop around it.
        kept = list(self._left.items())[-(_DEPTH - 1) :]
        self._left = {**dict(kept), catch_up.at_end_of(left): catch_up.users_state_of(self._carried)}

    def keep_for_latecomers(self, exchange: int | None) -> None:
        """Somebody has just begun to compute, and its question may come after the next update: keep what it asks for.

        None: nobody has.
        """
        if exchange is None:
            self._kept = {}
        elif exchange not in self._kept and self._holds_users_state:
            # Nobody settles two exchanges more than the one who asks.
            last = {number: state for number, state in self._kept.items() if number == exchange - 1}
            self._kept = {**last, exchange: catch_up.users_state_of(self._carried)}

    def users_state_arrived(self, group: GroupState, left: str | None) -> bool:
        """Whether the user's state is here, and installed; ``left``: as it was at the end of that call."""
        if self._takeover is None:
            return True
        if self._own_is_newest:
            self._drop_takeover()
            return True
        # Who was asked first may be about to go, and behind those who have come to compute since.
        self._takeover.may_ask(self._others_computing(group))
        values = self._takeover.users_state(group.exchange, *([catch_up.at_end_of(left)] if left is not None else []))
        if values is None:
            return False
        catch_up.install_users_state(self._carried, values)
        self._drop_takeover()
        return True

    # -- what the script does with an update

    @property
    def lacks_users_state(self) -> bool:
        """Whether this worker, a newcomer, has never had it."""
        return self._takeover is not None and self._takeover.is_of_newcomer

    def keep_before_hooks(self, exchange: int) -> None:
        """Somebody has just begun to compute, and is to begin with this update, too: keep what it asks for."""
        self._before_hooks = catch_up.before_hooks_of(exchange), catch_up.users_state_of(self._carried)

    def state_before_hooks_arrived(self, group: GroupState, exchange: int) -> bool:
        """Whether the user's state of that moment is here, and installed."""
        if self._takeover is None or self._own_is_newest:
            self._drop_takeover()
            return True
        self._takeover.may_ask(self._others_computing(group))
        values = self._takeover.users_state(exchange, catch_up.before_hooks_of(exchange))
        if values is None:
            return False
        catch_up.install_users_state(self._carried, values)
        self._drop_takeover()
        return True

    def _drop_takeover(self) -> None:
        if self._takeover is not None:
            self._takeover.close()
            self._takeover = None
        self._healing = self._own_is_newest = False
        self._asked_state = None

    def close(self) -> None:
        """Nothing more is handed on or taken over."""
        if self._in_time is not None:
            # It has gone; what the script does afterwards takes as long as it takes.
            self._in_time()
        self._drop_takeover()
        self._donor.close()
        self.place.close()
