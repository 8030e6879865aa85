"""One pass over many tensors: by the compiled loops where they can, else piece by piece with torch's operators.

Question  How is a step of SGD or Adam made to all parameters with each of them read and written once?
Holds     Both ways give the same bits. The compiled loops are used only for an element type for which a small example
          has just shown that on this machine (``_kernel``). All that is not a plain tensor of float32, float64 or
          bfloat16 in main memory, with the same strides as its neighbours and no gaps, goes the other way.
Source    torch/optim/sgd.py, torch/optim/adam.py; docs/design/0025-sweeps.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from pliant.tensors.layout import is_dense

try:
    from pliant.tensors import _sweep
except ImportError:
    _sweep = None

# Elements handled at a time: half a megabyte stays in the cache between torch's operators.
_PIECE = 1 << 17

_SGD, _ADAM, _PARK = range(3)
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
_NUMBERS = 11
"""in a row of the kernel's table of numbers"""
_NONE, _PLAIN, _NESTEROV = range(3)
_COUPLED, _DECOUPLED = 1, 2


class Act:
    """What is done to a parameter, in this order; bits of a whole number, as the kernel reads it."""

    NONE = 0
    SETTLE = 1
    """the update"""
    CLEAR = 4
    """its gradient becomes zero"""
    AHEAD = 2
    """its weights go to the copy, and one step is made without a change of the state"""
    COPY = 8
    """its weights go to the copy"""


class SgdNumbers(NamedTuple):
    """The numbers in a step of SGD, in the order of the kernel's table."""

    factor: float
    """of the gradient, negative to maximize"""
    decay: float
    momentum: float
    incoming: float
    """share of the gradient in the buffer"""
    rate: float
    """negative"""
    nesterov: float
    """momentum once more, where torch takes it as the factor of an addition"""
    kind: int


class AdamNumbers(NamedTuple):
    """The numbers in a step of Adam or AdamW, in the order of the kernel's table."""

    factor: float
    """of the gradient, negative to maximize"""
    shrink: float
    """of the weights, by decoupled decay"""
    decay: float
    weight: float
    """of the gradient in the first moment"""
    beta2: float
    incoming: float
    """of the squared gradient in the second moment"""
    correction: float
    eps: float
    rate: float
    """negative, with the correction of the first moment"""
    kind: int
    amsgrad: bool


Numbers = SgdNumbers | AdamNumbers


def sgd_numbers(group: Mapping[str, Any], factor: float) -> SgdNumbers:
    """For a parameter group's settings, computed as ``torch.optim.SGD`` does; ``factor``: of the gradient."""
    momentum = group["momentum"]
    return SgdNumbers(
        factor=-factor if group["maximize"] else factor,
        decay=float(group["weight_decay"]),
        momentum=float(momentum),
        incoming=float(1 - group["dampening"]),
        rate=float(-group["lr"]),
        nesterov=float(momentum),
        kind=_NONE if momentum == 0 else _NESTEROV if group["nesterov"] else _PLAIN,
    )


def adam_numbers(group: Mapping[str, Any], factor: float, step: float, *, decoupled: bool) -> AdamNumbers:
    """For a parameter group's settings and the ``step`` to be made, computed as ``torch.optim.Adam`` does."""
    rate, decay = group["lr"], group["weight_decay"]
    beta1, beta2 = group["betas"]
    return AdamNumbers(
        factor=-factor if group["maximize"] else factor,
        shrink=float(1 - rate * decay),
        decay=float(decay),
        weight=float(1 - beta1),
        beta2=float(beta2),
        incoming=float(1 - beta2),
        correction=float((1 - beta2**step) ** 0.5),
        eps=float(group["eps"]),
        rate=float(-(rate / (1 - beta1**step))),
        kind=_NONE if decay == 0 else _DECOUPLED if decoupled else _COUPLED,
        amsgrad=bool(group["amsgrad"]),
    )


@dataclass(slots=True)
class SweptParameter:
    """A parameter, and what is done to it in one pass. Tensors may be the same memory."""

    weights: Tensor
    """the plain weights after the update"""
    gradient: Tensor | None = None
    """what is settled"""
    state: tuple[Tensor, ...] = ()
    """the momentum; or first moment, second moment, its maximum. Empty in a look-ahead step: nothing is kept yet"""
    copy: Tensor | None = None
    own: Tensor | None = None
    """the gradient of the look-ahead step; None: zero"""
    acts: int = Act.NONE
    settle: Numbers | None = None
    ahead: Numbers | None = None
    counter: Tensor | None = None
    """of the updates; moved with this one"""
    source: Tensor | None = None
    """the weights that the update leads from; None: ``weights``"""
    point: Tensor | None = None
    """what the look-ahead step leads to; None: ``weights``"""

    def tensors(self) -> list[Tensor]:
        """All of them."""
        some = (self.weights, self.gradient, *self.state, self.copy, self.own, self.source, self.point)
        return [tensor for tensor in some if tensor is not None]

    def written(self) -> list[Tensor]:
        """Those that are not merely Pliant's own."""
        found = [] if self.copy is None else [self.copy]
        if self.acts & Act.SETTLE:
            found += [self.weights, *self.state]
        if self.acts & Act.AHEAD:
            found.append(self.weights if self.point is None else self.point)
        return found


@torch.no_grad()
def run(parameters: Collection[SweptParameter]) -> None:
    """Do to each parameter what is to be done."""
    counters = [each.counter for each in parameters if each.counter is not None]
    if counters:
        torch._foreach_add_(counters, 1)
    swept: dict[tuple[int, torch.dtype, bool], list[SweptParameter]] = {}
    for parameter in parameters:
        numbers = parameter.settle or parameter.ahead
        method = _ADAM if isinstance(numbers, AdamNumbers) else _SGD
        fused = _kernel(method, parameter.weights.dtype) if _is_plain(parameter.tensors()) else None
        if fused is None:
            for piece in _pieces(parameter):
                _act(piece)
        else:
            swept.setdefault((method, parameter.weights.dtype, fused), []).append(parameter)
    for (method, dtype, fused), each in swept.items():
        _sweep_all(each, method, dtype, fused=fused)


@torch.no_grad()
def park(gradients: Sequence[Tensor], copies: Sequence[Tensor] | None = None, *, factor: float = 1.0) -> float:
    """Multiply gradients in place and copy them; their squared norm afterwards, not finite if any element is not."""
    plain: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    total = 0.0
    # A norm alone is what torch is quicker at.
    kernel = _sweep if factor != 1.0 or copies is not None else None
    for index, gradient in enumerate(gradients):
        copy = gradient if copies is None else copies[index]
        if kernel is not None and gradient.dtype in _TYPES and _is_plain([gradient, copy]):
            both = plain.setdefault(gradient.dtype, ([], []))
            both[0].append(gradient)
            both[1].append(copy)
            continue
        if factor != 1.0:
            gradient.mul_(factor)
        if copies is not None:
            copy.copy_(gradient)
        total += float(torch.linalg.vector_norm(gradient)) ** 2
    for dtype, (each, kept) in plain.items():
        assert kernel is not None
        table = array("q")
        for gradient, copy in zip(each, kept, strict=True):
            into = 0 if copies is None else copy.data_ptr()
            table.extend((gradient.numel(), 0, 0, 0, 0, gradient.data_ptr(), 0, 0, 0, into, 0, 0, 0))
        numbers = array("d", bytes(8 * _NUMBERS))
        total += kernel.sweep(_PARK, _TYPES[dtype], False, torch.get_num_threads(), factor, table, numbers)
    return total


# -- by the kernel


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether element i in memory is the same one in all of them, with nothing else between."""
    first = tensors[0]
    count, dtype, contiguous = first.numel(), first.dtype, first.is_contiguous()
    for t in tensors:
        if type(t) not in _KNOWN or not t.is_cpu or t.layout is not torch.strided:
            return False
        if t.dtype is not dtype or t.numel() != count:
            return False
        if not (t.is_contiguous() if contiguous else t.stride() == first.stride()):
            return False
    return contiguous or is_dense(first)


_KNOWN = (Tensor, Parameter)
"""Other classes may not have their elements in memory."""


def _sweep_all(parameters: Sequence[SweptParameter], method: int, dtype: torch.dtype, *, fused: bool) -> None:
    assert _sweep is not None
    table, numbers = array("q"), array("d")
    rows: dict[int, int] = {}
    written: list[Tensor] = []
    for each in parameters:
        for row in (each.settle, each.ahead):
            if id(row) not in rows:
                rows[id(row)] = len(rows)
                numbers.extend(_padded(row, dtype))
        state = [*map(Tensor.data_ptr, each.state), 0, 0, 0][:3]
        weights = each.weights.data_ptr()
        table.extend((
            each.weights.numel(), each.acts, weights,
            weights if each.source is None else each.source.data_ptr(),
            weights if each.point is None else each.point.data_ptr(),
            _address(each.gradient), *state, _address(each.copy), _address(each.own),
            rows[id(each.settle)], rows[id(each.ahead)],
        ))  # fmt: skip
        written += each.written()
    _sweep.sweep(method, _TYPES[dtype], fused, torch.get_num_threads(), 1.0, table, numbers)
    _note_changes(written)


def _note_changes(tensors: list[Tensor]) -> None:
    """Tell autograd that these were changed in place."""
    try:
        increment_version(tensors)
    except TypeError:
        # Before torch 2.7 it takes one at a time.
        for tensor in tensors:
            increment_version(tensor)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _padded(row: Numbers | None, dtype: torch.dtype) -> list[float]:
    """The numbers as the kernel reads them."""
    if row is not None and dtype is torch.bfloat16:
        # torch rounds what is added, or multiplies what is added, and leaves the other numbers as they are.
        added = _ADDED[type(row)]
        row = row._replace(**{name: _rounded(getattr(row, name)) for name in added})
    numbers = [] if row is None else [float(number) for number in row]
    return [*numbers, *[0.0] * (_NUMBERS - len(numbers))]


_ADDED = {SgdNumbers: ("decay", "incoming", "rate", "nesterov"), AdamNumbers: ("decay", "eps")}


def _rounded(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32).to(torch.bfloat16))


@cache
def _kernel(method: int, dtype: torch.dtype) -> bool | None:
    """Whether the compiled loops add products unrounded, as torch's operators do here; None: their bits are others."""
    if _sweep is not None and dtype in _TYPES:
        # Numbers of 16 bits are computed with as float32, and rounded so much that a small example says little.
        for fused in (True, False) if dtype is not torch.bfloat16 else (_kernel(method, torch.float32),):
            if fused is not None and _sweep.variant(fused) is not None and _agrees(method, dtype, fused=fused):
                return fused
    return None


# Not a multiple of any vector's width, and one below it.
_EXAMPLES = (1013, 5)


def _agrees(method: int, dtype: torch.dtype, *, fused: bool) -> bool:
    """Whether the compiled loops do to examples what torch's operators do."""
    for count in _EXAMPLES:
        for numbers in _SGD_EXAMPLES if method == _SGD else _ADAM_EXAMPLES:
            by_kernel, by_torch = (_example(method, dtype, count, numbers) for _ in range(2))
            _sweep_all([by_kernel], method, dtype, fused=fused)
            _act(by_torch)
            pairs = zip(by_kernel.tensors(), by_torch.tensors(), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                return False
    return True


_SGD_EXAMPLES = (
    SgdNumbers(0.3, 0.01, 0.9, 0.8, -0.1, 0.9, _PLAIN),
    SgdNumbers(-1.7, 0.0, 0.9, 1.0, -0.03, 0.9, _NESTEROV),
)
_ADAM_EXAMPLES = (
    AdamNumbers(0.3, 1.0, 0.01, 0.1, 0.999, 0.001, 0.3, 1e-8, -0.01, _COUPLED, True),
    AdamNumbers(-1.7, 0.99, 0.0, 0.7, 0.95, 0.05, 0.9, 1e-3, -0.02, _DECOUPLED, False),
)


def _example(method: int, dtype: torch.dtype, count: int, numbers: Numbers) -> SweptParameter:
    weights, gradient, first, second, largest, own = waves(6, count, dtype)
    second.square_()
    largest.square_()
    state = (first,) if method == _SGD else (first, second, largest) if numbers[-1] else (first, second)
    return SweptParameter(
        weights, gradient, state, torch.zeros_like(own), own, Act.SETTLE | Act.AHEAD, numbers, numbers
    )


def waves(rows: int, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Numbers for an example; the script's own random numbers are not touched."""
    steps = torch.arange(1, count + 1, dtype=torch.float64) ** 1.5
    return tuple(torch.sin(row * steps).to(dtype) for row in range(1, rows + 1))


@torch.no_grad()
def roots_agree(dtype: torch.dtype) -> bool:
    """Whether torch's square root is the nearest number, as in a sweep."""
    (numbers,) = waves(1, 2000, dtype)
    return torch.equal(_root(numbers.abs()), numbers.abs().sqrt())


# -- by torch's operators


def _pieces(p: SweptParameter) -> Iterator[SweptParameter]:
    """The parameter in pieces that fit into the cache, where it can be divided."""
    tensors = p.tensors()
    on_host = p.weights.device.type == "cpu"
    if not on_host or p.weights.numel() <= _PIECE or not all(t.is_contiguous() for t in tensors):
        yield p
        return
    for start in range(0, p.weights.numel(), _PIECE):
        part = slice(start, start + _PIECE)

        def cut(tensor: Tensor, part: slice = part) -> Tensor:
            return tensor.detach().view(-1)[part]

        def maybe(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else cut(tensor)

        yield SweptParameter(
            cut(p.weights),
            maybe(p.gradient),
            tuple(map(cut, p.state)),
            maybe(p.copy),
            maybe(p.own),
            p.acts,
            p.settle,
            p.ahead,
            source=maybe(p.source),
            point=maybe(p.point),
        )


def _act(p: SweptParameter) -> None:
    if p.acts & Act.SETTLE:
        assert p.gradient is not None and p.settle is not None
        if p.source is not None:
            p.weights.copy_(p.source)
        _step(p.weights, p.gradient * p.settle.factor, p.state, p.settle, keeps=True)
    if p.acts & Act.CLEAR:
        assert p.gradient is not None
        p.gradient.zero_()
    if p.acts & Act.AHEAD:
        assert p.ahead is not None and p.copy is not None
        own = torch.zeros_like(p.weights) if p.own is None else p.own * p.ahead.factor
        point = p.weights if p.point is None else p.point
        p.copy.copy_(p.weights)
        point.copy_(p.weights)
        _step(point, own, p.state, p.ahead, keeps=False)
    elif p.acts & Act.COPY:
        assert p.copy is not None
        p.copy.copy_(p.weights)


def _step(weights: Tensor, gradient: Tensor, state: tuple[Tensor, ...], numbers: Numbers, *, keeps: bool) -> None:
    """One step of an optimizer, with the operators that it uses; ``keeps``: its state moves, too."""
    kept = [tensor.detach() for tensor in state]
    if isinstance(numbers, SgdNumbers):
        _sgd(weights.detach(), gradient, kept, numbers, keeps=keeps)
        return
    zeroes = [torch.zeros_like(weights) for _ in range(0 if kept else 2 + numbers.amsgrad)]
    _adam(weights.detach(), gradient, kept or zeroes, numbers, keeps=keeps)


def _sgd(weights: Tensor, gradient: Tensor, state: list[Tensor], n: SgdNumbers, *, keeps: bool) -> None:
    if n.decay:
        _add(gradient, weights, n.decay)
    if n.kind != _NONE:
        # Without a buffer the gradient itself becomes one.
        buffer = gradient
        if state:
            faded = state[0].mul_(n.momentum) if keeps else state[0] * n.momentum
            buffer = _add(faded, gradient, n.incoming)
        gradient = _add(gradient, buffer, n.nesterov) if n.kind == _NESTEROV else buffer
    _add(weights, gradient, n.rate)


def _adam(weights: Tensor, gradient: Tensor, state: list[Tensor], n: AdamNumbers, *, keeps: bool) -> None:
    if weights.is_complex():
        weights, gradient = torch.view_as_real(weights), torch.view_as_real(gradient)
        state = [torch.view_as_real(tensor) for tensor in state]
    first, second, *largest = state
    if n.kind == _DECOUPLED:
        weights.mul_(n.shrink)
    elif n.kind == _COUPLED:
        _add(gradient, weights, n.decay)
    first = first.lerp_(gradient, n.weight) if keeps else first.lerp(gradient, n.weight)
    second = second.mul_(n.beta2) if keeps else second * n.beta2
    second.addcmul_(gradient, gradient, value=n.incoming)
    if n.amsgrad:
        second = torch.maximum(largest[0], second, out=largest[0] if keeps else None)
    weights.addcdiv_(first, _root(second).div_(n.correction).add_(n.eps), value=n.rate)


def _add(tensor: Tensor, other: Tensor, factor: float) -> Tensor:
    """Add ``factor`` times the other one in place."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.add_(other, alpha=factor)
    # torch rounds the products of the last few elements, and those of the others not.
    return tensor.copy_(tensor.float().add_(other.float(), alpha=_rounded(factor)))


def _root(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.dtype is torch.float16:
        return tensor.sqrt()
    # The nearest number, which torch's own root, where it is from a library of vector functions, is not always.
    wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    root = torch.empty_like(wide)
    np.sqrt(wide.numpy(), out=root.numpy())
    return root.to(tensor.dtype)
