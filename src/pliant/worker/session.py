"""Becoming a member of a group, and ceasing to be one.

Question  How does a script that calls ``join`` find its job and its place, and how does it leave?
Holds     The same object whether there is a job or not. Before the first exchange everybody holds the leader's weights,
          buffers, optimizer and user's state. A worker that fails says so before it goes; one that ends because of
          others ends quietly, for the coordinator has already said why.
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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec.structs import replace
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant.control.link import Link
from pliant.control.tls import client_context
from pliant.core.group_state import Policy, Standing, founded
from pliant.core.journal import records as journal
from pliant.core.membership.shutdown import QUIET_EXIT
from pliant.environment import Job, current_job
from pliant.errors import Drifted, Left, PliantError, RunEnded, Stopped, Unsupported, UsageError
from pliant.tensors import checkpoint, handoff, weights
from pliant.tensors import serialize as states
from pliant.tensors.process_group import gloo as groups
from pliant.tensors.process_group import nccl
from pliant.tensors.process_group.channel import Channel
from pliant.types import WorkerId
from pliant.worker.checkpoint_writer import CheckpointWriter
from pliant.worker.elastic.catch_up import install_state, stated
from pliant.worker.elastic.eras import Eras
from pliant.worker.elastic.rendezvous import CoordinatorLink, PendingGroup, Rendezvous
from pliant.worker.elastic.signature import check_device, device_of, signature, summary
from pliant.worker.journal import JournalReporter, NullJournal
from pliant.worker.loop import Worker
from pliant.worker.script.trained_set import all_parameters
from pliant.worker.script.training_loop import TrainingLoop
from pliant.worker.training import Training

_ALONE = "alone"
"""stands for the job of a script that runs without one"""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a script brings to ``join``."""

    model: nn.Module
    optimizer: Optimizer
    policy: Policy
    agreed: dict[str, str]
    """settings that must be equal on all workers, as text"""
    carried: dict[str, Any]
    """objects with ``state_dict`` and plain values that everybody takes over from the leader"""
    prepared: Callable[[bool], Training]
    """the model made ready, for a group or for a run alone"""
    checkpoint: str | None = None
    """where checkpoints go"""
    checkpoint_every_s: float = math.inf

    def saving(self, job: str) -> CheckpointWriter | None:
        """The checkpoints of this run, if it is to have any."""
        if self.checkpoint is None:
            return None
        store = checkpoint.CheckpointStore(self.checkpoint, job)
        return CheckpointWriter(store, job, version("pliant"), self.checkpoint_every_s, time.monotonic)


class Session:
    """This process's place in a run."""

    def __init__(
        self,
        worker: TrainingLoop,
        size: int | None,
        carried: dict[str, Any],
        eras: Eras | None = None,
        at_end: Callable[[], None] | None = None,
        run: str = "",
    ) -> None:
        self.worker = worker
        self.size = size
        """largest micro-batch of this worker, where the launcher sets one"""
        self.carried = carried
        self.run = run
        """tells this run from all others; empty: there is no job"""
        self._eras = eras
        self._at_end = at_end
        """what to do with the final state before it is the script's alone"""

    @property
    def link(self) -> CoordinatorLink | None:
        """The line to the coordinator; another one after a return."""
        return None if self._eras is None else self._eras.place.link

    def leave(self, reason: str) -> None:
        """Ask to go; the group goes on without this worker."""
        self.worker.leave(reason)

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Tell the coordinator how far the script means to go."""
        if self.link is not None:
            self.link.plan(epochs, samples)

    def finish(self) -> None:
        """Leave in good order, together with all others."""
        try:
            self.worker.end()
        except Left:
            self.worker.close()
            if self.link is not None:
                self.link.finish(left=True, over=self.worker.group.over)
            raise
        except BaseException:
            self.worker.close()
            raise
        if self._at_end is not None:
            self._at_end()
        self.worker.close()
        if self.link is None:
            self.worker.finished()
        else:
            self.link.finish(left=False)
            if self.link.mailbox.evicted is not None:
                # Nobody knows of this end, and the others begin anew: a second one may come.
                raise RunEnded(self.link.mailbox.evicted)

    def fail(self, error: BaseException, everywhere: str | None = None) -> None:
        """Leave because of an error. In a job, ends the process where the error is Pliant's own.

        ``everywhere``: all others would meet it in their turn, and the run ends with this reason.
        """
        self.worker.close()
        if self.link is not None and everywhere is not None:
            self.link.fail(everywhere, shown=True, fatal=True)
        elif self.link is not None:
            _depart(self.link, error)

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Errors of Pliant's own, in a job, become one line and an exit status."""
        try:
            yield
        except PliantError as error:
            self.worker.close()
            if self.link is None:
                raise
            _depart(self.link, error)


def _depart(link: CoordinatorLink, error: BaseException) -> None:
    """Say why and go. A user's exception goes on its way; its traceback is Python's to show."""
    if isinstance(error, Left):
        return
    if isinstance(error, RunEnded):
        completed = isinstance(error, Stopped) and error.completed
        raise SystemExit(0 if completed else QUIET_EXIT) from None
    if isinstance(error, PliantError):
        own = isinstance(error, Drifted | Unsupported)
        link.fail(str(error), shown=False, fatal=not own, own=own)
        raise SystemExit(1) from None
    if isinstance(error, SystemExit) and not error.code:
        link.fail("the script called sys.exit before the end of the with block", shown=False)
        return
    link.fail(f"{type(error).__name__}: {error}", shown=True)


def alone(offer: JoinRequest) -> Session:
    """A group of one: no coordinator, no journal. It goes on from its last checkpoint, if there is one."""
    me = WorkerId("w0")
    group = founded(offer.policy, era=1, roster=(me,))
    saving = offer.saving(_ALONE)
    worker = Worker(
        me, group, groups.Alone(), offer.prepared(False), NullJournal(), saving=saving, carried=offer.carried
    )
    names = saving.begun() if saving is not None else []
    if names:
        worker.restore(names)
    return Session(worker, None, offer.carried)


_appointed: list[Callable[[JoinRequest], Session]] = []
_held: list[Job] = []
"""the job that this process has, or had, a place in: the coordinator takes a second one for a newcomer's"""


@contextmanager
def appointed(enroll: Callable[[JoinRequest], Session]) -> Generator[None]:
    """For scripts that run in this process meanwhile: how their ``join`` finds its place."""
    _appointed.append(enroll)
    try:
        yield
    finally:
        _appointed.pop()


def enrolled(offer: JoinRequest) -> Session:
    """The membership in the job that the environment names; a group of one if it names none."""
    if _appointed:
        return _appointed[-1](offer)
    job = current_job()
    if job is None:
        return alone(offer)
    if _held:
        raise UsageError(
            "join was called a second time in this worker: a job is one run; train everything in one `with` block, "
            "or start each part with a `pliant run` of its own"
        )
    _held.append(job)
    link = _connected(job)
    try:
        return _entered(job, link, offer)
    except PliantError as error:
        _depart(link, error)
        raise


def turned_away(error: PliantError) -> None:
    """What the script asks for is refused before it has a place: in a job, say so there and end the process."""
    job = None if _appointed else current_job()
    if job is not None:
        _depart(_connected(job), error)


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


def _entered(job: Job, link: Link, offer: JoinRequest) -> Session:
    check_device(offer.optimizer)
    donor = handoff.Donor(link.local_address, job.token)
    training = offer.prepared(True)
    described = signature(offer.model, offer.optimizer, offer.agreed)

    def placed(link: Link) -> Rendezvous:
        def form(attempt: int, place: int, members: int) -> PendingGroup:
            return forming(link, attempt, place, members, link.local_address, offer)

        return Rendezvous(link, form, described, donor.address)

    def come_back() -> Rendezvous:
        eras.place.link.close()
        return placed(_connected(job))

    def share(channel: Channel, look: Callable[[], None]) -> None:
        taken_over(channel, offer, look)
        training.read_scale()

    witness = JournalReporter(link, described.settings, summary(described))
    eras = Eras(
        placed(link),
        donor,
        lambda address: handoff.Recipient(address, job.token),
        {**offer.carried, "journal": witness, "trained": training.trained},
        share,
        come_back,
        lambda: _end_after(job.grace_s),
    )
    newcomer = founded(offer.policy, 0, (WorkerId(link.worker),))
    newcomer = replace(newcomer, standings=(Standing.FOLLOWING,))
    worker = Worker(
        WorkerId(link.worker),
        newcomer,
        groups.Alone(),
        training,
        witness,
        eras=eras,
        saving=offer.saving(link.mailbox.welcome.job),
        carried=offer.carried,
        pace=job.pace,
    )
    _leave_on_sigterm(worker)
    if not link.mailbox.welcome.running:
        worker.found()
    return Session(
        worker,
        job.size,
        offer.carried,
        eras,
        lambda: _leave_weights(worker, offer.model, job.directory),
        # Of all that names a run only its token is drawn by chance.
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
    """A worker that was asked to go and has not gone by then is as good as dead: it makes that true.

    The answer calls it off: to be called when it has gone.
    """
    ending = threading.Timer(grace_s, os.kill, (os.getpid(), signal.SIGKILL))
    ending.daemon = True
    ending.start()
    return ending.cancel


def _leave_on_sigterm(worker: Worker) -> None:
    """The first SIGTERM means: go in good order. Outside the main thread Python has no signals."""
    if threading.current_thread() is not threading.main_thread():
        return

    def asked(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        worker.leave("SIGTERM")

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, asked)


class _Formed:
    """A group of one needs no forming."""

    over, failed = True, False

    def result(self) -> groups.Alone:
        return groups.Alone()

    def abandon(self) -> None:
        """Nothing to give up."""


def forming(
    link: groups.KeyValue, attempt: int, place: int, members: int, address: str, offer: JoinRequest
) -> PendingGroup:
    """The group of an attempt, being formed in the background."""
    if members == 1:
        return _Formed()

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
    """A group's broadcast that ends when the era does."""

    def __init__(self, channel: Channel, look: Callable[[], None]) -> None:
        self.place: int = channel.place
        self._channel = channel
        self._look = look

    def broadcast(self, tensor: Tensor) -> None:
        self._channel.broadcast(tensor, 0, self._look)


def taken_over(channel: Channel, offer: JoinRequest, look: Callable[[], None] = lambda: None) -> None:
    """Everybody takes over the leader's state: tensors in place, objects by ``load_state_dict``, plain values."""
    if channel.members == 1:
        return
    watched = _Watched(channel, look)
    states.broadcast_tensors(watched, [*all_parameters(offer.model, offer.optimizer), *offer.model.buffers()])
    outer = {name: value for name, value in offer.carried.items() if name != "state"}
    theirs = states.broadcast_state(watched, {"": stated(outer), "state": stated(offer.carried["state"])})
    if channel.place > 0:
        install_state(outer, theirs[""])
        install_state(offer.carried["state"], theirs["state"])
