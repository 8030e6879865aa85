"""Follow: a member without a vote takes part in the exchanges of the others.

Question  How does a worker take part in an exchange without knowing beforehand what it will be?
Holds     A follower gathers tickets only, and learns from them what the others do: a round, an opening, a drain (the
          buffers are made equal), or the end. It adds nothing to the sums, makes the same decisions, and applies the
          update to the tensors it holds. Meanwhile it catches up with the state that it lacks; the user's own state is
          installed before its first draw.
Source    docs/protocol.md ("Following", "Handing the state on").
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from pliant.core import postscripts, trained_set
from pliant.core.group_state import Standing
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.tensors.process_group.channel import Summation
from pliant.worker.collectives import Collectives
from pliant.worker.in_flight import InFlight
from pliant.worker.poll import Poller
from pliant.worker.progress import LoopPoint
from pliant.worker.script.hooks import Hooks
from pliant.worker.settle import Settlement
from pliant.worker.submit import Submission
from pliant.worker.worker_state import WorkerState

# Pause between two rounds in which no member computes: all of them leave, or wait for state.
_NOBODY_S = 0.02


class Follower:
    """One worker's part in exchanges that others determine."""

    def __init__(
        self,
        member: WorkerState,
        channels: Collectives,
        lookout: Poller,
        handing: Submission,
        exchanges: Settlement,
        hooks: Hooks,
        sleep: Callable[[float], None],
    ) -> None:
        self._member = member
        self._channels = channels
        self._lookout = lookout
        self._handing = handing
        self._exchanges = exchanges
        self._hooks = hooks
        self._sleep = sleep

    # -- one exchange

    def follow(self) -> None:
        """Take part in one exchange without knowing beforehand what it will be.

        An ``evaluate`` may be opened before the round in flight is settled. A worker that is not inside the loop learns
        from the tickets of the next exchange only which of the two came first.
        """
        member, exchanges = self._member, self._exchanges
        if Standing.ACTIVE not in member.group.standings:
            # No member computes, so nothing slows the rounds down: they would follow each other without a pause.
            self._sleep(_NOBODY_S)
        self._wait_for_large_tensor()
        held = member.work.flight
        summation = self._gathered()
        gathered, bitmap = self._channels.gathered(summation)
        exchanges.go_if_expelled()
        speaking = [ticket for ticket in gathered if not ticket.flags & Flag.FOLLOWING]
        # A member in the body of a loop that has ended comes first.
        says = max(speaking, key=lambda ticket: ticket.flags & Flag.INNER, default=None)
        if held is not None and (says is None or says.exchange > member.group.exchange):
            era = member.group.era
            held.closed = True
            exchanges.settle()
            self._lookout.check_era()
            if member.group.era != era:
                return
            if self._hooks.due and not _may_be_of_update(says):
                self._hooks.call(gone_on=True)
        if says is None or (not says.flags & Flag.OPENING and says.kind is not Kind.DRAIN):
            self._follow_round(gathered, bitmap, summation)
        elif says.kind is Kind.DRAIN:
            self._follow_drain()
        elif says.kind is Kind.END:
            exchanges.conclude(gathered)
        else:
            exchanges.opened(gathered, bitmap)
        self._hooks.call()
        self._pursue()

    def _gathered(self) -> Summation:
        """Gather the tickets of all members, whatever exchange they are of, and wait for them."""
        member = self._member
        kind = member.group.phase.kind if member.group.open else Kind.TRAIN
        if member.follows or (member.group.open and kind is Kind.TRAIN and not member.speaks):
            # This script may skip the line that sets another bound: the one in force comes with the state. Inside an
            # ``evaluate`` no round applies what all have just set, and each of them may be without samples once.
            member.clip_norm = None
        ticket = member.ticket(kind, Flag.FOLLOWING | self.readiness())
        call = member.script.innermost
        if call is not None:
            ticket = replace(ticket, size=call.size, ahead=call.ahead)
        summation = self._channels.gather(member.packed(ticket))
        self._lookout.wait(summation, self._pursue)
        return summation

    def _follow_round(self, gathered: list[Ticket], bitmap: int, summation: Summation) -> None:
        """Take part in a round without a contribution; settle it at once unless an ``evaluate`` may come first.

        A newcomer that was just dealt its first samples computes during the sum.
        """
        member = self._member
        if not member.group.open:
            return
        phase = member.group.phase
        begins = self._begins()
        flight = InFlight(None, None, 0)
        if phase.kind is Kind.TRAIN:
            layout = trained_set.layout(member.group, gathered)
            member.training.gradients.lay_out(layout)
            in_parts = self._handing.in_parts(layout)
            flight.filled, flight.merged = self._handing.given_away(0.0, overlap=begins, returning=False)
            if in_parts:
                added = postscripts.nothing(len(member.group.roster), member.training.bits)
                flight.postscript = member.training.gradients.written(added)
        flight.gathered = gathered, bitmap
        member.work.flight = flight
        if phase.kind is Kind.TRAIN:
            flight.summation = self._channels.add_up(flight.sums)
        else:
            flight.summation = self._channels.gather_appendices(summation)
        if begins:
            return
        self._lookout.wait(flight.summation, self._pursue)
        if not (phase.kind is Kind.TRAIN and phase.seen and member.group.overlap):
            self._exchanges.settle()

    def _begins(self) -> bool:
        """Whether this worker may compute during this round, to which it contributes nothing."""
        member, group = self._member, self._member.group
        return (
            group.overlap
            and group.phase.kind is Kind.TRAIN
            and not group.phase.seen
            and member.script.is_at(group)
            and member.speaks
        )

    def _follow_drain(self) -> None:
        mine = self._exchanges.own_buffers()
        summation = self._channels.add_up([mine])
        self._lookout.wait(summation, self._pursue)
        self._channels.added_up(summation)
        self._exchanges.drained(mine)

    # -- coming to hold the whole state

    def _pursue(self) -> None:
        """Ask for missing state and install what has arrived."""
        member = self._member
        if member.follows:
            member.reception.pursue(member.group.exchange)

    def _wait_for_large_tensor(self) -> None:
        """Wait for a large tensor before the next round if keeping the rounds' gradients would take too much memory."""
        member = self._member
        if not member.follows:
            return

        def goes_on() -> bool:
            if not member.reception.holds_up(1 + member.work.in_flight):
                return True
            self._lookout.progress(LoopPoint.WAITING)
            self._pursue()
            return False

        self._lookout.wait_at_rest(goes_on)

    def readiness(self) -> Flag:
        """Whether this worker can compute from the coming exchange on, where it could not before."""
        member = self._member
        group = member.group
        if member.leaving or self._exchanges.expelled or not member.script.is_at(group):
            return Flag.NONE
        if member.follows:
            if not member.reception.complete:
                return Flag.NONE
            if not self._hooks.follow_updates:
                # Else the state is needed as it is before the functions of ``on_update`` are called.
                member.users_state.ask(group.exchange + 1 + member.work.in_flight)
            return Flag.READY
        late = group.open and not group.phase.present[member.index]
        return Flag.READY if late else Flag.NONE

    def make_sure(self, *, ended: bool = False) -> None:
        """Before the script acts on a phase's opening or end, make sure that the others have settled that exchange.

        A worker without the whole state is put back to where the holders of the state are, if they have not. The next
        exchange shows where they are, and so does the user's state.
        """
        member = self._member
        turned = member.turned
        while member.follows and member.group.exchange == turned:
            self._lookout.look()
            self.follow()
        if ended or member.script.is_at(member.group):
            self.take_users_state(ended=ended)

    def take_users_state(self, *, ended: bool = False) -> None:
        """Before the first micro-batch of a newcomer: wait for the user's own state, as of now.

        ``ended``: as it was at the end of the call that the script is in. Others may have run the code after it.
        """
        member = self._member
        if member.standing is not Standing.ACTIVE:
            return
        member.users_state.install_restored(member.script.calls)
        left = member.script.position if ended else None
        self._lookout.wait_at_rest(lambda: member.users_state.arrived(member.group, left))


def _may_be_of_update(says: Ticket | None) -> bool:
    """Whether the others may be in a function of ``on_update``: it opens an ``evaluate``, after a drain."""
    if says is None:
        return False
    return says.kind is Kind.DRAIN or (says.kind is Kind.EVALUATE and bool(says.flags & Flag.OPENING))
