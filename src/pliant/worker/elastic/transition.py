"""How a worker gets from one era into the next.

Question  With which state does this worker enter an era, and what of its work is lost?
Holds     Nothing of an era is settled after this worker has reported that it has stopped. All members enter an
          unplanned era with the donor's replicated state. A worker that has settled the same exchange keeps what it has
          accumulated; any other worker drops what it has computed and follows. A planned era changes only the group.
Source    docs/design/0007-elastic.md; docs/protocol.md ("Planned change", "Unplanned change").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pliant.control.messages import Call
from pliant.core import regrouping
from pliant.core.group_state import FinishedPhase, GroupState, Standing, founded
from pliant.core.regrouping import Entry
from pliant.core.tickets import Flag, Kind
from pliant.errors import Left, RunEnded
from pliant.worker import snapshot
from pliant.worker.checkpoint_schedule import CheckpointSchedule
from pliant.worker.collectives import Answer, Collectives, reached
from pliant.worker.elastic.enrolment import Enrolment
from pliant.worker.elastic.rendezvous import EraBroken, Evicted, FormedGroup
from pliant.worker.poll import LOOK_S, Poller
from pliant.worker.progress import LoopPoint
from pliant.worker.script.calls import ScriptCall
from pliant.worker.snapshot import GroupSnapshot
from pliant.worker.worker_state import WorkerState

# How long a leaving worker waits for members that have yet to learn that its last exchange was settled.
_FAREWELL_S = 1.0
_PAST_IT = "the run has gone back to a checkpoint, and this script is past it"


class EraTransition:
    """One worker's entry into eras, and its exit from them."""

    def __init__(
        self,
        member: WorkerState,
        enrolment: Enrolment,
        channels: Collectives,
        lookout: Poller,
        checkpoints: CheckpointSchedule,
    ) -> None:
        self._member = member
        self._enrolment = enrolment
        self._channels = channels
        self._lookout = lookout
        self._checkpoints = checkpoints
        self._beyond = False
        """taken off the roster after its first rounds: this script cannot begin anew"""

    # -- becoming a member

    def found(self) -> None:
        """Enter the first era together with all others; a later one if that has begun without this worker."""
        if not self._enrolment.is_running:
            self._enrolment.enlist(None)
            self._enter_next()

    def become_member(self, call: ScriptCall) -> FinishedPhase | None:
        """Ask for a place with the first call that the group has not left; return the result of earlier ones."""
        if self._enrolment.enlisted:
            return None
        past = self._enrolment.past_call(self._member.script.calls)
        if past is None:
            self._enlist(call)
        return past

    def _enlist(self, call: ScriptCall) -> None:
        self._enrolment.enlist(Call(self._member.script.calls, call.kind.name.lower(), call.samples.length))
        self._enter_next()

    # -- a planned era

    def switch(self, plan: tuple[int, int], *, closed: bool = False) -> None:
        """A planned era begins: go on in its group, or leave if this worker is not in it.

        ``closed``: followers know already that the last exchange was settled.
        """
        member = self._member
        seat = self._enrolment.place.taken_up(plan)
        self._channels.retire(None if closed else member.packed(member.ticket(Kind.TRAIN, Flag.NONE)))
        if seat is None:
            self._depart()
            return
        before = member.group
        member.advance(regrouping.switched(before, seat.era, seat.roster))
        self._channels.enter(seat.channel)
        newcomers = any(worker not in before.roster for worker in seat.roster)
        # Encoded here: the count of the journal's records must not include this era's.
        handed = snapshot.encoded(member.handed, known=0) if newcomers else b""
        self._entered(seat, None)
        member.users_state.go_on(member.group, seat, knows_best=False)
        if newcomers:
            reached(lambda: seat.channel.tell(handed, seat.donor))

    def _depart(self) -> None:
        """Leave: this worker was asked to, and is not on the new roster."""
        self._lookout.wait_blindly(lambda: self._channels.ended, _FAREWELL_S)
        # A worker that has said goodbye is not missed: if it dies now, no operation of the others may depend on it.
        self._channels.close()
        self._enrolment.finish(left=True)
        raise Left

    # -- an unplanned era

    def go_on(self, trouble: EraBroken | Evicted) -> None:
        """Get into an era again. A worker that stops with the others may find that it was taken off the roster."""
        while True:
            try:
                if isinstance(trouble, EraBroken):
                    self._regroup(str(trouble))
                else:
                    self._come_back()
                return
            except (EraBroken, Evicted) as another:
                trouble = another

    def _regroup(self, reason: str) -> None:
        """The era is over: drop what was in flight, report the last settled exchange, enter the next era."""
        self._lose_flights()
        self._channels.leave()
        self._stop(self._member.group.era, reason)
        self._enter_next()

    def _stop(self, era: int, reason: str) -> None:
        told = self._enrolment.link.mailbox.broken_era >= era
        self._enrolment.place.stop(
            era,
            self._member.group.exchange,
            active=not self._member.follows,
            # A worker that still lacks the user's own state is a worse donor than one that has it.
            whole=self._member.reception.holds_all,
            failed="" if told else reason,
        )

    def _lose_flights(self) -> None:
        training, work = self._member.training, self._member.work
        for flight in work.flights:
            training.gradients.lose(flight.filled)
        if not work.contribution.micro_batches:
            training.cancel_look_ahead()

    def _come_back(self) -> None:
        """This worker was taken off the roster: return as a newcomer, with the script where it is."""
        enrolment, member = self._enrolment, self._member
        self._lose_flights()
        self._channels.leave()
        script = member.script
        self._beyond = self._beyond or script.calls > 0 or script.depth > 1 or member.group.round > 0
        rewinds = enrolment.rewinds
        enrolment.come_back()
        member.users_state.drop()
        enrolment.leave_again()
        if self._beyond and enrolment.rewinds != rewinds:
            raise RunEnded(_PAST_IT)
        member.me = enrolment.place.me
        member.witness.moved(enrolment.link)
        member.work.forget(0)
        newcomer = founded(member.group.policy, 0, (member.me,))
        # The script has set its limits already; a run that begins anew takes them from here.
        limits = regrouping.limits(member.group)
        member.enter(replace(newcomer, standings=(Standing.FOLLOWING,), **limits), undrained=False)
        self._forget_gradients()
        if script.stack:
            self._enlist(script.stack[0])

    def _forget_gradients(self) -> None:
        training = self._member.training
        training.back()
        training.cancel_look_ahead()
        training.gradients.discard()

    # -- entering

    def _enter_next(self) -> None:
        """Wait for an era whose roster has this worker, and enter it."""
        place, era = self._enrolment.place, self._member.group.era
        while True:
            self._lookout.progress(LoopPoint.WAITING)
            seat = place.next_seat(era, self._member.reception.expect)
            try:
                self._enter(seat)
                return
            except EraBroken as broken:
                seat.channel.leave()
                era = seat.era
                # If the plan was dropped, this worker waits for another one without a report.
                if not place.is_void(era):
                    self._stop(era, str(broken))

    def _enter(self, seat: FormedGroup) -> None:
        """Agree with the other members on the state that a new era begins with."""

        def look() -> None:
            self._enrolment.place.look_entering(seat.era)

        if seat.exchange == 0:
            self._begin(seat, look)
            return
        donor = seat.roster[seat.donor] == self._member.me
        if donor and seat.checkpoints:
            self._rewind(seat)
        handed = self._handed_round(seat, look, donor=donor)
        was_there = self._is_at(handed.group)
        holds = donor or (was_there and not self._member.follows)
        group, entries = handed.group, None
        if seat.exchange >= 0:
            entries = self._entries(seat, look, active=holds)
            group = regrouping.regrouped(group, seat.era, seat.roster, entries)
        keep = was_there and not holds
        self._member.users_state.trust_own(handed.group, was_active=self._member.standing is Standing.ACTIVE)
        self._channels.enter(seat.channel)
        if holds:
            self._member.work.lose_flights(len(group.open))
        else:
            self._begin_anew(handed, len(group.open), keep=keep)
        # A holder of the state has settled the donor's last exchange, and has the same value.
        self._member.enter(group, undrained=handed.undrained)
        self._entered(seat, entries)
        if self._member.follows:
            self._member.reception.take_over(group, seat, keep=keep)
        else:
            self._member.users_state.go_on(group, seat, knows_best=donor)

    def _begin(self, seat: FormedGroup, look: Callable[[], None]) -> None:
        """Begin the run: nothing was settled yet, and all take over the leader's state."""
        if self._beyond:
            raise RunEnded("the run begins anew, and this script is past its beginning")
        member = self._member
        member.work.drawn_since_update = False
        _heard(lambda: member.share(seat.channel, look))
        self._channels.enter(seat.channel)
        limits = regrouping.limits(member.group)
        member.enter(replace(founded(member.group.policy, seat.era, seat.roster), **limits), undrained=False)
        member.witness.joined(seat.records)
        self._entered(seat, None)

    def _rewind(self, seat: FormedGroup) -> None:
        """Read a checkpoint, as the coordinator has asked: no worker holds the state."""
        if self._beyond:
            raise RunEnded(_PAST_IT)
        member = self._member
        manifest = self._checkpoints.restore(seat.checkpoints, seat.round)
        member.witness.joined(seat.records)
        member.witness.rewound(manifest.name, manifest.records, member.me, member.group.round)

    def _handed_round(self, seat: FormedGroup, look: Callable[[], None], *, donor: bool) -> GroupSnapshot:
        """The donor's replicated state, with which all members enter the era."""
        known = self._known(seat, look) if seat.exchange >= 0 else 0
        if not donor:
            own = self._member.group.past
            handed = snapshot.decoded(_heard(lambda: seat.channel.told(seat.donor, look)), own)
            if self._member.script.is_beyond(handed.group):
                # After a lost coordinator, or because the run went back behind calls that were over.
                raise RunEnded(_PAST_IT)
            return handed
        handed = self._member.handed
        reached(lambda: seat.channel.tell(snapshot.encoded(handed, known), seat.donor))
        return handed

    def _known(self, seat: FormedGroup, look: Callable[[], None]) -> int:
        """How many of the script's calls all members know: those are not sent."""
        mine = snapshot.packed_count(self._member.group.past)
        return min(snapshot.unpacked_count(data) for data in self._gathered(seat, look, mine))

    def _is_at(self, group: GroupState) -> bool:
        """Whether this worker has settled all exchanges that ``group`` has."""
        mine = self._member.group
        return mine.exchange == group.exchange and mine.era == group.era

    def _entries(self, seat: FormedGroup, look: Callable[[], None], *, active: bool) -> list[Entry]:
        """The entries of all members."""
        mine = snapshot.packed_entry(self._member.work.entry(active=active))
        return [snapshot.unpacked_entry(data) for data in self._gathered(seat, look, mine)]

    def _gathered(self, seat: FormedGroup, look: Callable[[], None], mine: bytes) -> list[bytes]:
        summation = reached(lambda: seat.channel.gather(mine))
        while not summation.wait(LOOK_S):
            look()
        return _heard(summation.tickets)

    def _begin_anew(self, handed: GroupSnapshot, depth: int, *, keep: bool) -> None:
        """Drop what this worker has computed: it does not hold the state that the era begins with.

        ``keep``: it has missed no exchange. It keeps its journal lines, which may be the last copies.
        """
        member = self._member
        self._checkpoints.forget()
        member.script.begins_anew()
        member.work.forget(depth)
        self._forget_gradients()
        member.training.buffers.begin_anew(handed.live)
        if not keep:
            member.witness.joined(handed.records)
        if not member.script.is_at(member.group):
            member.work.drawn_since_update = False

    def _entered(self, seat: FormedGroup, entries: Sequence[Entry] | None) -> None:
        member = self._member
        member.witness.era(member.group, entries, sends=seat.roster[seat.donor] == member.me)
        member.reception.entered(seat)
        self._lookout.progress()
        self._enrolment.link.entered(seat.era, member.group.exchange)


def _heard(ask: Callable[[], Answer]) -> Answer:
    return reached(ask, "the entry into the era")
