"""Nested state as bytes and tensors, without pickle.

Question  How do the leader's weights, optimizer state and user's state reach the others?
Holds     A nested state (dicts, lists, tuples, numbers, strings, None, tensors) becomes a JSON skeleton and a list
          of tensors; any other object is refused by name. The receiver rebuilds the same nesting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from pliant.errors import UsageError
from pliant.tensors import allocation

_TENSOR, _TUPLE, _DICT, _FLOAT = "t", "u", "d", "f"


class Broadcaster(Protocol):
    """A group in which the leader (place 0) can send tensors to all."""

    place: int

    def broadcast(self, tensor: Tensor) -> None: ...


def flattened(state: Any, name: str = "state") -> tuple[bytes, list[Tensor]]:
    """The skeleton (JSON) and the tensors of a nested state."""
    tensors: list[Tensor] = []
    return msgspec.json.encode(_skeleton(state, tensors, name)), tensors


def _skeleton(value: Any, tensors: list[Tensor], name: str) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        # Keys may be numbers (optimizer state): a list of pairs preserves their type.
        return {_DICT: [[key, _skeleton(item, tensors, f"{name}.{key}")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_skeleton(item, tensors, f"{name}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [_skeleton(item, tensors, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has neither infinity nor nan.
        return {_FLOAT: repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"{name} is a {type(value).__name__}, which Pliant cannot carry to other workers: "
        "use tensors, numbers, strings, lists, tuples and dicts, or give the object a state_dict"
    )


def rebuilt(skeleton: bytes, tensors: list[Tensor]) -> Any:
    """The inverse of ``flattened``."""
    return _rebuilt(msgspec.json.decode(skeleton), iter(tensors))


def _rebuilt(value: Any, tensors: Any) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, tensors) for item in value]
    if isinstance(value, dict):
        if _TENSOR in value:
            return next(tensors)
        if _FLOAT in value:
            return float(value[_FLOAT])
        if _TUPLE in value:
            return tuple(_rebuilt(item, tensors) for item in value[_TUPLE])
        found = {key: _rebuilt(item, tensors) for key, item in value[_DICT]}
        if len(found) < len(value[_DICT]):
            raise ValueError("the same key twice in a dict: one of two values would be lost")
        return found
    return value


Described = tuple[torch.dtype, list[int]]
"""a tensor's type and shape"""


def described(skeleton: bytes) -> list[Described]:
    """The tensors that a skeleton names, in its order. Raises ``ValueError`` if it is malformed."""
    return list(_described(msgspec.json.decode(skeleton)))


def _described(value: Any) -> Iterator[Described]:
    if isinstance(value, list):
        for item in value:
            yield from _described(item)
    elif isinstance(value, dict):
        (kind, content) = next(iter(value.items()))
        if len(value) != 1 or kind not in (_TENSOR, _TUPLE, _DICT, _FLOAT):
            raise ValueError("unknown kind of value")
        if kind == _TENSOR:
            name, shape = content
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError("unknown kind of tensor")
            yield dtype, shape
        elif kind != _FLOAT:
            yield from _described(content if kind == _TUPLE else [item for _, item in content])


def size_of(tensors: Iterable[Described]) -> int:
    """Total size of these tensors in bytes."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors)


def blank_tensors(skeleton: bytes) -> list[Tensor]:
    """Uninitialised tensors of the shapes that the skeleton names, in its order."""
    return [allocation.fresh(shape, dtype) for dtype, shape in described(skeleton)]


@torch.no_grad()
def broadcast_tensors(group: Broadcaster, tensors: list[Tensor]) -> None:
    """Overwrite the tensors in place with the leader's values."""
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.dtype is not torch.bool:
            group.broadcast(tensor.data)
            continue
        wire = tensor.detach().to(torch.uint8 if tensor.dtype is torch.bool else tensor.dtype).contiguous().clone()
        group.broadcast(wire)
        tensor.copy_(wire)


def broadcast_state(group: Broadcaster, state: Any) -> Any:
    """The leader's nested state, on every worker."""
    if group.place == 0:
        skeleton, tensors = flattened(state)
        payload = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
        group.broadcast(torch.tensor([len(payload)]))
        group.broadcast(payload)
        # Receivers build their tensors on the host; ``load_state_dict`` moves them to the right device.
        broadcast_tensors(group, [tensor.detach().cpu().clone() for tensor in tensors])
        return state
    length = torch.zeros(1, dtype=torch.int64)
    group.broadcast(length)
    payload = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(payload)
    skeleton = bytes(payload.numpy())
    tensors = blank_tensors(skeleton)
    broadcast_tensors(group, tensors)
    return rebuilt(skeleton, tensors)
