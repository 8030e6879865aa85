"""The state of a worker: taken, put into bytes, and installed.

Question  What is the state of a group, and how does it get out of one worker and into another, or into a checkpoint?
Holds     The replicated state is the same on every member that has settled the same exchange: each would write the same
          bytes. Entries have one fixed form, so that they can be gathered like tickets. Tensors that may change are
          copied, and are installed with the strides of the parameter. The user's own state: ``elastic.user_state``.
Source    docs/design/0007-elastic.md, docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.optim import Optimizer

from pliant.core.finished_calls import NONE, FinishedCall, FinishedCalls
from pliant.core.group_state import GroupState
from pliant.core.regrouping import Entry
from pliant.core.tickets import NOWHERE, point
from pliant.tensors import allocation
from pliant.tensors.background_copy import BackgroundCopy, CopyMemory
from pliant.types import is_dict, is_list_or_tuple
from pliant.worker.training import Training

META = "meta"
"""the name of what is neither a tensor of the model nor of the optimizer"""

_ENTRY = struct.Struct("<qqqqqqqqqBqqqB")
DEPTH = 2
"""a loop over batches, and an evaluate inside it"""


# -- the replicated state


class GroupSnapshot(msgspec.Struct, frozen=True):
    """The replicated state, as the donor sends it to all members at the start of an era."""

    group: GroupState
    records: int
    live: int
    """the bitmap of buffers that are merged"""
    undrained: bool
    """the exchange that makes the buffers equal is still to come"""
    known: int = 0
    """how many calls of the script all recipients know already"""
    calls: list[FinishedCall] = []
    """the calls after those; ``group`` holds its calls only while the snapshot is not packed"""

    def packed(self, known: int) -> GroupSnapshot:
        """As it is sent to workers that know ``known`` calls."""
        first = min(known, len(self.group.past))
        return replace(self, group=replace(self.group, past=NONE), known=first, calls=self.group.past.since(first))

    def unpacked(self, own: FinishedCalls) -> GroupSnapshot:
        """As it was before packing, on a worker that knows the calls ``own``."""
        assert len(own) >= self.known, "the donor was told how many"
        past = own.up_to(self.known).joined(self.calls)
        return replace(self, group=replace(self.group, past=past), known=0, calls=[])


_KNOWN = struct.Struct("<q")


def packed_count(past: FinishedCalls) -> bytes:
    """How many calls a worker knows completely: something may still be added to the last one."""
    return _KNOWN.pack(max(0, len(past) - 1))


def unpacked_count(data: bytes) -> int:
    return _KNOWN.unpack(data)[0]


_decoder = msgspec.msgpack.Decoder(tuple[GroupSnapshot, bytes])


def encoded(handed: GroupSnapshot, known: int) -> bytes:
    """The snapshot as bytes, for workers that know ``known`` calls."""
    # msgpack has no numbers above 64 bits, and a model may have more buffers than that.
    live = handed.live.to_bytes((handed.live.bit_length() + 7) // 8, "little")
    return msgspec.msgpack.encode((replace(handed.packed(known), live=0), live))


def decoded(payload: bytes, own: FinishedCalls) -> GroupSnapshot:
    """The inverse of ``encoded``, on a worker that knows the calls ``own``."""
    handed, live = _decoder.decode(payload)
    return replace(handed, live=int.from_bytes(live, "little")).unpacked(own)


def packed_entry(entry: Entry) -> bytes:
    dropped, kept = ((*values, *(0,) * (DEPTH - len(values))) for values in (entry.dropped[:DEPTH], entry.kept[:DEPTH]))
    points = (*entry.points, *(NOWHERE,) * (DEPTH - len(entry.points)))[:DEPTH]
    return _ENTRY.pack(
        entry.active, len(entry.kept), *dropped, *kept, *(number for point in points for number in point.packed)
    )


def unpacked_entry(data: bytes) -> Entry:
    active, depth, *counts = _ENTRY.unpack(data)
    points = [point(*counts[at : at + 4]) for at in range(2 * DEPTH, len(counts), 4)]
    dropped, kept = counts[:DEPTH], counts[DEPTH : 2 * DEPTH]
    return Entry(bool(active), tuple(dropped[:depth]), tuple(kept[:depth]), tuple(points[:depth]))


# -- model, optimizer and schedule


def everything(training: Training, live: int | None = None) -> list[str]:
    """The names of all parts of the state but the user's, in the order in which a newcomer asks for them.

    Buffers that are merged (``live``, if not those of ``training``) are small and come with the first part; the others
    hardly ever change.
    """
    merged = training.buffers.live if live is None else live
    unmerged = [index for index in range(len(training.buffers)) if not merged >> index & 1]
    names = [f"c{i}" for i in range(len(training.constants()))] + [f"b{i}" for i in unmerged]
    return [META, *names, *(f"p{i}" for i in range(len(training.parameters)))]


@torch.no_grad()
def snapshot(training: Training, carried: Mapping[str, Any], want: Sequence[str]) -> dict[str, Any]:
    """Parts of the state (``everything``), as of now: copies, except of what never changes.

    The model shows the plain weights and the group's buffers.
    """
    parts: dict[str, Any] = {}
    for name in want:
        if name == META:
            parts[name] = _meta(training, carried)
        elif name.startswith("b"):
            parts[name] = training.buffers.value(int(name[1:]))
        elif name.startswith("c"):
            parts[name] = allocation.lent(training.constants()[int(name[1:])])
        else:
            p = training.parameters[int(name[1:])]
            state = training.optimizer.state.get(p, {})
            parts[name] = {"value": allocation.copied(p), "state": copied(dict(state))}
    return parts


@torch.no_grad()
def copy_parameters(training: Training, copying: BackgroundCopy) -> dict[str, Any]:
    """The parts of all parameters, in the memory that holds them once ``copying`` is complete."""
    parts: dict[str, Any] = {}
    for index, p in enumerate(training.parameters):
        state = training.optimizer.state.get(p, {})
        value = copying.of_tensor(training.plain_weights(index))
        parts[f"p{index}"] = {"value": value, "state": copying.of(dict(state))}
    training.copying = copying
    return parts


def room_for_parameters(training: Training) -> CopyMemory:
    """Memory for a copy of all parameters and their optimizer state."""
    return CopyMemory(training.parameters, [dict(training.optimizer.state.get(p, {})) for p in training.parameters])


def _meta(training: Training, carried: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trained": copied(training.trained.state_dict()),
        "buffers": {i: training.buffers.value(i) for i in range(len(training.buffers)) if training.buffers.is_live(i)},
        "epochs": training.epochs_ended,
        "scale": training.scale_state(),
        "outer": copied(stated({name: carried.get(name) for name in ("scheduler", "scaler", "journal")})),
    }


def stated(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Objects by their ``state_dict``, plain values as they are."""
    present = {name: value for name, value in objects.items() if value is not None}
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in present.items()}


def copied(value: Any) -> Any:
    """A copy in memory of its own, tensors in containers included."""
    if isinstance(value, Tensor):
        return allocation.copied(value)
    if is_dict(value):
        return {key: copied(item) for key, item in value.items()}
    if is_list_or_tuple(value):
        return type(value)(copied(item) for item in value)
    return value


@torch.no_grad()
def install_meta(training: Training, carried: Mapping[str, Any], meta: Mapping[str, Any], *, merged: bool) -> None:
    """Install hyper-parameters, schedule, scaler, buffers, and the journal lines that are not on disk.

    The set of trained parameters is installed when the script is where the group is, or with the next update.
    """
    for name, value in meta["outer"].items():
        if carried.get(name) is not None:
            carried[name].load_state_dict(value)
    training.trained.take_over(meta["trained"], later=True)
    training.schedule_guard.forget()
    for index in meta["buffers"]:
        training.buffers.grow(1 << index)
    training.buffers.adopt(meta["buffers"], merged=merged)
    ended, training.epochs_ended = training.epochs_ended, meta["epochs"]
    for epoch in range(meta["epochs"], ended):
        # It has ended here since then; the schedule that was just loaded has not counted it.
        training.end_epoch(epoch)
    training.take_scale(meta["scale"])


@torch.no_grad()
def install(training: Training, carried: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Install everything but the user's state."""
    install_meta(training, carried, parts[META], merged=False)
    training.buffers.adopt({int(name[1:]): parts[name] for name in parts if _is(name, "b")}, merged=False)
    for index, constant in enumerate(training.constants()):
        constant.copy_(parts[f"c{index}"])
    for index in range(len(training.parameters)):
        install_parameter(training, index, parts[f"p{index}"])


def is_parameter(name: str) -> bool:
    """Whether ``name`` is that of a parameter with its optimizer state."""
    return _is(name, "p")


def _is(name: str, kind: str) -> bool:
    return name[0] == kind and name[1:].isdecimal()


@torch.no_grad()
def install_parameter(training: Training, index: int, part: Mapping[str, Any]) -> None:
    """Install one parameter and its optimizer state."""
    training.finish_copy()
    p = training.parameters[index]
    p.copy_(part["value"])
    # Reading a parameter's state would create an empty one: if the donor has none, there must be none here.
    training.optimizer.state.pop(p, None)
    for name, value in part["state"].items():
        # As torch's own load_state_dict: a step counter stays where it is, the rest goes with the parameter.
        moves = isinstance(value, Tensor) and value.shape == p.shape
        training.optimizer.state[p][name] = laid_out_like(p, value) if moves else value


def laid_out_like(p: Tensor, value: Tensor) -> Tensor:
    """The same numbers on the parameter's device, with its strides: fused optimizers read both in memory order."""
    if value.stride() == p.stride():
        return value.to(p.device)
    return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)


def install_state(objects: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Install the user's own objects and values."""
    for name, value in values.items():
        if hasattr(objects.get(name), "load_state_dict"):
            objects[name].load_state_dict(value)
            if isinstance(objects[name], Optimizer):
                _lay_out_like_parameters(objects[name])
        else:
            objects[name] = value


@torch.no_grad()
def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Give state tensors the strides of their parameters: those from another worker are contiguous."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                state[name] = laid_out_like(p, value)
