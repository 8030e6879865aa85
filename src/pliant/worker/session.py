"""Join, finish and fail: a script's part in a run, from ``join`` to the end.

Question  How does a script that calls ``join`` find its job, which parts is its worker made of, and how does it leave?
Holds     The script gets the same object with and without a job. Before the first exchange all workers hold the
          leader's weights, buffers, optimizer state and user's state. A worker that fails reports why before it exits;
          one that ends because of others prints nothing, because the coordinator has already reported why.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from msgspec.structs import replace
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant.control.link import Link
from pliant.control.messages import Signature
from pliant.control.tls import client_context
from pliant.core.group_state import Policy, Standing, founded
from pliant.core.journal import records as journal
from pliant.core.membership.shutdown import QUIET_EXIT
from pliant.environment import Job, current_job
from pliant.errors import Left, PliantError, RunEnded, Stopped, UsageError
from pliant.tensors import checkpoint, handoff, weights
from pliant.tensors import serialize as states
from pliant.tensors.process_group import gloo as groups
from pliant.tensors.process_group import nccl
from pliant.tensors.process_group.channel import Channel
from pliant.types import WorkerId
from pliant.worker.checkpoint_writer import CheckpointWriter
from pliant.worker.elastic.donor import StateLines
from pliant.worker.elastic.enrolment import Enrolment, Solo, depart
from pliant.worker.elastic.rendezvous import CoordinatorLink, PendingGroup, Rendezvous
from pliant.worker.elastic.signature import check_device, device_of, signature, summary
from pliant.worker.journal import JournalReporter, NullJournal
from pliant.worker.loop import Worker
from pliant.worker.script.trained_set import all_parameters
from pliant.worker.script.training_loop import TrainingLoop
from pliant.worker.snapshot import install_state, stated
from pliant.worker.training import Training

_ALONE = "alone"
"""the name of the job of a script that runs without one"""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a script brings to ``join``."""

    model: nn.Module
    optimizer: Optimizer
    policy: Policy
    agreed: dict[str, str]
    """settings that must be equal on all workers, as text"""
    carried: dict[str, Any]
    """objects with ``state_dict`` and plain values that all workers take over from the leader"""
    prepared: Callable[[bool], Training]
    """makes the model ready, for a group (True) or for a run without one"""
    checkpoint: str | None = None
    """where checkpoints go"""
    checkpoint_every_s: float = math.inf

    def saving(self, job: str) -> CheckpointWriter | None:
        """What writes the checkpoints of this run, if the script asks for any."""
        if self.checkpoint is None:
            return None
        store = checkpoint.CheckpointStore(self.checkpoint, job)
        return CheckpointWriter(store, job, version("pliant"), self.checkpoint_every_s, time.monotonic)


class Session:
    """This process's part in a run."""

    def __init__(
        self,
        worker: TrainingLoop,
        size: int | None,
        carried: dict[str, Any],
        enrolment: Enrolment | Solo | None = None,
        at_end: Callable[[], None] | None = None,
        run: str = "",
    ) -> None:
        self.worker = worker
        self.size = size
        """largest micro-batch of this worker, if the launcher sets one"""
        self.carried = carried
        self.run = run
        """identifies the run; empty without a job"""
        self.enrolment = enrolment or Solo(worker.finished)
        self._at_end = at_end
        """called with the final state in place, before the worker is closed"""

    def leave(self, reason: str) -> None:
        """Ask to go; the group goes on without this worker."""
        self.worker.leave(reason)

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Tell the coordinator how far the script means to go."""
        self.enrolment.plan(epochs, samples)

    def finish(self) -> None:
        """Leave at the end of the script, together with all others."""
        try:
            self.worker.end()
        except Left:
            self.worker.close()
            self.enrolment.finish(left=True, over=self.worker.group.over)
            raise
        except BaseException:
            self.worker.close()
            raise
        if self._at_end is not None:
            self._at_end()
        self.worker.close()
        self.enrolment.finish(left=False)

    def fail(self, error: BaseException, everywhere: str | None = None) -> None:
        """Leave because of an error. In a job, this ends the process if the error is one of Pliant's own.

        ``everywhere``: all other workers would meet the same error, and the run ends with this reason.
        """
        self.worker.close()
        if everywhere is not None:
            self.enrolment.fail(everywhere)
        else:
            self.enrolment.depart(error)

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Turn Pliant's own errors into one line and an exit status, in a job."""
        try:
            yield
        except PliantError as error:
            self.worker.close()
            self.enrolment.depart(error)
            raise


def alone(offer: JoinRequest) -> Session:
    """A group of one, without coordinator and journal. It goes on from its last checkpoint, if there is one."""
    me = WorkerId("w0")
    group = founded(offer.policy, era=1, roster=(me,))
    saving = offer.saving(_ALONE)
    training, solo = offer.prepared(False), Solo()
    worker = Worker(me, group, groups.Alone(), training, NullJournal(), solo, saving=saving, carried=offer.carried)
    names = saving.begun() if saving is not None else []
    if names:
        worker.restore(names)
    return Session(worker, None, offer.carried)


_appointed: ContextVar[Callable[[JoinRequest], Session] | None] = ContextVar("appointed", default=None)
_held: list[Job] = []
"""the job that this process has joined: the coordinator would take a second ``join`` for a newcomer's"""


@contextmanager
def appointed(enroll: Callable[[JoinRequest], Session]) -> Generator[None]:
    """Replace how ``join`` finds its group, for what this thread runs meanwhile. Other threads set their own."""
    before = _appointed.set(enroll)
    try:
        yield
    finally:
        _appointed.reset(before)


def enrolled(offer: JoinRequest) -> Session:
    """The session in the job that the environment names; a group of one if it names none."""
    enroll = _appointed.get()
    if enroll is not None:
        return enroll(offer)
    job = current_job()
    if job is None:
        return alone(offer)
    if _held:
        raise UsageError(
            "join was called a second time in this worker: a job is one run; train everything in one `with` block, "
            "or start each part with a `pliant run` of its own"
        )
    _held.append(job)
    return build(lambda: _connected(job), lambda link: job_parts(job, link, offer))


def turned_away(error: PliantError) -> None:
    """The script's settings are refused before it has joined: in a job, report that and end the process."""
    job = None if _appointed.get() else current_job()
    if job is not None:
        depart(_connected(job), error)


def _connected(job: Job) -> Link:
    try:
        context = client_context(Path(job.authority)) if job.authority else None
        return Link.connect(job.address, job.token, job.worker, version("pliant"), context)
    except PliantError as error:
        if isinstance(error, Stopped) and error.completed:
            raise SystemExit(0) from None
        if not isinstance(error, Stopped):
            print(f"pliant: {error}", file=sys.stderr)
        raise SystemExit(QUIET_EXIT if isinstance(error, RunEnded) else 1) from None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker in a job is made of; the simulator has its own for sockets, threads, tensors and time."""

    policy: Policy
    signature: Signature
    carried: dict[str, Any]
    """objects with ``state_dict`` and plain values that all workers take over from the leader"""
    training: Training
    journal: JournalReporter
    lines: StateLines
    form: Callable[[Any, int, int, int], PendingGroup]
    """(link, attempt, place, members) -> a group of several, being formed"""
    ready: Callable[[Worker], None]
    """called with the worker before it enters a group"""
    overdue: Callable[[], Callable[[], None] | None] = lambda: None
    at_end: Callable[[Worker], None] | None = None
    """called with the worker in its final state, before it is closed"""
    saving: CheckpointWriter | None = None
    pace: float = 1.0
    size: int | None = None
    run: str = ""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


LinkT = TypeVar("LinkT", bound=CoordinatorLink)


def build(connect: Callable[[], LinkT], parts_of: Callable[[LinkT], Parts]) -> Session:
    """Make the worker of a job, and enter the first era unless the run has begun already.

    ``connect`` is called again when this worker comes back under another name; the parts stay.
    """
    link = connect()
    try:
        return _entered(link, connect, parts_of(link))
    except PliantError as error:
        depart(link, error)
        raise


def _entered(link: CoordinatorLink, connect: Callable[[], CoordinatorLink], parts: Parts) -> Session:
    def placed(link: CoordinatorLink) -> Rendezvous:
        def form(attempt: int, place: int, members: int) -> PendingGroup:
            return _Formed() if members == 1 else parts.form(link, attempt, place, members)

        address = parts.lines.donor.address
        return Rendezvous(link, form, parts.signature, address, clock=parts.clock, sleep=parts.sleep)

    def come_back() -> Rendezvous:
        enrolment.link.close()
        return placed(connect())

    enrolment = Enrolment(placed(link), come_back, parts.overdue)
    newcomer = founded(parts.policy, 0, (WorkerId(link.worker),))
    newcomer = replace(newcomer, standings=(Standing.FOLLOWING,))
    worker = Worker(
        WorkerId(link.worker),
        newcomer,
        groups.Alone(),
        parts.training,
        parts.journal,
        enrolment,
        lines=parts.lines,
        saving=parts.saving,
        carried=parts.carried,
        pace=parts.pace,
        clock=parts.clock,
        sleep=parts.sleep,
    )
    parts.ready(worker)
    if not enrolment.is_running:
        worker.found()
    at_end = parts.at_end
    return Session(
        worker,
        parts.size,
        parts.carried,
        enrolment,
        None if at_end is None else lambda: at_end(worker),
        run=parts.run,
    )


def job_parts(job: Job, link: Link, offer: JoinRequest) -> Parts:
    """The parts of a worker in a real job."""
    check_device(offer.optimizer)
    donor = handoff.Donor(link.local_address, job.token)
    training = offer.prepared(True)
    described = signature(offer.model, offer.optimizer, offer.agreed)

    def form(link: CoordinatorLink, attempt: int, place: int, members: int) -> PendingGroup:
        return forming(link, attempt, place, members, link.local_address, offer)

    def share(channel: Any, look: Callable[[], None]) -> None:
        taken_over(channel, offer, look)
        training.read_scale()

    return Parts(
        policy=offer.policy,
        signature=described,
        carried=offer.carried,
        training=training,
        journal=JournalReporter(link, described.settings, summary(described)),
        lines=StateLines(donor, lambda address: handoff.Recipient(address, job.token), share),
        form=form,
        ready=_leave_on_sigterm,
        overdue=lambda: _end_after(job.grace_s),
        at_end=lambda worker: _leave_weights(worker, offer.model, job.directory),
        saving=offer.saving(link.mailbox.welcome.job),
        pace=job.pace,
        size=job.size,
        # Of everything that identifies a run only its token is random.
        run=journal.digest_of(b"run", job.token.encode()),
    )


def _leave_weights(worker: Worker, model: nn.Module, directory: str) -> None:
    """The leader writes the final weights beside the journal: `pliant replay` compares with them."""
    if not directory or worker.group.roster[0] != worker.me:
        return
    try:
        with worker.training.plain():
            path = Path(directory) / weights.FINAL
            weights.save(model, path, round_=worker.group.round, private=True)
    except (OSError, SafetensorError) as error:
        print(f"pliant: the final weights are not in {directory}: {error}", file=sys.stderr)


def _end_after(grace_s: float) -> Callable[[], None]:
    """Kill this process if it has not left ``grace_s`` after it was asked to.

    Returns what calls that off, to be called once it has left.
    """
    ending = threading.Timer(grace_s, os.kill, (os.getpid(), signal.SIGKILL))
    ending.daemon = True
    ending.start()
    return ending.cancel


def _leave_on_sigterm(worker: Worker) -> None:
    """Leave the run at the first SIGTERM. Outside the main thread Python has no signals."""
    if threading.current_thread() is not threading.main_thread():
        return

    def asked(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        worker.leave("SIGTERM")

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, asked)


class _Formed:
    """A group of one: nothing has to be formed."""

    over, failed = True, False

    def result(self) -> groups.Alone:
        return groups.Alone()

    def abandon(self) -> None:
        """There is nothing to give up."""


def forming(
    link: groups.KeyValue, attempt: int, place: int, members: int, address: str, offer: JoinRequest
) -> PendingGroup:
    """The group of an attempt, being formed in the background."""

    def make(channel: groups.KeyValue) -> groups.Gloo:
        return formed(channel, attempt, place, members, address, offer)

    return groups.FormingGroup(make, link)


def formed(
    link: groups.KeyValue, attempt: int, place: int, members: int, address: str, offer: JoinRequest
) -> groups.Gloo:
    """The group of an attempt, on the device that the model lives on."""
    device = device_of(offer.optimizer)
    if device.type == "cuda":
        return nccl.Nccl(link, attempt=attempt, place=place, members=members, address=address, device=device)
    return groups.Gloo(link, attempt=attempt, place=place, members=members, address=address)


class _Watched:
    """A broadcast in a group that is given up when the era ends."""

    def __init__(self, channel: Channel, look: Callable[[], None]) -> None:
        self.place: int = channel.place
        self._channel = channel
        self._look = look

    def broadcast(self, tensor: Tensor) -> None:
        self._channel.broadcast(tensor, 0, self._look)


def taken_over(channel: Channel, offer: JoinRequest, look: Callable[[], None] = lambda: None) -> None:
    """Take over the leader's state: tensors in place, objects by ``load_state_dict``, plain values as they are."""
    if channel.members == 1:
        return
    watched = _Watched(channel, look)
    states.broadcast_tensors(watched, [*all_parameters(offer.model, offer.optimizer), *offer.model.buffers()])
    outer = {name: value for name, value in offer.carried.items() if name != "state"}
    theirs = states.broadcast_state(watched, {"": stated(outer), "state": stated(offer.carried["state"])})
    if channel.place > 0:
        install_state(outer, theirs[""])
        install_state(offer.carried["state"], theirs["state"])
