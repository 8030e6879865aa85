"""The outputs of single samples, gathered from all workers.

Question  How does the result of a user's function for a micro-batch become one value per sample, on another worker?
Holds     A tensor is split by its first dimension, a list has one entry per sample, a dict or tuple of these is a dict
          or tuple per sample; shapes may differ from sample to sample. The bytes hold types, shapes and raw numbers,
          and no pickle. Decoded tensors are on the host.
Source    ours; docs/design/0017-evaluate.md. ``tensors.serialize`` has the skeleton of nested values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from pliant.core.ledger import MicroBatch, samples_of
from pliant.errors import UsageError
from pliant.tensors import serialize
from pliant.tensors.untyped import from_numpy
from pliant.types import is_dict, is_list, is_mapping, is_tuple

_REMEDY = (
    "with gather=True return one output per sample: a tensor whose first dimension is the samples, a list with an "
    "entry for each, or a dict or tuple of those"
)


class _Packed(msgspec.Struct, array_like=True):
    skeleton: bytes
    tensors: list[bytes]


_decoder = msgspec.msgpack.Decoder(_Packed)


def encoded(answer: Any, samples: int) -> bytes:
    """The outputs of a micro-batch as bytes. Raises ``UsageError`` unless there is one for each sample."""
    answer = _plain(answer)
    _check(answer, samples, "evaluate's measure returned")
    skeleton, tensors = serialize.flattened(answer, "measure(batch)")
    return msgspec.msgpack.encode(_Packed(skeleton, [_raw(tensor) for tensor in tensors]))


def decoded(data: bytes, samples: int) -> list[Any]:
    """The inverse of ``encoded``: one output per sample."""
    packed = _decoder.decode(data)
    described = serialize.described(packed.skeleton)
    tensors = [_tensor(raw, *each) for raw, each in zip(packed.tensors, described, strict=True)]
    return _split(serialize.rebuilt(packed.skeleton, tensors), samples)


def in_order(found: Iterable[tuple[MicroBatch, bytes]], length: int) -> list[Any]:
    """The outputs of all samples of a dataset, by index. Raises if one is missing or there twice."""
    outputs: list[Any] = [_NONE] * length
    for micro_batch, data in found:
        positions = [position for start, stop in micro_batch for position in range(start, stop)]
        for position, output in zip(positions, decoded(data, samples_of(micro_batch)), strict=True):
            if outputs[position] is not _NONE:
                raise RuntimeError(f"the output of sample {position} was gathered twice")
            outputs[position] = output
    if any(output is _NONE for output in outputs):
        raise RuntimeError("the output of a sample was not gathered")
    return outputs


_NONE = object()
"""stands for a missing output"""


def _plain(value: Any) -> Any:
    """Tensors on the host in place of arrays, Python's own numbers in place of NumPy's."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UsageError(f"evaluate's measure returned a tensor that is not dense ({value.layout}): {_REMEDY}")
        return value.detach().cpu().resolve_conj().resolve_neg()
    if _is_array(value):
        return from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, np.generic):
        return cast(Any, value).item()
    if is_mapping(value):
        return {key: _plain(item) for key, item in value.items()}
    if is_tuple(value):
        return tuple(_plain(item) for item in value)
    if is_list(value):
        return [_plain(item) for item in value]
    return value


def _is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    return isinstance(value, np.ndarray)


def _check(answer: Any, samples: int, who: str) -> None:
    """Raise unless there is one output per sample."""
    if is_dict(answer) or is_tuple(answer):
        if not answer:
            raise UsageError(f"{who} an empty {type(answer).__name__}: {_REMEDY}")
        for item in answer.values() if is_dict(answer) else answer:
            _check(item, samples, who)
        return
    if isinstance(answer, Tensor):
        entries = answer.shape[0] if answer.dim() else None
    else:
        entries = len(answer) if is_list(answer) else None
    if entries is None:
        raise UsageError(f"{who} a {type(answer).__name__} without a dimension of samples: {_REMEDY}")
    if entries != samples:
        raise UsageError(f"{who} {entries} outputs for a micro-batch of {samples} samples: {_REMEDY}")


def _split(answer: Any, samples: int) -> list[Any]:
    if is_dict(answer):
        columns = {key: _split(item, samples) for key, item in answer.items()}
        return [{key: column[place] for key, column in columns.items()} for place in range(samples)]
    if is_tuple(answer):
        return list(zip(*(_split(item, samples) for item in answer), strict=True))
    outputs = list(answer)
    if len(outputs) != samples:
        raise ValueError(f"{len(outputs)} outputs of {samples} samples")
    return outputs


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _tensor(raw: bytes, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if len(raw) != serialize.size_of([(dtype, shape)]):
        raise ValueError(f"{len(raw)} bytes are no {dtype} tensor of shape {shape}")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
