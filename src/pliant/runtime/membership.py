"""Becoming a member of a group, and ceasing to be one.

Question  How does a script that calls ``join`` find its job, its era and its group, and how does it leave?
Holds     The same object whether there is a job or not. Before the first round everybody holds the leader's weights,
          buffers, optimizer and user's state. A worker that fails says so before it goes; one that ends because of
          others ends quietly, for the coordinator has already said why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pliant.control.client import Link
from pliant.control.messages import Signature
from pliant.core import rounds
from pliant.core.rounds import Policy
from pliant.errors import PliantError, RunEnded, Stopped
from pliant.runtime.environment import QUIET_EXIT, Job, current_job
from pliant.runtime.update import Training
from pliant.runtime.witness import Nobody, Reporter
from pliant.runtime.worker import Worker
from pliant.tensors import cuda
from pliant.tensors import group as groups
from pliant.tensors import state as states
from pliant.types import WorkerId


@dataclass(frozen=True, slots=True)
class Offer:
    """What a script brings to ``join``."""

    model: nn.Module
    optimizer: Optimizer
    policy: Policy
    agreed: dict[str, str]
    """settings that must be equal on all workers, as text"""
    carried: dict[str, Any]
    """objects with ``state_dict`` and plain values that everybody takes over from the leader"""
    prepared: Callable[[int], Training]
    """the model made ready for a group of so many members"""


class Membership:
    """This process's place in a run."""

    def __init__(self, worker: Worker, link: Link | None, size: int | None, carried: dict[str, Any]) -> None:
        self.worker = worker
        self.size = size
        """largest micro-batch of this worker, where the launcher sets one"""
        self.carried = carried
        self._link = link

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Tell the coordinator how far the script means to go."""
        if self._link is not None:
            self._link.plan(epochs, samples)

    def finish(self) -> None:
        """Leave in good order, together with all others."""
        self.worker.end()
        self.worker.close()
        if self._link is not None:
            self._link.finish()

    def fail(self, error: BaseException) -> None:
        """Leave because of an error. In a job, ends the process where the error is Pliant's own."""
        self.worker.close()
        if self._link is None:
            return
        _depart(self._link, error)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors of Pliant's own, in a job, become one line and an exit status."""
        try:
            yield
        except PliantError as error:
            self.worker.close()
            if self._link is None:
                raise
            _depart(self._link, error)


def _depart(link: Link, error: BaseException) -> None:
    """Say why and go. A user's exception goes on its way; its traceback is Python's to show."""
    if isinstance(error, RunEnded):
        raise SystemExit(QUIET_EXIT) from None
    if isinstance(error, PliantError):
        link.fail(str(error), shown=False)
        raise SystemExit(1) from None
    if isinstance(error, SystemExit) and not error.code:
        link.fail("the script called sys.exit before the end of the with block", shown=False)
        return
    link.fail(f"{type(error).__name__}: {error}", shown=True)


def alone(offer: Offer) -> Membership:
    """A group of one: no coordinator, no journal."""
    me = WorkerId("w0")
    group = rounds.founded(offer.policy, era=1, roster=(me,))
    return Membership(Worker(me, group, groups.Alone(), offer.prepared(1), Nobody()), None, None, offer.carried)


def enrolled(offer: Offer) -> Membership:
    """The membership in the job that the environment names; a group of one if it names none."""
    job = current_job()
    if job is None:
        return alone(offer)
    link = _connected(job)
    try:
        return _entered(job, link, offer)
    except PliantError as error:
        _depart(link, error)
        raise


def turned_away(error: PliantError) -> None:
    """What the script asks for is refused before it has a place: in a job, say so there and end the process."""
    job = current_job()
    if job is not None:
        _depart(_connected(job), error)


def _connected(job: Job) -> Link:
    try:
        return Link.connect(job.address, job.token, job.worker, version("pliant"))
    except PliantError as error:
        if not isinstance(error, Stopped):
            print(f"pliant: {error}", file=sys.stderr)
        raise SystemExit(QUIET_EXIT if isinstance(error, RunEnded) else 1) from None


def _entered(job: Job, link: Link, offer: Offer) -> Membership:
    link.ready(signature(offer.model, offer.optimizer, offer.agreed))
    start = link.era()
    me = WorkerId(job.worker)
    roster = tuple(WorkerId(name) for name in start.roster)
    channel: groups.Alone | groups.Gloo = groups.Alone()
    carried = offer.carried
    if len(roster) > 1:
        channel = formed(link, start.attempt, roster.index(me), len(roster), link.local_address, offer)
        carried = taken_over(channel, offer)
    group = rounds.founded(offer.policy, start.era, roster)
    witness = Reporter(link, leader=roster.index(me) == 0)
    worker = Worker(me, group, channel, offer.prepared(len(roster)), witness, pace=job.pace)
    return Membership(worker, link, job.size, carried)


def formed(link: groups.KeyValue, attempt: int, place: int, members: int, address: str, offer: Offer) -> groups.Gloo:
    """The group of an attempt, on the device that the model lives on."""
    device = offer.optimizer.param_groups[0]["params"][0].device
    if device.type == "cuda":
        return cuda.Nccl(link, attempt=attempt, place=place, members=members, address=address, device=device)
    return groups.Gloo(link, attempt=attempt, place=place, members=members, address=address)


def taken_over(channel: groups.Gloo, offer: Offer) -> dict[str, Any]:
    """Everybody takes over the leader's state: tensors in place, objects by ``load_state_dict``, plain values."""
    states.broadcast_tensors(channel, [*offer.model.parameters(), *offer.model.buffers()])
    outer = {name: value for name, value in offer.carried.items() if name != "state"}
    users = offer.carried["state"]
    theirs = states.broadcast_state(channel, {"": _snapshot(outer), "state": _snapshot(users)})
    _load(outer, theirs[""], leader=channel.place == 0)
    _load(users, theirs["state"], leader=channel.place == 0)
    return {**outer, "state": users}


def _snapshot(objects: dict[str, Any]) -> dict[str, Any]:
    present = {name: value for name, value in objects.items() if value is not None}
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in present.items()}


def _load(objects: dict[str, Any], values: dict[str, Any], *, leader: bool) -> None:
    for name, value in values.items():
        if not hasattr(objects[name], "load_state_dict"):
            objects[name] = value
        elif not leader:
            objects[name].load_state_dict(value)


def signature(model: nn.Module, optimizer: Optimizer, agreed: dict[str, str]) -> Signature:
    """What must be equal on all workers: the trained parameters and the settings."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return Signature(
        version=version("pliant"),
        parameters=[
            (names.get(id(p), f"parameter {index}"), list(p.shape), str(p.dtype).removeprefix("torch."))
            for index, p in enumerate(trained)
        ],
        settings=agreed,
    )
