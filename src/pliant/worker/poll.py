"""What a worker sees to while nothing is computed.

Question  What is looked after between two micro-batches, and while a sum is waited for?
Holds     Looking costs next to nothing. Whatever a worker waits for, it hears that its era or the run is over, serves
          newcomers, and saves what is due. An era found broken while a round is being settled is remembered: the
          round is finished, and the worker stops with the next look.
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
"""How long a waiting worker polls before it looks whether its era is over."""


class Poller:
    """One worker's eyes and ears."""

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
        self.broken: EraBroken | None = None
        """found while a round was being settled: this worker stops as soon as that is done"""
        self.in_hook = False
        """the script does something with an update now, or is about to: its state is neither that before nor after"""
        self.swapped: Callable[[], bool] | None = None
        """in there: whether the model holds other weights for a while"""
        self.follows_updates = False
        """whether it does anything with them"""
        self.ending = False
        """the script has come to its end"""

    def check_era(self) -> None:
        """Raise what was remembered while a round was being settled."""
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken

    def look(self) -> None:
        """Between micro-batches: is the era over, am I asked to go, does a retired group end?"""
        self.check_era()
        if self._check is not None:
            self._check()
        eras = self._member.eras
        if eras is None:
            return
        eras.place.look(self._member.group.era)
        if not eras.leaving and eras.place.asked_to_leave:
            eras.leave("asked by the coordinator")
        self._channels.tidy()

    def rest(self) -> None:
        """The script's code for the last update has run: newcomers may copy the state, and so may a checkpoint."""
        member = self._member
        eras = member.eras
        if eras is not None and not self.in_hook:
            eras.keep_for_latecomers(member.group.exchange if self._somebody_lacks_state() else None)
        if eras is not None and eras.wanted:
            if member.follows:
                eras.refuse(member.group)
            else:
                swapped = self.swapped is not None and self.swapped()
                eras.serve(member.training, member.group, self._checkpoints.users_state, swapped=swapped)
        if not self.in_hook:
            self._checkpoints.save()

    def _somebody_lacks_state(self) -> bool:
        """Whether a member that computes, or will, may ask for the user's state when this worker is one further."""
        member = self._member
        if member.follows:
            return False
        if member.fresh or not self.follows_updates or not member.group.open:
            return bool(member.fresh)
        # Spares run what follows an update, but not the code in the loop.
        phase = member.group.phase
        return not all(phase.took_part[index] for index in member.holders)

    def progress(self, at: LoopPoint = LoopPoint.ELSEWHERE) -> None:
        """Note how far this worker is."""
        member = self._member
        if member.eras is not None:
            member.eras.progress(member.group, member.standing, self._clock(), at, ending=self.ending)

    @contextmanager
    def busy(self, what: str, seconds: float | None) -> Generator[None]:
        """The script does something of its own for a while: the others need not wait for it."""
        eras = self._member.eras
        if eras is None:
            yield
            return
        start_s = self._clock()
        eras.loop.begin(what, seconds)
        self.progress()
        eras.place.link.tell_position()
        try:
            yield
        finally:
            eras.loop.end(self._clock() - start_s)
            self.progress()
            eras.place.link.tell_position()

    def wait(self, summation: Summation, meanwhile: Callable[[], None] | None = None) -> float:
        """Wait until the exchange is over; the seconds it took. Raises when the era or the run has ended instead."""
        start = self._clock()
        if not summation.over:
            self.progress(LoopPoint.WAITING)
            while not summation.wait(LOOK_S):
                self.look()
                # The script's code for the last update has run: a newcomer may be waiting for just that.
                self.rest()
                if meanwhile is not None:
                    meanwhile()
            self.progress()
        return self._clock() - start

    def wait_briefly(self, summation: Summation, at_most_s: float) -> float:
        """The same for so long at most, without a rest: the update that it is for has not been made."""
        start = self._clock()
        while not summation.wait(LOOK_S) and self._clock() - start < at_most_s:
            self.look()
        return self._clock() - start

    def wait_at_rest(self, arrived: Callable[[], bool]) -> None:
        """Wait for something other than an exchange."""
        while not arrived():
            self.look()
            # Another newcomer may ask here, and is to ask elsewhere.
            self.rest()
            self._sleep(LOOK_S)

    def wait_blindly(self, over: Callable[[], bool], at_most_s: float) -> None:
        """Wait for so long at most without a look: this worker's last era is over."""
        deadline_s = self._clock() + at_most_s
        while not over() and self._clock() < deadline_s:
            self._sleep(LOOK_S)
