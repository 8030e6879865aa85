"""What a worker does between two micro-batches, and while it waits.

Question  What is polled between two micro-batches, and while a sum is under way?
Holds     A poll costs next to nothing. While a worker waits, for whatever it is, it notices that its era or the run is
          over, serves newcomers, and writes checkpoints that are due. If an era is found broken while a round is being
          settled, the round is finished first, and the worker stops with the next poll.
Source    docs/protocol.md ("Unplanned change", "Handing the state on").
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from pliant.tensors.process_group.channel import Summation
from pliant.worker.checkpoint_schedule import CheckpointSchedule
from pliant.worker.collectives import Collectives
from pliant.worker.elastic.rendezvous import EraBroken
from pliant.worker.progress import LoopPoint
from pliant.worker.worker_state import WorkerState

LOOK_S = 0.002
"""How long a worker waits for a sum at a time before it checks whether its era is over."""


class Poller:
    """One worker's polling."""

    def __init__(
        self,
        member: WorkerState,
        channels: Collectives,
        checkpoints: CheckpointSchedule,
        check: Callable[[], None] | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._member = member
        self._channels = channels
        self._checkpoints = checkpoints
        self._check = check
        self._clock = clock
        self._sleep = sleep
        self._broken: EraBroken | None = None
        self.in_hook = False
        """functions of ``on_update`` run or are due: the user's state is neither that before nor that after them"""
        self.swapped: Callable[[], bool] | None = None
        """meanwhile: whether the script has put other weights into the model for a while"""
        self.follows_updates = False
        """whether the script has registered a function with ``on_update``"""
        self.ending = False
        """the script has ended"""

    @property
    def broken(self) -> EraBroken | None:
        """The era was found broken while a round was being settled: this worker stops as soon as that is done."""
        return self._broken

    @contextmanager
    def deferring(self) -> Generator[None]:
        """Catch an ``EraBroken`` and keep it for the next ``check_era``. The first one counts."""
        try:
            yield
        except EraBroken as broken:
            self._broken = self._broken or broken

    def check_era(self) -> None:
        """Raise the ``EraBroken`` that was kept while a round was being settled."""
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken

    def look(self) -> None:
        """Check whether the era is over or this worker is asked to leave, and release groups that have ended."""
        self.check_era()
        if self._check is not None:
            self._check()
        self._member.enrolment.look(self._member.group.era)
        self._channels.tidy()

    def rest(self) -> None:
        """Serve newcomers and save: the script's code for the last update has run, so that the state is consistent."""
        member = self._member
        if not self.in_hook:
            exchange = None if member.follows else member.group.exchange
            member.users_state.keep_for_latecomers(exchange, may_ask=self._somebody_lacks_state())
        if member.donor.wanted:
            if member.follows:
                member.donor.refuse(member.group)
            else:
                swapped = self.swapped is not None and self.swapped()
                member.donor.serve(member.group, swapped=swapped)
        if not self.in_hook:
            self._checkpoints.save()

    def _somebody_lacks_state(self) -> bool:
        """Whether a member may ask for the user's state of now after this worker has made the next update."""
        member = self._member
        if member.fresh or not self.follows_updates or not member.group.open:
            return bool(member.fresh)
        # Members without samples call the functions of ``on_update``, but do not run the code in the loop.
        phase = member.group.phase
        return not all(phase.took_part[index] for index in member.holders)

    def progress(self, at: LoopPoint = LoopPoint.ELSEWHERE) -> None:
        """Note the position of the main loop."""
        member, holds_all = self._member, self._member.reception.holds_all
        member.enrolment.progress(
            member.group, member.standing, self._clock(), at, holds_all=holds_all, ending=self.ending
        )

    @contextmanager
    def busy(self, what: str, seconds: float | None) -> Generator[None]:
        """While the script does something else (saving, uploading): the others need not wait for it."""
        enrolment = self._member.enrolment
        start_s = self._clock()
        enrolment.loop.begin(what, seconds)
        self.progress()
        enrolment.tell_position()
        try:
            yield
        finally:
            enrolment.loop.end(self._clock() - start_s)
            self.progress()
            enrolment.tell_position()

    def wait(self, summation: Summation, meanwhile: Callable[[], None] | None = None) -> float:
        """Wait until the exchange is over; returns the seconds it took. Raises if the era or the run ends meanwhile."""
        start = self._clock()
        if not summation.over:
            self.progress(LoopPoint.WAITING)
            while not summation.wait(LOOK_S):
                self.look()
                # The script's code for the last update has run: a newcomer may be waiting for this state.
                self.rest()
                if meanwhile is not None:
                    meanwhile()
            self.progress()
        return self._clock() - start

    def wait_briefly(self, summation: Summation, at_most_s: float) -> float:
        """Wait for a limited time, without ``rest``: the update of the sum has not been made."""
        start = self._clock()
        while not summation.wait(LOOK_S) and self._clock() - start < at_most_s:
            self.look()
        return self._clock() - start

    def wait_at_rest(self, arrived: Callable[[], bool]) -> None:
        """Wait until ``arrived``: for something other than an exchange."""
        while not arrived():
            self.look()
            # Another newcomer may ask here, and must be told to ask another member.
            self.rest()
            self._sleep(LOOK_S)

    def wait_blindly(self, over: Callable[[], bool], at_most_s: float) -> None:
        """Wait until ``over``, for a limited time, without polling: this worker's last era has ended."""
        deadline_s = self._clock() + at_most_s
        while not over() and self._clock() < deadline_s:
            self._sleep(LOOK_S)
