"""The worker's loop: open, draw, contribute, hand in, settle.

Question  In which order does one worker do what the group has decided?
Holds     It waits for the group only when it has nothing it may compute. All micro-batches of a contribution are
          computed at one point of the weights. After ``step`` has returned True the model holds the plain weights until
          the next draw. When its era is over it settles nothing more of it, and goes on in the next one with what it
          has accumulated.
Source    ABS-SGD (Zhou et al. 2023); docs/protocol.md has the states and events, docs/design/0007-elastic.md the eras.

One exchange after another, for worker i with an overlap (delay 1):

    draw … draw   hand in C1   draw … draw   settle 1, hand in C2, apply 1   draw … draw   settle 2, hand in C3, …
                  └─────── C1 is summed ───────┘         └───────── C2 is summed ────────────┘

The way of a sample, and who answers for each part of it:

    open            all enter the phase, its first positions are dealt      settle.Exchanges.open
    draw            the next micro-batch that may be drawn                  draw.Bounds.next
    contribute      its gradients lie in the buffer                         in_flight.Work.contribution
    step            hand in, if due; settle, if the sum is there; apply     submit.HandingIn, settle.Exchanges

A worker that has no say goes along (follow), one whose era ends gets into the next (elastic.transition), and
whatever it waits for, it looks around meanwhile (poll).
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
from pliant.errors import Left, RunEnded, UsageError
from pliant.tensors.process_group.channel import Channel
from pliant.types import WorkerId
from pliant.worker.checkpoint_schedule import CheckpointSchedule
from pliant.worker.checkpoint_writer import CheckpointWriter
from pliant.worker.collectives import Answer, Collectives
from pliant.worker.draw import DrawLimits
from pliant.worker.elastic.eras import Eras
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

# How long the first sum after a loss is waited for, with an overlap too: mostly it is in by then, and the update comes
# a whole contribution earlier.
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
        *,
        eras: Eras | None = None,
        check: Callable[[], None] | None = None,
        saving: CheckpointWriter | None = None,
        carried: Mapping[str, Any] | None = None,
        pace: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.training = training
        self._eras = eras
        self._clock = clock
        self._sleep = sleep
        self._slowdown = 1.0 / pace - 1.0
        member = self._member = WorkerState(me, group, training, witness, eras, clock)
        self._channels = Collectives(channel)
        self._checkpoints = CheckpointSchedule(member, saving, carried)
        self._lookout = Poller(member, self._channels, self._checkpoints, check, clock, sleep)
        self._bounds = DrawLimits(member, clock)
        self._crossing: EraTransition | None = None
        if eras is not None:
            self._crossing = EraTransition(member, eras, self._channels, self._lookout, self._checkpoints)
        self._handing = Submission(member, self._channels, self._lookout, clock)
        self.hooks = Hooks(member, self._lookout, self._checkpoints)
        self._exchanges = Settlement(
            member, self._channels, self._lookout, self._bounds, self._handing, self._crossing, self.hooks, clock
        )
        self._following = Follower(
            member, self._channels, self._lookout, self._handing, self._exchanges, self._checkpoints, self.hooks, sleep
        )

    # -- facts

    @property
    def me(self) -> WorkerId:
        """Its name; another one after a return."""
        return self._member.me

    @property
    def group(self) -> GroupState:
        """The replicated state."""
        return self._member.group

    @property
    def standing(self) -> Standing:
        return self._member.standing

    @property
    def last(self) -> Settled | None:
        """The last settled exchange."""
        return self._exchanges.last

    @property
    def last_trained(self) -> Settled | None:
        """The last settled round of a training phase."""
        return self._exchanges.last_trained

    @property
    def applied_rate(self) -> float:
        """What the last update was made with."""
        return self._exchanges.applied_rate

    @property
    def inside(self) -> Kind | None:
        """The kind of the innermost call that the script is in."""
        call = self._member.script.innermost
        return call.kind if call is not None else None

    @property
    def leads(self) -> bool:
        """Whether it prints and writes for the group now; not while its script catches up with the others'."""
        group = self.group
        return group.era > 0 and group.roster[0] == self.me and not self._member.script.is_behind(group)

    def past(self, epoch: int) -> bool:
        """Whether the group is beyond ``epoch`` already: a newcomer passes over it."""
        known = [self.group.past.epoch, *(phase.epoch for phase in self.group.open)]
        if self._eras is not None:
            known.append(self._eras.last_past_epoch())
        return max(known, default=-1) > epoch

    def limit(self, samples: int | None, updates: int | None) -> None:
        """End training phases where this many samples or updates in all are reached; the same call on every worker."""
        self._member.group = replace(self.group, samples_limit=samples, updates_limit=updates)

    @property
    def clip_norm(self) -> float | None:
        """The bound on the gradient's norm: what the script has set last, or what is in force."""
        wanted = self._member.clip_norm
        return self.training.clip_norm if wanted is None else wanted or None

    def set_clip_norm(self, bound: float | None) -> None:
        """Ask for another one: in force as soon as all scripts that ask for one ask for the same."""
        self._member.clip_norm = bound or 0.0

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """What this worker will draw after the last drawn micro-batch, as far as it is dealt."""
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
        past = self._crossing.become_member(call) if self._crossing is not None else None
        if past is not None:
            return past
        script = self._member.script
        self._exchanges.finish_draining()
        # Left over where an era has ended in between. The state that is taken over below is the one after that code.
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
                # The group is in a call that this script does not make, or may not make the one that it makes.
                self._following.follow()
                continue
            inner = Flag.INNER if script.is_in_ended_loop else Flag.NONE
            self._exchanges.open(call, inner | self._following.readiness())

    def _comes_back_into_body(self) -> bool:
        """Whether a sleeper is in the body of a loop that others compute now: they say whether a call is made in it."""
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
                # It has ended while the script was in what it does with an update.
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
        """Between two exchanges."""
        self._lookout.look()
        # Left over where an era has ended in between.
        self._exchanges.follow_update()
        self._lookout.rest()
        self.hooks.look()

    def _drawn(self, micro_batch: MicroBatch) -> None:
        """The script's loop body is next; with a contribution in flight it computes at the look-ahead point."""
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
        """Whether ``phase`` goes on; where it has ended, its buffers are made equal."""
        self._enter_again(phase)
        if self._member.is_in(phase):
            return True
        self._come_to_the_end(phase)
        return False

    def _enter_again(self, phase: int) -> None:
        """The run has begun anew while this script was in its first call: enter that once more."""
        call = self._member.script.innermost
        if phase > self.group.phases and call is not None:
            self._opened(call)

    def _come_to_the_end(self, phase: int) -> None:
        """The phase is over, the script's code inside it has run, and that after it is next."""
        self._exchanges.finish_draining()
        self._exchanges.follow_update()
        self._following.make_sure(ended=True)
        self._stay_without_state()
        if self._exchanges.somebody_lacks_state(phase) and self._eras is not None:
            self._eras.keep_users_state(self._member.script.position)
            self._lookout.rest()
        self._lookout.progress()

    def _stay_without_state(self) -> None:
        """Who does not hold the state does not run the code after the last call: it would do so on wrong weights.

        Until the group is in a later call, the one that has ended may be the last one.
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
        """The run is over, and this worker does not hold its outcome."""
        self._member.witness.confirmed()
        if self._eras is not None:
            self._eras.place.link.send_lines_again()
            self._eras.place.link.finish(left=True, over=True)
        raise Left

    def leave_if_late(self) -> None:
        """The script is at the end of its epochs: if all of them were over before it came, it has nothing to go on."""
        if self._eras is not None and not self._eras.enlisted and self._member.follows:
            self._depart()

    def _settled_soon(self) -> bool:
        """After a loss the run has stood still: make the first update before the next micro-batch, if that is quick."""
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
        """Have the gradients of a drawn micro-batch computed; ``whole``: nothing more of it will come.

        ``compute`` adds them to the buffer. Where a synchronous round waits for nothing but them, the group sums each
        part of them as soon as ``compute`` tells that it is complete.
        """
        gradients = self.training.gradients
        if whole and gradients.orderly and self._hands_in_early():
            self._member.work.contribution.add(weight, loss_sum)
            self._handing.hand_in_while(compute)
            return
        # The first time nobody relies on what it tells.
        tells = whole and gradients.orderly is None and self._hands_in_early()
        try:
            compute((lambda _: None) if tells else None)
        except Exception:
            # The script may catch it (out of memory) and go on: half a gradient must not.
            self._leave_out()
            raise
        self.contributed(weight, loss_sum)

    def _leave_out(self) -> None:
        """A backward pass has failed: what this worker has computed for the coming update has no part in it."""
        self.training.gradients.discard()
        self._member.work.contribution.leave_out()

    @property
    def may_repeat(self) -> bool:
        """Whether the micro-batch that was drawn last is still part of what is accumulated here."""
        return self._member.work.contribution.micro_batches > 0

    def _hands_in_early(self) -> bool:
        """Whether the micro-batch that was just drawn is the last one that a synchronous round waits for."""
        # An emulated device sleeps after the pass: its gradients would be there too soon.
        if self._slowdown > 0 or self._lookout.broken is not None or self.training.ahead:
            return False
        if not self._handing.in_parts(self.group.trained) or self._handing.changes_set:
            return False
        return self._speaks(self.group.phase.number) and self._bounds.last()

    def contributed(
        self, weight: float, loss_sum: Tensor | float, sums: Sums = (), output: bytes | None = None
    ) -> None:
        """A drawn micro-batch is computed; its gradients lie in the buffer.

        ``sums``, ``output``: what an ``evaluate`` has measured beside, and what it gathers.
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
        # The script's own code is next: how far it is has to be known while it is in there.
        self._lookout.progress()
        if outcome.kind is Kind.TRAIN:
            # An exchange of an ``evaluate`` in the loop's body says nothing about the loop.
            work.drawn_since_update = not outcome.seen
        if outcome.ended:
            self._member.script.ended_in_body()
        # An ``evaluate`` in what follows an update may have lasted longer than this worker's place in the group.
        return outcome.seen and not self._member.follows

    def _hand_in(self, flags: Flag = Flag.NONE) -> None:
        """Nothing is in flight: return to the plain weights and begin the summation."""
        self.training.back()
        self._handing.hand_in(flags)

    # -- leave a phase, the run

    def abandon(self, phase: int) -> None:
        """The user's loop was left early: hand in what there is and end the phase for all."""
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
            # Its weights differ: what it says counts again when it holds the others'.
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
        """This worker computes, though no exchange shows it."""
        self._lookout.progress(LoopPoint.COMPUTING)

    def busy(self, what: str, seconds: float | None) -> AbstractContextManager[None]:
        """The script does something of its own for a while: the others need not wait for it."""
        return self._lookout.busy(what, seconds)

    def gathered(self, phase: int, *, everywhere: bool) -> list[tuple[MicroBatch, bytes]] | None:
        """What an ``evaluate`` that has just ended has gathered, as far as this worker has it.

        None on those who are not to have it: all but the first who holds the state, unless it is wanted
        ``everywhere``; and whoever does not hold the state, which cannot compute what it lacks.
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
        if self._eras is not None:
            # Whoever sends them may not get to it, and nobody keeps them any longer.
            self._eras.place.link.send_lines_again()
        if self._member.follows or (self._eras is not None and not self._eras.holds_all):
            raise Left

    def _ended(self) -> None:
        if self._eras is not None and not self._eras.enlisted:
            return
        self._lookout.ending = True
        while not self.group.over:
            self._look_around()
            # Now: once the others have reached their end, nobody can be asked any more.
            self._following.take_users_state()
            if self.group.open:
                self._following.follow()
                continue
            self._exchanges.finish_draining()
            self._exchanges.end()

    def leave(self, reason: str) -> None:
        """Go in good order as soon as the group can do without this worker."""
        if self._eras is not None:
            self._eras.leave(reason)

    def close(self) -> None:
        """Give the group and the optimizer back, whatever is still in flight."""
        self.training.close()
        self._channels.close()
        if self._eras is not None:
            self._eras.close()

    # -- from one era into the next

    def found(self) -> None:
        """Enter the first era together with all others (or, coming too late for it, a later one)."""
        assert self._crossing is not None
        self._through(self._crossing.found)

    def _through(self, action: Callable[[], Answer], or_else: Answer | None = None) -> Answer:
        """Do it, in this era or the next; ``or_else``: the outcome of an interrupted action that is not repeated."""
        while True:
            try:
                return action()
            except (EraBroken, Evicted) as trouble:
                self._go_on(trouble)
            if or_else is not None:
                return or_else

    def _go_on(self, trouble: EraBroken | Evicted) -> None:
        self._exchanges.go_if_expelled()
        if self._crossing is None:
            raise RunEnded(str(trouble))
        self._crossing.go_on(trouble)

    # -- a run without a coordinator

    def restore(self, names: Sequence[str]) -> None:
        """Alone: go on from the first of these checkpoints that is whole."""
        self._checkpoints.restore(names, 0)

    def finished(self) -> None:
        """Alone: the script has come to its end, and the next one begins anew."""
        self._checkpoints.end()
