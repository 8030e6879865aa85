"""A whole run in virtual time: the real coordinator and the real workers' loops, from a seed.

Question  Does the protocol hold whatever happens, whenever it happens?
Holds     ``Coordinator``, ``Worker`` and its parts as ``session.build`` puts them together, ``Mailbox``,
          ``Link``'s books and ``core`` are the production code; clock, network, disk, processes and tensors are
          virtual. A scene and a seed give one history. Every invariant is checked all the way; see ``invariants``.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from pliant.control.messages import Signature
from pliant.coordinator.run_spec import RunSpec
from pliant.core.group_state import FinishedPhase, Policy, Standing
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.membership.roster import Stopping
from pliant.core.membership.shutdown import QUIET_EXIT
from pliant.core.tickets import Kind
from pliant.errors import PliantError, RunEnded, Stopped
from pliant.tensors.process_group.channel import Channel
from pliant.testing.clock import Process, World
from pliant.testing.collective import VirtualForming
from pliant.testing.disk import VirtualDisk, VirtualTask
from pliant.testing.hosts import Host, VirtualLauncher
from pliant.testing.invariants import Checker, Observer, Violation
from pliant.testing.link import VirtualLink
from pliant.testing.meeting import Meetings
from pliant.testing.memo import remembered
from pliant.testing.network import Network
from pliant.testing.training import VirtualTraining
from pliant.testing.transfer import Streams, VirtualDonor, VirtualRecipient
from pliant.worker import session
from pliant.worker.checkpoint_writer import CheckpointWriter
from pliant.worker.elastic.donor import StateLines
from pliant.worker.loop import Worker
from pliant.worker.script.calls import Counted, ScriptCall
from pliant.worker.script.hooks import Update
from pliant.worker.session import Parts, Session
from pliant.worker.submit import BucketReady

_VERSION = "sim"
# Beyond dead_after, until the next round is applied: DESIGN, invariant 6.
_RECOVERY_S = 1.0
# Two formations that fail, and a third one.
_UNREACHABLE_S = 5.0


class Scene(msgspec.Struct, frozen=True):
    """What a history begins with."""

    name: str
    policy: Policy
    workers: int
    paces: tuple[float, ...]
    """seconds per sample, by the number of the process"""
    sizes: tuple[int, ...]
    epochs: int = 2
    length: int = 60
    evaluated: int = 20
    nested: int = 0
    """evaluate inside the loop whenever the user's counter is a multiple; 0: never"""
    in_a_row: int = 1
    """calls of evaluate at each of these points, and after each loop"""
    tested: bool = True
    """evaluate after each loop; else the last loop is the script's last call"""
    breaks: float = 0.0
    """how likely a micro-batch ends the loop"""
    samples: int | None = None
    """epochs(samples=…)"""
    steps: int | None = None
    """epochs(steps=…)"""
    follows_updates: bool = False
    """the script registers a function with ``on_update``"""
    saves_there: bool = False
    """... in which it does what takes long, too: before any ``evaluate``"""
    evaluates: int = 0
    """... which evaluates whenever the number of updates is a multiple; 0: never"""
    changes: int = 0
    """the script trains other parameters whenever its counter is a multiple; 0: always the same"""
    grows: bool = False
    """... and adds a parameter group"""
    buffers: int = 0
    dead_after_s: float = 1.0
    hung_after_s: float = 6.0
    slowest_s: float = 0.002
    """of a control message"""
    sum_s: float = 0.004
    stream_s: float = 0.01
    stream_breaks: float = 0.0
    parameters_s: float = 0.0
    """how much longer an answer with parameters takes"""
    late_heads: float = 0.0
    """how likely even the head of an answer takes its time"""
    parameter_bytes: int = 8
    """how large a parameter is said to be: large ones are not handed on all at once"""
    state_s: float = 0.0
    """what the user's state takes beyond that"""
    checkpoint_every_s: float | None = None
    damaged: float = 0.0
    """how likely a checkpoint is damaged"""
    limit_s: float = 60.0
    unbroken: bool = False
    """nothing happens but that newcomers cannot be reached: no era may be broken for that"""
    may_fail: bool = False
    """the run may end without having completed: everybody was lost or left"""
    faults: tuple[Any, ...] = ()


class Outcome(msgspec.Struct):
    """What came of a seed."""

    scene: str
    seed: int
    checksum: int
    virtual_s: float
    events: int
    exchanges: int
    counts: dict[str, int]
    completed: bool
    error: str | None = None
    log: list[str] = msgspec.field(default_factory=list)


class Simulation:
    """One history."""

    def __init__(self, scene: Scene, seed: int, *, trace: bool = False) -> None:
        self.scene = scene
        self.seed = seed
        self.world = world = World(f"{scene.name} {seed}", trace=trace)
        self.checker = Checker(world, reference=scene.policy.batch)
        self.network = Network(world, scene.slowest_s)
        self.meetings = Meetings(world, scene.sum_s)
        self.streams = Streams(world, scene.stream_s)
        self.streams.breaks, self.streams.state_s = scene.stream_breaks, scene.state_s
        self.streams.parameters_s, self.streams.late_heads = scene.parameters_s, scene.late_heads
        self.disk = VirtualDisk(world, scene.damaged)
        charter = RunSpec("sim", "script.py", _VERSION, scene.workers, scene.dead_after_s, grace_s=1.0)
        self.host = Host(world, self.network, charter)
        self.host.appended = lambda coordinator: self.checker.journaled(self.host.disk.content)
        self.scripts: dict[Process, VirtualScript] = {}
        self.started = 0
        self.pending = 0
        """faults that may still strike"""
        self._lost_before = False
        """nobody was left who held the state, before the run's end was decided"""
        self.quiet_s = 0.0
        """when the last fault is over"""
        self.struck = False
        """something was done to the run"""
        self.launcher = self._launched(scene.workers, owner=True)
        self.launchers = [self.launcher]
        self.checker.fell_behind = self._judge_before_end
        # Whose weights were changed may be the only one left.
        self.checker.tainted = scene.name == "drifting"
        world.after(0.25, self._watch)
        for fault in scene.faults:
            fault.plan(self)

    def _launched(self, workers: int, *, owner: bool, walled: str = "") -> VirtualLauncher:
        def start(slot: str, pid: int, ended: Callable[[Process, int], None]) -> Process:
            process = self._start(slot, pid, ended)
            process.walled = walled
            return process

        host = self.host if owner else None
        return VirtualLauncher(
            self.world, self.network, start, self._terminated, workers=workers, host=host, grace_s=1.0
        )

    def join(self, workers: int, walled: str = "") -> None:
        """Another launcher brings more workers; ``walled``: their data ports cannot be reached, or reach nobody's."""
        self.launchers.append(self._launched(workers, owner=False, walled=walled))

    def _start(self, slot: str, pid: int, ended: Callable[[Process, int], None]) -> Process:
        number, self.started = self.started, self.started + 1
        script = VirtualScript(self, slot, number)
        process = Process(self.world, slot, pid, script.run)
        self.scripts[process] = script
        self.meetings.watch(process)

        def over(status: int) -> None:
            self.checker.holders.pop(script.name, None)
            self.checker.require(status >= 0 or self.struck, f"{script.name} was killed, and nothing was done to it")
            if status != 0:
                self.checker.died(script.name)
            self.judge()
            for wire in self.network.of(process):
                # The system sends on what it was given, unless the machine has gone.
                if status < 0 and self.world.chance(0.5):
                    wire.break_off(near_s=0.0, far_s=self.world.between(0.0005, 0.01))
                else:
                    wire.near.close()
            ended(process, status)

        process.ended.append(over)
        process.start()
        return process

    def judge(self) -> None:
        """Whether anybody is left who holds the state and can do something with it."""
        self.checker.lost = self.checker.lost or not self._able_holders
        self._judge_before_end()

    def _judge_before_end(self) -> None:
        """The same, unless they go because the run ends: that is no reason for its end."""
        coordinator = self.host.coordinator
        ends = coordinator is not None and isinstance(coordinator.state.stage, Stopping)
        staying = self._able_holders - self.checker.relieved
        self._lost_before = self._lost_before or not (staying or ends)

    @property
    def _able_holders(self) -> set[str]:
        able = {script.name for script in self.living if script.impaired_until_s <= self.world.now_s}
        return able.intersection(self.checker.holders)

    def _terminated(self, process: Process) -> None:
        self.scripts[process].terminated(process)

    # -- watching

    @property
    def living(self) -> list[VirtualScript]:
        """The scripts of processes that live."""
        return [script for process, script in self.scripts.items() if process.alive]

    def _watch(self) -> None:
        world, scene = self.world, self.scene
        if self.host.end is not None and all(launcher.over for launcher in self.launchers if launcher.name):
            world.stop()
            return
        since_s = max(self.checker.settled_s, self.quiet_s)
        patience_s = scene.dead_after_s + _RECOVERY_S + self._slack_s
        if any(process.walled or process.parted for process in self.scripts):
            patience_s += _UNREACHABLE_S
        expected = self.host.end is None and not self.checker.over and not self.pending and self.checker.holders
        if expected and world.now_s - since_s > patience_s:
            raise Violation(
                f"nothing was settled for {world.now_s - since_s:.2f} s though {sorted(self.checker.holders)} live"
            )
        if world.now_s > scene.limit_s:
            raise Violation(f"the run has not ended after {scene.limit_s:g} s")
        world.after(0.25, self._watch)

    @property
    def _slack_s(self) -> float:
        """What the slowest micro-batch takes, the start of a process, and what the group may wait for a newcomer."""
        return 1.0 + 8 * max(self.scene.paces) * max(self.scene.sizes) + self.scene.parameters_s

    def _may_end(self, reason: str) -> bool:
        """Whether faults explain that a run did not complete: everybody was lost, or has left."""
        if not (self.scene.may_fail and self.checker.lost):
            return False
        if "nobody is left who holds" in reason:
            # From a checkpoint it goes on, whoever was lost; only those who left of their own accord do not come back.
            return (self._lost_before or self.checker.forsaken) and not self.checker.checkpoints
        if self.scene.damaged and reason.endswith("is damaged"):
            # All that there were.
            return True
        return reason in ("all workers have left", "no worker is left")

    def run(self) -> Outcome:
        """Let it happen; the outcome carries the first thing that was wrong."""
        error: str | None = None
        end = None
        try:
            with remembered():
                self.world.run()
            end = self.host.end
            assert end is not None
            self.checker.journaled(self.host.disk.content)
            self.checker.conclude(completed=end.completed)
            # A coordinator that dies while everybody says goodbye leaves nobody who knows that all went well.
            forgotten = self.checker.over and self.host.restarts > 0
            if self.scene.unbroken and self.world.counts.get("broken off"):
                raise Violation("an era was broken, and nothing was wrong but that a newcomer could not be reached")
            if not end.completed and not forgotten and not self._may_end(end.reason):
                raise Violation(f"the run ended: {end.reason}")
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            error = _described(failure)
        world = self.world
        return Outcome(
            self.scene.name,
            self.seed,
            world.checksum,
            world.now_s,
            world.events,
            self.checker.exchanges,
            world.counts,
            end is not None and end.completed,
            error,
            world.log or [],
        )


def _described(failure: BaseException) -> str:
    trace = failure.__traceback__
    places: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    where = "" if isinstance(failure, Violation) else f"  [{' < '.join(reversed(places[-6:]))}]"
    return f"{type(failure).__name__}: {failure}{where}"


def _look(forming: list[VirtualForming]) -> None:
    for each in forming:
        each.look()


class VirtualScript:
    """A user's script in one process, through the worker's interface as ``pliant.run`` uses it."""

    def __init__(self, simulation: Simulation, slot: str, number: int) -> None:
        self.simulation = simulation
        self.scene = simulation.scene
        self.slot = slot
        self.number = number
        self.pace_s = self.scene.paces[number % len(self.scene.paces)]
        self.size = self.scene.sizes[number % len(self.scene.sizes)]
        self.slowness = 1.0
        self.worker: Worker | None = None
        self.link: VirtualLink | None = None
        self._forming: dict[VirtualLink, list[VirtualForming]] = {}
        """groups on their way, by the line that they form over"""
        self._signalled = False
        self.epoch = 0
        self.impaired_until_s = 0.0
        """until then it does not hear, speak, or get on"""
        self.saves_s = 0.0
        """how long what it does of its own takes, when it comes to it next"""
        self.says_so = False
        """... and it tells the others"""

    @property
    def name(self) -> str:
        """The name that the coordinator has given."""
        return self.link.worker if self.link is not None else self.slot

    def terminated(self, process: Process) -> None:
        """SIGTERM: the first one asks, the second one ends."""
        if self.worker is None or self._signalled:
            process.kill(-15)
            return
        self._signalled = True
        self.worker.leave("SIGTERM")
        process.notice()

    def run(self, process: Process) -> int:
        """The process from its start to its exit status."""
        self.process = process
        process.compute(process.world.between(0.01, 0.2))
        try:
            place = session.build(self._connected, self._parts)
        except SystemExit as error:
            return int(error.code or 0)
        try:
            try:
                self._train(place)
            except BaseException as error:
                if process.alive:
                    place.fail(error)
                raise
            with place.guarded():
                place.finish()
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    # -- pliant.join

    def _connected(self) -> VirtualLink:
        try:
            link = VirtualLink(self.process, self.simulation.network, self.slot, _VERSION)
        except PliantError as error:
            if isinstance(error, Stopped) and error.completed:
                raise SystemExit(0) from None
            raise SystemExit(QUIET_EXIT if isinstance(error, RunEnded) else 1) from None
        self.link = link
        forming = self._forming.setdefault(link, [])
        link.heard = lambda: _look(forming[-3:])
        link.concluded = self._concluded
        link.departed = lambda: self.simulation.checker.departed(self.name)
        link.unheard = lambda: self.simulation.checker.unheard(self.name)
        return link

    def _parts(self, link: VirtualLink) -> Parts:
        """What stands for sockets, threads, tensors and time."""
        simulation, process, scene = self.simulation, self.process, self.scene
        donor = VirtualDonor(simulation.streams, process)
        self.training = VirtualTraining(
            reference=scene.policy.batch,
            buffers=scene.buffers,
            start=1_000_003 * (self.number + 1),
            grows=scene.changes > 0 and scene.grows,
            nbytes=scene.parameter_bytes,
        )
        self.state: dict[str, Any] = {"count": 0, "trained": 0, "epochs": 0, "updates": 0}
        witness = Observer(link, simulation.checker, self.training)

        def ready(worker: Worker) -> None:
            self.worker = worker
            witness.kept_bytes = lambda: worker._member.reception.kept_bytes

        settings = {"dead_after": repr(scene.dead_after_s), "hung_after": repr(scene.hung_after_s)}
        return Parts(
            policy=scene.policy,
            signature=Signature("sim", [("p", [1], "float32")], settings),
            carried={"optimizer": None, "scheduler": self.training.scheduler, "scaler": None, "state": self.state},
            training=self.training,
            journal=witness,
            lines=StateLines(
                donor,
                lambda address: VirtualRecipient(simulation.streams, process, address),
                self._share,
                # Thousands of workers would say so on one and the same output.
                say=lambda text: None,
            ),
            form=self._form,
            ready=ready,
            saving=self._saving(),
            clock=process.world.clock,
            sleep=process.idle,
        )

    def _form(self, link: VirtualLink, attempt: int, place: int, members: int) -> VirtualForming:
        forming = VirtualForming(self.simulation.meetings, link, attempt, place, members)
        self._forming[link].append(forming)
        return forming

    def _saving(self) -> CheckpointWriter | None:
        every_s, process = self.scene.checkpoint_every_s, self.process
        if every_s is None:
            return None
        clock = process.world.clock
        return CheckpointWriter(
            self.simulation.disk, "sim", _VERSION, every_s, clock, lambda work: VirtualTask(process, work)
        )

    def _concluded(self) -> None:
        # Who breaks, or leaves, does not see every update.
        state = {} if self.scene.breaks or self._worker.standing is not Standing.ACTIVE else self.state
        if state and {state["trained"], state["epochs"]} != {self.scene.epochs}:
            raise Violation(f"{self.name} ends with {state}, after {self.scene.epochs} epochs")
        self.simulation.checker.ended(self.name, self.training, state, self._worker.group)

    def _share(self, channel: Channel, look: Callable[[], None]) -> None:
        """Everybody takes over the leader's state."""
        numbers: Any = self.training.parameters
        if channel.members == 1:
            return
        if channel.place == 0:
            channel.tell(str(numbers[0].value).encode(), 0)
            return
        start = int(channel.told(0, look))
        for index, number in enumerate(numbers):
            number.value = start + index

    # -- the loop

    def _train(self, place: Session) -> None:
        worker, scene, world = self._worker, self.scene, self.process.world
        place.plan(scene.epochs, scene.samples)
        worker.limit(scene.samples, scene.steps)
        if scene.follows_updates:
            worker.hooks.add_on_update(self._updated)
        worker.hooks.add_on_roster(lambda before, now: world.note("roster", self.name, len(before), len(now)))
        for epoch in range(scene.epochs):
            self.epoch = epoch
            self._batches(epoch)
            self.state["trained"] += 1
            for _ in range(scene.in_a_row if scene.tested else 0):
                self._evaluate(epoch)
            self.state["epochs"] += 1
            self.training.end_epoch(epoch)

    @property
    def _worker(self) -> Worker:
        assert self.worker is not None
        return self.worker

    def _batches(self, epoch: int) -> None:
        worker, scene, world = self._worker, self.scene, self.process.world
        phase = worker.open(ScriptCall(Kind.TRAIN, epoch, Counted(scene.length, 0), self.size, 0))
        if isinstance(phase, FinishedPhase):
            return
        while (micro_batch := worker.draw(phase)) is not None:
            if scene.breaks and world.chance(scene.breaks):
                self.training.back()
                worker.abandon(phase)
                return
            positions = self._compute(micro_batch)
            self.training.buffers.forward(positions)
            count = float(len(positions))
            worker.contribute(count, count, self._backward(epoch, positions), whole=True)
            updated = worker.step()
            if updated and worker.leads:
                self.simulation.checker.led(self.name, worker.group.round, "after a step")
            if not self.scene.saves_there:
                self._save()
            if updated:
                self.state["count"] += 1
                world.note("seen", self.name, worker.group.exchange, self.state["count"])
                if not scene.follows_updates:
                    self._change_set(self.state["count"])
                if scene.nested and self.state["count"] % scene.nested == 0:
                    for _ in range(scene.in_a_row):
                        self._evaluate(epoch)
        worker.left()

    def _save(self) -> None:
        """The script does something of its own, with or without a word."""
        lasts_s, self.saves_s = self.saves_s, 0.0
        if lasts_s > 0:
            self.process.world.note("saves", self.name, self.says_so)
            with self._worker.busy("saving", None) if self.says_so else nullcontext():
                self.process.compute(lasts_s)

    def _updated(self, update: Update) -> None:
        """``on_update``: the user's state counts updates, wherever it comes from."""
        self.process.world.note("updated", self.name, update.round, update.updates)
        self.state["updates"] += 1
        checker = self.simulation.checker
        # Who never had the user's state may be the last one.
        checker.state_lost = checker.state_lost or self._worker._member.users_state.lost
        if self.state["updates"] != update.updates and not checker.state_lost:
            raise Violation(f"{self.name} counts {self.state['updates']} updates after update {update.updates}")
        checker.updated(self.name, self.training, self._worker.group)
        self._change_set(update.updates)
        if self._worker.leads:
            checker.led(self.name, update.round, "on its update")
        if self.scene.saves_there:
            self._save()
        every = self.scene.evaluates
        if every and update.updates % every == 0:
            self._evaluate(self.epoch)

    def _change_set(self, number: int) -> None:
        """Freeze, unfreeze and add what is trained, as the number of an update says."""
        if not self.scene.changes:
            return
        turn = number // self.scene.changes
        numbers: Any = self.training.parameters
        numbers[0].requires_grad_(turn % 2 == 0)
        numbers[1].requires_grad_(turn % 3 != 1)
        optimizer = self.training.optimizer
        if self.scene.grows and turn and len(optimizer.param_groups) == 1:
            first = optimizer.param_groups[0]
            optimizer.add_param_group({"params": [numbers[2]], "lr": first["lr"], "momentum": first["momentum"]})

    def _compute(self, micro_batch: MicroBatch) -> list[int]:
        self.process.compute(self.pace_s * self.slowness * samples_of(micro_batch))
        return [position for start, stop in micro_batch for position in range(start, stop)]

    def _backward(self, epoch: int, positions: list[int]) -> Callable[[BucketReady | None], None]:
        def compute(ready: BucketReady | None) -> None:
            def told(part: int) -> None:
                if ready is not None:
                    ready(part)
                    self.process.compute(self.pace_s * self.slowness * len(positions) / 4)

            self.training.gradients.add(epoch, positions, told)

        return compute

    def _evaluate(self, epoch: int) -> None:
        worker, scene = self._worker, self.scene
        with self.training.plain():
            phase = worker.open(ScriptCall(Kind.EVALUATE, epoch, Counted(scene.evaluated, 1), self.size, 0))
            if isinstance(phase, FinishedPhase):
                past: FinishedPhase | None = phase
            else:
                while (micro_batch := worker.draw(phase)) is not None:
                    positions = self._compute(micro_batch)
                    total, count = float(sum(positions)), float(len(positions))
                    if scene.in_a_row > 1:
                        sums = (("loss", total, count), ("ones", count, count))
                        worker.contributed(count, total, sums, str(positions).encode())
                    else:
                        worker.contributed(count, total)
                    worker.step()
                past = worker.left()
                self._check_gathered(worker.gathered(phase, everywhere=True) or [])
        expected = (scene.evaluated - 1) / 2
        if past is None or past.result is None:
            return
        results = {"loss": expected, "ones": 1.0} if scene.in_a_row > 1 else None
        if past.result != expected or past.results != results:
            raise Violation(f"{self.name}: evaluate gives {past.result}, {past.results} in place of {expected}")

    def _check_gathered(self, found: list[tuple[MicroBatch, bytes]]) -> None:
        """Each output is that of its samples, and there once."""
        gathered: list[int] = []
        for micro_batch, output in found:
            positions = [position for start, stop in micro_batch for position in range(start, stop)]
            if str(positions).encode() != output:
                raise Violation(f"{self.name}: {positions} were gathered with {output.decode()}")
            gathered += positions
        if len(gathered) != len(set(gathered)):
            raise Violation(f"{self.name}: gathered {sorted(gathered)}")
        self.process.world.note("gathered", self.name, len(gathered), self.scene.evaluated)
