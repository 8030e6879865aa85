"""Writing and reading checkpoints.

Question  Which moment of a run does a checkpoint hold, and from when on does it count?
Holds     A checkpoint holds the state between two micro-batches. Weights and optimizer state are copied in the
          background, into memory that was allocated there; the copy is complete before either is changed, and is
          written from there. There is one copy at a time. The coordinator is told only after all members have settled
          the exchange of the checkpoint, so that it is never of a void round. A failure to write or read is reported,
          and tried again.
Source    docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pliant.core.finished_calls import NONE, calls_of
from pliant.core.group_state import FinishedPhase, GroupState
from pliant.errors import CheckpointError, UsageError
from pliant.tensors.background_copy import BackgroundCopy, CopyMemory
from pliant.tensors.checkpoint import Manifest
from pliant.types import is_dict
from pliant.worker import snapshot
from pliant.worker.elastic.user_state import STATE, users_state_of
from pliant.worker.snapshot import GroupSnapshot
from pliant.worker.training import Training

_AGAIN = 0.2
"""After a failure the next attempt comes after this fraction of the usual time."""


class CheckpointStorage(Protocol):
    """Where checkpoints are kept (``tensors.checkpoint.CheckpointStore``)."""

    def names(self) -> list[str]: ...
    def write(self, manifest: Manifest, state: Any) -> Manifest: ...
    def read(self, name: str) -> tuple[Manifest, Any]: ...
    def remove(self, name: str) -> None: ...
    @property
    def finished(self) -> bool: ...
    def mark(self, *, finished: bool) -> None: ...


class Task(Protocol):
    """Work in the background."""

    over: bool
    failed: str | None


class Thread:
    """A task that runs in its own thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.over = False
        self.failed: str | None = None
        self._work = work
        threading.Thread(target=self._run, name="pliant-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.failed = str(error)
        self.over = True


class CheckpointWriter:
    """This worker's checkpoints: those it writes, and the one it starts from."""

    def __init__(
        self,
        store: CheckpointStorage,
        job: str,
        library: str,
        every_s: float,
        clock: Callable[[], float],
        begin: Callable[[Callable[[], object]], Task] = Thread,
    ) -> None:
        self._store = store
        self._job = job
        self._library = library
        self._every_s = every_s
        self._clock = clock
        self._begin = begin
        self._due_s = clock() + every_s
        """counted from the end of the last one"""
        self._at_once = False
        """the script changes weights between two updates: copy before it goes on"""
        self._room: tuple[CopyMemory, Task] | None = None
        """memory for the next copy, and the task that allocates it"""
        self._writing: tuple[Manifest | None, Task] | None = None
        """manifest None: the checkpoint being written is of no use any more"""
        self._written: Manifest | None = None
        """complete, but its round may have been applied by this worker only"""
        self._tidying: Task | None = None
        self._tidied: list[str] = []

    def names(self) -> list[str]:
        """All that are there, oldest first."""
        return self._store.names()

    # -- a run without a journal

    def begun(self) -> list[str]:
        """The checkpoints to go on from, newest first. Those of a run that has ended are removed."""
        names = self._store.names()
        if self._store.finished:
            for name in names:
                self._store.remove(name)
            self._store.mark(finished=False)
            return []
        return names[::-1]

    def end(self) -> None:
        """The script has ended: the next run must not go on from these checkpoints."""
        try:
            self._store.mark(finished=True)
        except CheckpointError as error:
            _say(f"{error}; the next run will go on from the last checkpoint of this one, if there is any")

    # -- writing

    @property
    def is_due(self) -> bool:
        return self._writing is None and self._clock() >= self._due_s

    def prepare(self, training: Training) -> bool:
        """Allocate memory for a copy in the background; whether that is done."""
        if self._room is None:
            room = snapshot.room_for_parameters(training)
            self._room = room, self._begin(room.make)
        return self._room[1].over

    def save(self, training: Training, carried: Mapping[str, Any], handed: GroupSnapshot) -> None:
        """Copy the state as of now and write it, both in the background.

        Buffers and the user's state, which the script can change before the next update, are copied at once.
        """
        group = handed.group
        name = f"{handed.records:010d}-{group.exchange:010d}-{group.era}"
        encoded = msgspec.json.encode(handed.packed(known=0)).decode()
        manifest = Manifest(self._job, name, self._library, handed.records, group.round, group.samples, encoded)
        users = carried["state"]
        small = [name for name in snapshot.everything(training) if not snapshot.is_parameter(name)]
        own = {key: value for key, value in carried.items() if key != "journal"}
        # An object of the script may show the model's weights; plain values do not.
        with training.plain(weights=any(hasattr(value, "state_dict") for value in users.values())):
            state = snapshot.snapshot(training, own, small)
            if users:
                state[STATE] = users_state_of(own)
        copying = BackgroundCopy(self._room[0] if self._room is not None and self._room[1].over else None)
        self._room = None
        state |= snapshot.copy_parameters(training, copying)
        if self._at_once:
            training.finish_copy()

        def write() -> None:
            copying.finish()
            copying.check()
            if copying.changed:
                self._at_once = True
                raise CheckpointError(f"checkpoint {name}: the script has changed weights while they were copied")
            self._store.write(manifest, state)

        self._written = None
        self._writing = manifest, self._begin(write)

    def look(self, certain: int, tell: Callable[[Manifest], None]) -> None:
        """Between micro-batches: ``tell`` of a checkpoint once it is written and all have settled its exchange.

        ``certain``: how many journal records are of exchanges that all members have settled.
        """
        if self._room is not None and self._room[1].failed is not None:
            _say(f"no memory for a checkpoint ({self._room[1].failed}); training goes on, and it is tried again")
            self._room, self._due_s = None, self._clock() + self._every_s * _AGAIN
        if self._writing is not None and self._writing[1].over:
            (manifest, task), self._writing = self._writing, None
            self._due_s = self._clock() + self._every_s * (1.0 if task.failed is None else _AGAIN)
            if task.failed is not None:
                _say(f"{task.failed}; training goes on, and it is tried again")
            elif manifest is not None:
                self._written = manifest
        if self._written is not None and certain >= self._written.records:
            manifest, self._written = self._written, None
            tell(manifest)

    def forget(self) -> None:
        """This worker does not hold the state any more: its last checkpoint may be of a void round."""
        self._written = self._room = None
        if self._writing is not None:
            self._writing = None, self._writing[1]

    def tidy(self, named: Sequence[str]) -> None:
        """Remove the checkpoints that are older than the newest in ``named`` and not among those."""
        if not named or named == self._tidied or (self._tidying is not None and not self._tidying.over):
            return
        self._tidied = list(named)

        def remove() -> None:
            for name in self._store.names():
                if name < named[0] and name not in named:
                    self._store.remove(name)

        self._tidying = self._begin(remove)

    # -- going on from one

    def restored(
        self, names: Sequence[str], training: Training, carried: Mapping[str, Any], group: GroupState
    ) -> Restored:
        """Read the first of ``names`` that is whole, and install its state; ``group``: what the script asks for."""
        problems: list[str] = []
        for name in names:
            try:
                manifest, state = self._store.read(name)
                handed = _handed(manifest)
                _compare(manifest, handed, state, training, group)
                _compare_carried(manifest, state[snapshot.META], carried)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                _say(f"{problem}; going on from the one before it")
            snapshot.install(training, carried, state)
            return Restored(manifest, handed, state.get(STATE))
        raise CheckpointError("; ".join(problems) or "there is no checkpoint to go on from")


class NoCheckpoints:
    """The script asks for none."""

    is_due = False

    def names(self) -> list[str]:
        return []

    def prepare(self, training: Training) -> bool:
        return False

    def save(self, training: Training, carried: Mapping[str, Any], handed: GroupSnapshot) -> None: ...

    def look(self, certain: int, tell: Callable[[Manifest], None]) -> None: ...

    def forget(self) -> None: ...

    def tidy(self, named: Sequence[str]) -> None: ...

    def restored(
        self, names: Sequence[str], training: Training, carried: Mapping[str, Any], group: GroupState
    ) -> Restored:
        raise UsageError("the run goes on from a checkpoint, but this script calls join without checkpoint=…")

    def end(self) -> None: ...


class Restored:
    """What a checkpoint held besides the tensors, which are installed already."""

    def __init__(self, manifest: Manifest, handed: GroupSnapshot, users_state: Mapping[str, Any] | None) -> None:
        self.manifest = manifest
        self.handed = handed
        self.users_state = users_state
        """to be installed when the script reaches the call that it was taken in"""


def _handed(manifest: Manifest) -> GroupSnapshot:
    try:
        found: dict[str, Any] = json.loads(manifest.group)
        past, calls = found["group"].get("past"), NONE
        if isinstance(past, list):
            # Written when the calls were a list in the group.
            del found["group"]["past"]
            calls = calls_of(msgspec.convert(past, list[FinishedPhase]))
            found |= {"known": len(calls)}
        return msgspec.json.decode(json.dumps(found), type=GroupSnapshot).unpacked(calls)
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {manifest.name} is of another version of Pliant: {error}") from None


def _compare(manifest: Manifest, handed: GroupSnapshot, state: Any, training: Training, group: GroupState) -> None:
    """Raise if the checkpoint is not of this script."""
    # The order of the samples is the checkpoint's: half of an epoch may lie before it.
    asked = msgspec.structs.replace(group.policy, order=handed.group.policy.order)
    if handed.group.policy != asked:
        raise CheckpointError(
            f"checkpoint {manifest.name} is of a run with other settings of join ({handed.group.policy}); "
            "use those, or another directory for this run"
        )
    wanted = set(snapshot.everything(training, live=handed.live))
    if not is_dict(state) or wanted != set(state) - {STATE}:
        raise CheckpointError(f"checkpoint {manifest.name} is of another model: it has other parameters or buffers")
    for index, p in enumerate(training.parameters):
        value = state[f"p{index}"]["value"]
        if value.shape != p.shape or value.dtype != p.dtype:
            raise CheckpointError(f"checkpoint {manifest.name} is of another model: parameter {index} differs from it")


def _compare_carried(manifest: Manifest, meta: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
    """Raise if only one of script and checkpoint has a scheduler, or a scaler."""
    for name in ("scheduler", "scaler"):
        there, here = bool(meta["outer"].get(name)), carried.get(name) is not None
        if there != here:
            raise CheckpointError(
                f"checkpoint {manifest.name} is of a run {'with' if there else 'without'} {name}=…: "
                f"call join {'with' if there else 'without'} it, or use another directory for this run"
            )


def _say(text: str) -> None:
    print(f"pliant: {text}", file=sys.stderr, flush=True)
