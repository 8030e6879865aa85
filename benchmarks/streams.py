"""How many bytes an update moves.

Question  How often are all parameters, or as many numbers as they have, read or written?
Holds     A *stream* is one read or one write of all of them. What torch's operators move is counted while they run:
          each tensor among the arguments is read, each one that is written is written, whatever a cache may spare;
          views move nothing. What a sweep moves follows from what it does: each memory is read once and written once.
Source    ours; docs/design/0025-sweeps.md.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pliant.tensors.passes import Act, SweptParameter

_OVERWRITES = ("aten::zero_", "aten::fill_", "aten::copy_", "aten::_foreach_zero_", "aten::_foreach_copy_")
"""They write to their first argument without reading it."""
_NOT_WRITTEN = {"aten::_fused_sgd_": "grads", "aten::_fused_adam_": "grads", "aten::_fused_adamw_": "grads"}
"""Named as written, but only where a gradient scaler is at work."""


def moved(parameters: Iterable[SweptParameter]) -> int:
    """Bytes that a sweep moves."""
    return sum(p.weights.nbytes * streams(p) for p in parameters)


def streams(p: SweptParameter) -> int:
    """Reads and writes of one parameter's memory in a sweep."""
    settles, looks, copies = (p.acts & act for act in (Act.SETTLE, Act.AHEAD, Act.COPY))
    weights, read, written = p.weights.data_ptr(), set[int](), set[int]()
    if settles:
        read |= _places(p.gradient, *p.state, p.weights if p.source is None else p.source)
        written |= _places(p.weights, *p.state)
    if looks:
        read |= _places(*p.state, p.own) | (set[int]() if settles else {weights})
        written |= _places(p.copy, p.weights if p.point is None else p.point)
    if copies:
        read |= set[int]() if settles else {weights}
        written |= _places(p.copy)
    if p.acts & Act.CLEAR:
        written |= _places(p.gradient)
    return len(read) + len(written)


def _places(*tensors: Tensor | None) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors if tensor is not None}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class MovedBytes(TorchDispatchMode):
    """Counts what torch's operators move inside a ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        if not any(writes) and any(each.alias_info is not None for each in schema.returns):
            # A view.
            return result
        named = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **(kwargs or {})}
        for number, (argument, writing) in enumerate(zip(schema.arguments, writes, strict=True)):
            size = sum(tensor.nbytes for tensor in _tensors(named.get(argument.name)))
            is_out = argument.is_out or (number == 0 and schema.name in _OVERWRITES)
            is_written = writing and _NOT_WRITTEN.get(schema.name) != argument.name
            self.bytes += size * ((not is_out) + is_written)
        if not any(writes):
            self.bytes += sum(tensor.nbytes for tensor in _tensors(result))
        return result
