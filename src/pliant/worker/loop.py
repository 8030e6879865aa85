"""The worker's loop: open, draw, contribute, hand in, settle.

Question  In which order does one worker do what the group has decided?
Holds     A worker waits for the group only when it has nothing that it may compute. All micro-batches of a contribution
          are computed at the same weights. After ``step`` has returned True the model holds the plain weights until the
          next draw. When an era is over the worker settles nothing more of it; what it has accumulated goes into the
          next era.
Source    ABS-SGD (Zhou et al. 2023); docs/protocol.md has the states and events, docs/design/0007-elastic.md the eras.

One exchange after another, for worker i with an overlap (delay 1):

    draw … draw   hand in C1   draw … draw   settle 1, hand in C2, apply 1   draw … draw   settle 2, hand in C3, …
                  └─────── C1 is summed ───────┘         └───────── C2 is summed ────────────┘

The way of a sample, and the part that does each step:

    open            all enter the phase, its first positions are dealt      settle.Settlement.open
    draw            the next micro-batch that may be drawn                  draw.DrawLimits.next
    contribute      its gradients are added to the buffer                   in_flight.Contributions.contribution
    step            hand in, if due; settle, if the sum is there; apply     submit.Submission, settle.Settlement

A worker without a vote follows the exchanges of the others (follow). A worker whose era ends enters the next one
(elastic.transition). While it waits for anything, it polls (poll).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from pliant.core import allowance
from pliant.core.group_state import FinishedPhase, GroupState, Standing
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Sums
from pliant.errors import Left, UsageError
from pliant.tensors.process_group.channel import Channel
from pliant.types import WorkerId
from pliant.worker.checkpoint_schedule import CheckpointSchedule
from pliant.worker.checkpoint_writer import CheckpointWriter
from pliant.worker.collectives import Answer, Collectives
from pliant.worker.draw import DrawLimits
from pliant.worker.elastic.donor import NO_LINES, StateLines
from pliant.worker.elastic.enrolment import Enrolment, Solo
from pliant.worker.elastic.rendezvous import EraBroken, Evicted
from pliant.worker.elastic.transition import EraTransition
from pliant.worker.follow import Follower
from pliant.worker.journal import Journal
from pliant.worker.poll import Poller
from pliant.worker.progress import LoopPoint
from pliant.worker.script.calls import ScriptCall
from pliant.worker.script.hooks import Hooks
from pliant.worker.settle import Settlement
from pliant.worker.submit import BucketReady, Submission
from pliant.worker.training import Training
from pliant.worker.worker_state import WorkerState

# How long to wait for the first sum after a lost worker, even with an overlap: usually it arrives within this time, and
# the update is made a whole contribution earlier.
_SOON_S = 0.03


class Worker:
    """One member of the group."""

    def __init__(
        self,
        me: WorkerId,
        group: GroupState,
        channel: Channel,
        training: Training,
        witness: Journal,
        enrolment: Enrolment | Solo,
        *,
        lines: StateLines = NO_LINES,
        check: Callable[[], None] | None = None,
        saving: CheckpointWriter | None = None,
        carried: Mapping[str, Any] | None = None,
        pace: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.training = training
        self._enrolment = enrolment
        self._clock = clock
        self._sleep = sleep
        self._slowdown = 1.0 / pace - 1.0
        carried = carried or {"state": {}}
        member = self._member = WorkerState(me, group, training, witness, enrolment, lines, carried, clock)
        self._channels = Collectives(channel)
        self._checkpoints = CheckpointSchedule(member, saving, carried)
        self._lookout = Poller(member, self._channels, self._checkpoints, check, clock, sleep)
        self._bounds = DrawLimits(member, clock)
        self._crossing = (
            enrolment
            if isinstance(enrolment, Solo)
            else EraTransition(member, enrolment, self._channels, self._lookout, self._checkpoints)
        )
        self._handing = Submission(member, self._channels, self._lookout, clock)
        self.hooks = Hooks(member, self._lookout)
        self._exchanges = Settlement(
            member, self._channels, self._lookout, self._bounds, self._handing, self._crossing, self.hooks, clock
        )
        self._following = Follower(
            member, self._channels, self._lookout, self._handing, self._exchanges, self.hooks, sleep
        )

    # -- facts

    @property
    def me(self) -> WorkerId:
        """Its name. A worker that was taken off the roster comes back under another one."""
        return self._member.me

    @property
    def group(self) -> GroupState:
        """The replicated state."""
        return self._member.group

    @property
    def standing(self) -> Standing:
        return self._member.standing

    @property
    def last_trained(self) -> Settled | None:
        """The last settled round of a training phase."""
        return self._exchanges.last_trained

    @property
    def applied_rate(self) -> float:
        """The learning rate of the last update."""
        return self._exchanges.applied_rate

    @property
    def inside(self) -> Kind | None:
        """The kind of the innermost call that the script is in."""
        call = self._member.script.innermost
        return call.kind if call is not None else None

    @property
    def leads(self) -> bool:
        """Whether it prints and writes for the group now. False while its script is behind those of the others."""
        group = self.group
        return group.era > 0 and group.roster[0] == self.me and not self._member.script.is_behind(group)

    def limit(self, samples: int | None, updates: int | None) -> None:
        """End training phases where this many samples or updates in all are reached; the same call on every worker."""
        self._member.advance(replace(self.group, samples_limit=samples, updates_limit=updates))

    @property
    def clip_norm(self) -> float | None:
        """The bound on the gradient's norm: the last one the script has set, or else the one in force."""
        wanted = self._member.clip_norm
        return self.training.clip_norm if wanted is None else wanted or None

    def set_clip_norm(self, bound: float | None) -> None:
        """Ask for another bound. It is in force once all scripts that ask for one ask for the same."""
        self._member.clip_norm = bound or 0.0

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """The micro-batches dealt to this worker that it has not drawn yet."""
        return self._bounds.upcoming()

    # -- open

    def open(self, call: ScriptCall) -> int | FinishedPhase:
        """Enter the next phase together with all others: its number; or how it ended, if the group is past it."""
        self.hooks.refuse("evaluate" if call.kind is Kind.EVALUATE else "batches")
        script, work = self._member.script, self._member.work
        if script.stack and work.flight is not None and work.drawn_since_update:
            raise UsageError(
                "evaluate was called in the middle of a round: inside batches call it only "
                "right after run.step() has returned True"
            )
        script.enters(call, self.group)
        try:
            answer = self._through(lambda: self._opened(call))
        except BaseException:
            script.gives_up()
            raise
        if isinstance(answer, FinishedPhase):
            self.left()
        return answer

    def _opened(self, call: ScriptCall) -> int | FinishedPhase:
        past = self._crossing.become_member(call)
        if past is not None:
            return past
        script = self._member.script
        self._exchanges.finish_draining()
        # Still due if an era has ended in between. The state that is taken over below is the one after that code.
        self._exchanges.follow_update()
        while True:
            past = script.past(self.group)
            if past is not None:
                self._following.make_sure(ended=True)
                self._stay_without_state()
                return past
            phase = script.phase(self.group)
            if phase is not None:
                self._following.make_sure()
                return phase
            self._look_around()
            if len(self.group.open) >= script.depth or self._comes_back_into_body():
                # The group is in a call that this script does not make, or the group may not make this script's call.
                self._following.follow()
                continue
            inner = Flag.INNER if script.is_in_ended_loop else Flag.NONE
            self._exchanges.open(call, inner | self._following.readiness())

    def _comes_back_into_body(self) -> bool:
        """Whether this worker was away and its script is in the body of a loop that others compute now.

        Those others decide whether a call is made in that body.
        """
        group, member = self.group, self._member
        return bool(group.open) and member.follows and any(allowance.speaks(group, m) for m in range(len(group.roster)))

    # -- draw

    def draw(self, phase: int) -> MicroBatch | None:
        """The next micro-batch of ``phase``, or None when it has ended; waits only when nothing may be computed."""
        return self._through(lambda: self._drawn_next(phase))

    def _drawn_next(self, phase: int) -> MicroBatch | None:
        work = self._member.work
        while self._still_in(phase):
            self._look_around()
            if not self._member.is_in(phase):
                # It has ended while a function of ``on_update`` was running.
                continue
            if not self._speaks(phase):
                self._following.follow()
                continue
            if work.flight is None and self._bounds.complete():
                self._hand_in()
            if self._settled_soon():
                continue
            micro_batch = self._bounds.next()
            if micro_batch is not None:
                self._drawn(micro_batch)
                return micro_batch
            if work.flight is None:
                self._hand_in()
            self._exchanges.settle()
        return None

    def _look_around(self) -> None:
        """What is done between two exchanges: polling, and the functions of the script that are due."""
        self._lookout.look()
        # Still due if an era has ended in between.
        self._exchanges.follow_update()
        self._lookout.rest()
        self.hooks.look()

    def _drawn(self, micro_batch: MicroBatch) -> None:
        """The script's loop body runs next. With a contribution in flight it computes at the look-ahead point."""
        work = self._member.work
        self._following.take_users_state()
        self.training.settle_set()
        if self.group.phase.kind is Kind.TRAIN:
            work.drawn_since_update = True
            self._member.script.draws()
            start = self._clock()
            self.training.look_ahead(self.group.rate.factor)
            work.cost_s += self._clock() - start
            self._checkpoints.save(drawn=True)
        cpu_s, ahead = time.thread_time(), self.training.ahead
        work.contribution.draw(samples_of(micro_batch), cpu_s, self.group.round, ahead=ahead)
        self._lookout.progress(LoopPoint.DRAWING)

    def _speaks(self, phase: int) -> bool:
        return self.group.phase.number == phase and self._member.speaks

    def _still_in(self, phase: int) -> bool:
        """Whether ``phase`` goes on. If it has ended, the buffers are made equal on all workers."""
        self._enter_again(phase)
        if self._member.is_in(phase):
            return True
        self._come_to_the_end(phase)
        return False

    def _enter_again(self, phase: int) -> None:
        """Enter the script's first call once more if the run has begun anew meanwhile."""
        call = self._member.script.innermost
        if phase > self.group.phases and call is not None:
            self._opened(call)

    def _come_to_the_end(self, phase: int) -> None:
        """The phase is over: before the script's code after it runs, hold the state that this code needs."""
        self._exchanges.finish_draining()
        self._exchanges.follow_update()
        self._following.make_sure(ended=True)
        self._stay_without_state()
        script, users_state = self._member.script, self._member.users_state
        if users_state.is_expected_at_end(phase, around=script.depth > 1):
            users_state.keep_at_end(script.position)
            self._lookout.rest()
        self._lookout.progress()

    def _stay_without_state(self) -> None:
        """Wait here without the state: the code after the last call must not run on wrong weights.

        A call that has ended may be the last one as long as the group is in no later call.
        """
        member = self._member
        # In the body of a loop a call that is over is followed by the rest of that body.
        while member.script.depth == 1 and member.follows and not self.group.over:
            if member.script.is_passed(self.group):
                return
            self._lookout.look()
            self._following.follow()
        if self.group.over and member.follows:
            self._depart()

    def _depart(self) -> None:
        """Leave: the run is over, and this worker does not hold the final state."""
        self._member.witness.confirmed()
        self._enrolment.send_lines_again()
        # A worker that has said goodbye is not missed: if it dies now, no operation of the others may depend on it.
        self._channels.close()
        self._enrolment.finish(left=True, over=True)
        raise Left

    def leave_if_late(self) -> None:
        """Leave at the end of the script's epochs if this worker came after all of them."""
        if not self._enrolment.enlisted and self._member.follows:
            self._depart()

    def _settled_soon(self) -> bool:
        """Settle the first round after a lost worker before the next micro-batch, if its sum arrives quickly."""
        work = self._member.work
        flight = work.flight
        if flight is None or not self.group.phase.resumed or work.contribution.micro_batches:
            return False
        work.contribution.idle_s += self._lookout.wait_briefly(flight.summation, _SOON_S)
        if flight.summation.over:
            self._exchanges.settle()
        return bool(flight.summation.over)

    # -- contribute

    def contribute(
        self, weight: float, loss_sum: Tensor | float, compute: Callable[[BucketReady | None], None], *, whole: bool
    ) -> None:
        """Compute the gradients of a drawn micro-batch; ``whole``: there is no second backward pass for it.

        ``compute`` adds them to the buffer. If a synchronous round waits for nothing else, the group sums each bucket
        of them as soon as ``compute`` reports that it is complete.
        """
        gradients = self.training.gradients
        if whole and gradients.orderly and self._hands_in_early():
            self._member.work.contribution.add(weight, loss_sum)
            self._handing.hand_in_while(compute)
            return
        # The first time its reports are only checked.
        tells = whole and gradients.orderly is None and self._hands_in_early()
        try:
            compute((lambda _: None) if tells else None)
        except Exception:
            # The script may catch it (out of memory) and go on; half a gradient must not count.
            self._leave_out()
            raise
        self.contributed(weight, loss_sum)

    def _leave_out(self) -> None:
        """A backward pass has failed: nothing that this worker has computed for the coming update counts."""
        self.training.gradients.discard()
        self._member.work.contribution.leave_out()

    @property
    def may_repeat(self) -> bool:
        """Whether the last drawn micro-batch is still in the contribution that is being accumulated."""
        return self._member.work.contribution.micro_batches > 0

    def _hands_in_early(self) -> bool:
        """Whether a synchronous round waits for nothing but the micro-batch that was just drawn."""
        # An emulated slow device sleeps after the backward pass: its gradients would be ready too soon.
        if self._slowdown > 0 or self._lookout.broken is not None or self.training.ahead:
            return False
        if not self._handing.in_parts(self.group.trained) or self._handing.changes_set:
            return False
        return self._speaks(self.group.phase.number) and self._bounds.last()

    def contributed(
        self, weight: float, loss_sum: Tensor | float, sums: Sums = (), output: bytes | None = None
    ) -> None:
        """A drawn micro-batch is computed; its gradients are in the buffer.

        ``sums``, ``output``: further means of an ``evaluate``, and the outputs that it gathers.
        """
        mine = self._member.work.contribution
        mine.add(weight, loss_sum)
        if sums or output is not None:
            mine.append(sums, output)
        if self._slowdown > 0:
            self._sleep(self._slowdown * (time.thread_time() - mine.cpu_start_s))

    # -- hand in, settle, apply

    def step(self) -> bool:
        """Settle the round in flight if it is due; True when all workers are at the same update now."""
        return self._through(self._stepped, or_else=False)

    def _stepped(self) -> bool:
        self._look_around()
        work = self._member.work
        if not self.group.open or not self._speaks(self.group.phase.number):
            return False
        handed_in = work.flight is not None and not self.group.overlap
        if not handed_in and not self._bounds.complete():
            return False
        if work.flight is None:
            if self.group.overlap:
                return False
            self._hand_in()
        assert work.flight is not None
        if self._bounds.next() is not None and not work.flight.summation.over:
            return False
        outcome = self._exchanges.settle(in_body=True)
        # The script's own code runs next; the coordinator must know the position meanwhile.
        self._lookout.progress()
        if outcome.kind is Kind.TRAIN:
            # An exchange of an ``evaluate`` in the loop's body is no update of the loop.
            work.drawn_since_update = not outcome.seen
        if outcome.ended:
            self._member.script.ended_in_body()
        # This worker may have been taken off the roster during an ``evaluate`` in a function of ``on_update``.
        return outcome.seen and not self._member.follows

    def _hand_in(self, flags: Flag = Flag.NONE) -> None:
        """Return to the plain weights and start the summation. Nothing else is in flight."""
        self.training.back()
        self._handing.hand_in(flags)

    # -- leave a phase, the run

    def abandon(self, phase: int) -> None:
        """The user's loop was left early: hand in what is accumulated and end the phase on all workers."""
        self._member.work.contribution.undraw()
        self._through(lambda: self._abandoned(phase))
        self.left()

    def _abandoned(self, phase: int) -> None:
        member = self._member
        self._enter_again(phase)
        self._exchanges.follow_update()
        while member.is_in(phase) and not self._speaks(phase):
            self._lookout.look()
            self._following.follow()
        if member.is_in(phase) and member.work.flight is not None:
            self._exchanges.settle(Flag.BREAK)
        if member.is_in(phase) and member.follows:
            # Its weights differ: it has no vote until it holds those of the others.
            self._abandoned(phase)
            return
        if member.is_in(phase) and member.work.flight is None:
            self._hand_in(Flag.BREAK)
        if member.is_in(phase):
            self._exchanges.settle()
        self._come_to_the_end(phase)

    def left(self) -> FinishedPhase | None:
        """The script is out of its innermost call: how that ended."""
        past = self._member.script.past(self.group)
        self._member.script.leaves()
        return past

    def note_progress(self) -> None:
        """Report that this worker computes; no exchange shows it."""
        self._lookout.progress(LoopPoint.COMPUTING)

    def busy(self, what: str, seconds: float | None) -> AbstractContextManager[None]:
        """While the script does something else (saving, uploading): the others need not wait for it."""
        return self._lookout.busy(what, seconds)

    def gathered(self, phase: int, *, everywhere: bool) -> list[tuple[MicroBatch, bytes]] | None:
        """The outputs that this worker holds of an ``evaluate`` that has just ended.

        None on workers that are not to return them: on all but the first one that holds the state, unless they are
        wanted ``everywhere``; and on a worker without the state, which could not compute missing ones.
        """
        member = self._member
        found = member.work.outputs.taken(phase)
        if member.follows or not (everywhere or member.index == member.holders[0]):
            return None
        return found

    def end(self) -> None:
        """Leave the run together with all others. Raises ``Left`` where this worker does not hold the final state."""
        self._through(self._ended)
        self._member.witness.confirmed()
        self._enrolment.send_lines_again()
        if self._member.follows or not self._member.reception.holds_all:
            raise Left

    def _ended(self) -> None:
        if not self._enrolment.enlisted:
            return
        self._lookout.ending = True
        while not self.group.over:
            self._look_around()
            # Now: the others cannot be asked any more once they have reached their end.
            self._following.take_users_state()
            if self.group.open:
                self._following.follow()
                continue
            self._exchanges.finish_draining()
            self._exchanges.end()

    def leave(self, reason: str) -> None:
        """Leave the run as soon as the group has an era without this worker."""
        self._enrolment.leave(reason)

    def close(self) -> None:
        """Release the group and the optimizer, even with a contribution in flight."""
        self.training.close()
        self._channels.close()
        self._member.users_state.drop()
        self._member.donor.close()
        self._enrolment.close()

    # -- from one era into the next

    def found(self) -> None:
        """Enter the first era together with all others; a later one if that has begun without this worker."""
        self._through(self._crossing.found)

    def _through(self, action: Callable[[], Answer], or_else: Answer | None = None) -> Answer:
        """Repeat ``action`` after a change of era until it succeeds; with ``or_else``, return that instead."""
        while True:
            try:
                return action()
            except (EraBroken, Evicted) as trouble:
                self._go_on(trouble)
            if or_else is not None:
                return or_else

    def _go_on(self, trouble: EraBroken | Evicted) -> None:
        self._exchanges.go_if_expelled()
        self._crossing.go_on(trouble)

    # -- a run without a coordinator

    def restore(self, names: Sequence[str]) -> None:
        """Without a coordinator: go on from the first of these checkpoints that is whole."""
        self._checkpoints.restore(names, 0)

    def finished(self) -> None:
        """Without a coordinator: the script has ended, and the next run begins anew."""
        self._checkpoints.end()
