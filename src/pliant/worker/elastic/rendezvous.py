"""How the members of an era find each other: its plan or start, and its process group.

Question  How does a worker learn that its era is over or another one is planned, and how does it get that era's group?
Holds     Checking costs next to nothing and is done between micro-batches. The group of a planned era is formed in the
          background, once, and given up when another plan replaces it; so is the group of the members that remain after
          a loss. Nothing of a broken era is settled after this worker has reported ``stopped``. Waiting is polling, so
          that a simulated clock can drive it.
Source    docs/design/0007-elastic.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pliant.control.link import Position
from pliant.control.mailbox import Mailbox
from pliant.control.messages import Broken, Call, EraPlan, EraStart, Signature
from pliant.errors import PliantError
from pliant.tensors.process_group.channel import Channel
from pliant.tensors.process_group.reachability import Unconnected
from pliant.types import WorkerId

# A worker that waits for an era polls as often as one that waits for a sum.
_POLL_S = 0.001
# How long a group may take to form once all members are told; after that the coordinator asks them again.
_FORM_S = 30.0


class EraBroken(Exception):
    """The era is over: a worker was lost, or the members' connections failed."""


class _Unformed(Exception):
    """A group could not be formed; ``error`` says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Evicted(Exception):
    """This worker was taken off the roster; it may come back as a newcomer."""


class CoordinatorLink(Protocol):
    """The connection to the coordinator (``control.link.Link``, or a simulated one)."""

    mailbox: Mailbox
    position: Position
    sends_lines: bool
    local_address: str

    @property
    def worker(self) -> str: ...
    def ready(self, signature: Signature, address: str, call: Call | None) -> None: ...
    def leaving(self, reason: str) -> None: ...
    def tell_position(self) -> None: ...
    def saved(self, name: str, records: int, round_: int) -> None: ...
    def stopped(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None: ...
    def unformed(self, era: int, unreached: Sequence[str], *, connecting: bool = True) -> None: ...
    def entered(self, era: int, exchange: int) -> None: ...
    def plan(self, epochs: int | None, samples: int | None) -> None: ...
    def put(self, attempt: int, key: str, value: bytes) -> None: ...
    def get(self, attempt: int, key: str, timeout_s: float) -> bytes: ...
    def keep(self, lines: Iterable[bytes], first: int) -> None: ...
    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None: ...
    def unwritten(self) -> list[bytes]: ...
    def send_lines_again(self) -> None: ...
    def finish(self, *, left: bool, over: bool = False) -> None: ...
    def fail(self, reason: str, *, shown: bool, fatal: bool = False, own: bool = False) -> None: ...
    def close(self) -> None: ...


class PendingGroup(Protocol):
    """A group that is being formed (``tensors.process_group.gloo.FormingGroup``)."""

    over: bool

    @property
    def failed(self) -> bool: ...
    def result(self) -> Channel: ...
    def abandon(self) -> None: ...


class FormedGroup(msgspec.Struct, frozen=True):
    """The formed group of an era, and what this worker must know to enter it."""

    channel: Channel
    era: int
    roster: tuple[WorkerId, ...]
    donor: int
    """the index of the member whose state all go on with"""
    addresses: Mapping[str, str]
    exchange: int = 0
    """of an unplanned era: the last exchange that the donor has settled; -1: of a planned one, for a newcomer"""
    records: int = 0
    """journal records that exist although nothing was settled: of an era that was given up"""
    checkpoints: tuple[str, ...] = ()
    """no worker holds the state: the donor reads the first of these that is whole"""
    round: int = 0
    """with checkpoints: the last round number that was used"""


Form = Callable[[int, int, int], PendingGroup]
"""(attempt, index, number of members) -> the group, being formed"""


class Rendezvous:
    """Turns the coordinator's orders into groups for the worker's loop."""

    def __init__(
        self,
        link: CoordinatorLink,
        form: Form,
        signature: Signature,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.link = link
        self._mailbox = link.mailbox
        self._form = form
        self._signature = signature
        self._address = address
        self._clock = clock
        self._sleep = sleep
        self._planned: EraPlan | None = None
        self._forming: PendingGroup | None = None
        self._left_out = False
        self._lock = threading.Lock()
        self._early: tuple[EraPlan, PendingGroup] | None = None
        """a planned group that the link's thread has begun and the loop has not taken up yet"""
        self._left: tuple[Broken, PendingGroup] | None = None
        """the same for the members that remain of an era that is over"""
        self._said: tuple[int, bool, bool] | None = None
        """what this worker reported when it stopped last: exchange, active, whole"""
        self._mailbox.on_group = self._begin_early

    @property
    def me(self) -> WorkerId:
        return WorkerId(self.link.worker)

    @property
    def asked_to_leave(self) -> bool:
        """Whether the coordinator asks for it, or the planned era has no place for this worker."""
        return self._mailbox.leave is not None or self._left_out

    @property
    def left_out(self) -> bool:
        """Whether the planned era has no place for this worker."""
        return self._left_out

    # -- between micro-batches

    def look(self, era: int) -> None:
        """Raise if the run is over, this worker was taken off the roster, or its era is over."""
        mailbox = self._mailbox
        if mailbox.trouble is not None:
            mailbox.check()
        if mailbox.evicted is not None:
            raise Evicted(mailbox.evicted)
        if mailbox.broken_era >= era:
            raise EraBroken(mailbox.broken_reason)

    def look_entering(self, era: int) -> None:
        """The same while ``era`` is entered. A new coordinator may not know of it, and begin a later one."""
        self.look(era)
        if self._mailbox.start is not None and self._mailbox.start.era > era:
            raise EraBroken("another era has taken its place")
        if self.is_void(era):
            raise EraBroken("the planned era does not come about")

    def is_void(self, era: int) -> bool:
        """Whether ``era`` was planned and has been given up."""
        plan = self._mailbox.plan
        return self._mailbox.voided_era >= era or (plan is not None and plan.era > era and self.link.position.era == 0)

    def prepared(self, era: int) -> tuple[int, int]:
        """(term, era) of the planned era that this worker could switch to now; zeros if there is none.

        A plan whose group cannot be formed is reported and given up; the present era goes on.
        """
        plan = self._mailbox.plan
        if plan is not self._planned:
            if self._planned is not None:
                self._give_up_plan(for_=plan)
            self._planned = plan if plan is not None and plan.era > era else None
            if self._planned is not None:
                self._begin(self._planned)
        if self._planned is None:
            return 0, 0
        if self._left_out:
            return self._planned.term, self._planned.era
        if self._forming is not None and self._forming.failed:
            forming, self._forming = self._forming, None
            self._tell_unformed(self._planned, _error_of(forming))
        if self._forming is None:
            # Given up for good: the others cannot begin the era without this worker's ticket.
            return 0, 0
        return (self._planned.term, self._planned.era) if self._forming.over else (0, 0)

    def _tell_unformed(self, word: EraPlan | EraStart, error: Exception) -> None:
        """Report that the group of an era could not be formed, and which workers this one could not reach."""
        if not isinstance(error, RuntimeError | TimeoutError | OSError):
            raise error
        connecting = isinstance(error, Unconnected)
        if connecting or isinstance(word, EraPlan):
            places = error.places if isinstance(error, Unconnected) else ()
            unreached = [word.roster[place] for place in places]
            self.link.unformed(word.era, unreached, connecting=connecting)

    def _begin(self, plan: EraPlan) -> None:
        self._left_out = self.me not in plan.roster
        if self._left_out:
            return
        with self._lock:
            early, self._early = self._early, None
            if early is not None and early[0] == plan:
                self._forming = early[1]
                return
        if early is not None:
            early[1].abandon()
        self._forming = self._formed_for(plan)

    def _begin_early(self, word: EraPlan | Broken) -> None:
        """Begin to form a group while the main thread is in a long micro-batch. Called by the link's thread."""
        with self._lock:
            here = self.link.position.era
            if here == 0 or self.me not in word.roster:
                return
            if isinstance(word, Broken):
                left, self._left = self._left, (word, self._formed_for(word))
            else:
                left = None
                known = word == self._planned or self._early is not None
                if word.era > here and not known:
                    self._early = word, self._formed_for(word)
        if left is not None:
            left[1].abandon()

    def _formed_for(self, word: EraPlan | EraStart | Broken) -> PendingGroup:
        return self._form(word.attempt, word.roster.index(self.me), len(word.roster))

    def _give_up_plan(self, for_: EraPlan | None = None) -> None:
        """Give the plan up; ``for_``: the plan that replaces it, whose group may be forming already."""
        if self._forming is not None:
            self._forming.abandon()
        self._planned, self._forming, self._left_out = None, None, False
        with self._lock:
            if self._early is not None and self._early[0] == for_:
                return
            early, self._early = self._early, None
        if early is not None:
            early[1].abandon()

    def taken_up(self, number: tuple[int, int]) -> FormedGroup | None:
        """The group of the planned era that begins now; None if this worker is not in it."""
        plan, forming = self._planned, self._forming
        if plan is None or (plan.term, plan.era) != number:
            raise EraBroken(f"era {number[1]} was planned by a coordinator that is gone")
        self._planned, self._forming = None, None
        self._mailbox.fulfilled(plan)
        if forming is None:
            return None
        roster = tuple(WorkerId(name) for name in plan.roster)
        try:
            channel = forming.result()
        except (RuntimeError, TimeoutError, OSError) as error:
            raise EraBroken(f"the group of era {plan.era} could not be formed: {error}") from error
        return FormedGroup(channel, plan.era, roster, plan.roster.index(plan.donor), plan.addresses)

    # -- without an era

    def enlist(self, call: Call | None) -> None:
        """Ask to become a member."""
        self.link.ready(self._signature, self._address, call)

    def stop(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None:
        """Report that nothing more of the era will be settled here; ``whole``: with the user's own state."""
        self._give_up_plan()
        self._said = exchange, active, whole
        self.link.stopped(era, exchange, active=active, whole=whole, failed=failed)

    def _stop_again(self, era: int, failed: str = "") -> None:
        """Report the same again: another era is over before this worker has entered it."""
        at = self.link.position
        exchange, active, whole = self._said or (at.exchange, at.active, True)
        self.stop(era, exchange, active=active, whole=whole, failed=failed)

    def next_seat(self, era: int, expect: Callable[[EraPlan], None]) -> FormedGroup:
        """Wait for an era after ``era`` that has a place for this worker, and form its group.

        ``expect`` is called with a planned one before its group is formed.
        """
        while True:
            start = self._awaited(era)
            if self.me not in start.roster:
                era = start.era
                continue
            if isinstance(start, EraPlan):
                expect(start)
            forming = self._begun(start) or self._formed_for(start)
            try:
                channel = self._formed(forming, start.era)
            except _Unformed as unformed:
                era = start.era
                self._tell_unformed(start, unformed.error)
                # The coordinator replaces a plan whose group cannot be formed without being asked.
                if isinstance(start, EraStart):
                    self._stop_again(start.era, "the group could not be formed")
                continue
            except EraBroken:
                era = start.era
                if isinstance(start, EraStart):
                    self._stop_again(start.era, "the group could not be formed")
                continue
            roster = tuple(WorkerId(name) for name in start.roster)
            donor = start.roster.index(start.donor)
            if isinstance(start, EraPlan):
                return FormedGroup(channel, start.era, roster, donor, start.addresses, -1)
            seat = FormedGroup(channel, start.era, roster, donor, start.addresses, start.exchange, start.records)
            return replace(seat, checkpoints=tuple(start.checkpoints), round=start.round)

    def _begun(self, start: EraStart | EraPlan) -> PendingGroup | None:
        """The group of the remaining members, if it was begun for this very era."""
        with self._lock:
            left, self._left = self._left, None
        if left is None or left[0].attempt == start.attempt:
            return left[1] if left is not None else None
        left[1].abandon()
        return None

    def close(self) -> None:
        """Give up all groups that are being formed."""
        self._give_up_plan()
        with self._lock:
            left, self._left = self._left, None
        if left is not None:
            left[1].abandon()

    def _awaited(self, era: int) -> EraStart | EraPlan:
        while True:
            mailbox = self._mailbox
            mailbox.check()
            if mailbox.evicted is not None:
                raise Evicted(mailbox.evicted)
            start, plan = mailbox.start, mailbox.plan
            if start is not None and start.era > max(era, mailbox.broken_era):
                return start
            if start is not None and start.era > era:
                # That era is over already; the others still wait for this worker's report.
                era = mailbox.broken_era
                self._stop_again(era)
            # Only newcomers enter by a plan: a member whose era broke has given up its place in it.
            outside = self.link.position.era == 0
            if outside and plan is not None and plan.era > max(era, mailbox.broken_era) and self.me in plan.roster:
                return plan
            self._sleep(_POLL_S)

    def _formed(self, forming: PendingGroup, era: int) -> Channel:
        """Wait until the group is formed. Gives it up if its era is over before."""
        deadline_s = self._clock() + _FORM_S
        try:
            while not forming.over:
                self.look_entering(era)
                if self._clock() > deadline_s:
                    raise EraBroken("the group did not form in time")
                self._sleep(_POLL_S)
            return forming.result()
        except (RuntimeError, TimeoutError, OSError) as error:
            forming.abandon()
            raise _Unformed(error) from error
        except (EraBroken, Evicted, PliantError):
            forming.abandon()
            raise


def _error_of(forming: PendingGroup) -> Exception:
    """Why a group could not be formed."""
    try:
        forming.result()
    except Exception as error:
        return error
    raise AssertionError("the group has been formed")
