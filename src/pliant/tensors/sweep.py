"""The passes over all parameters that an update costs, each made once.

Question  How does one pass over the memory make an update, a look-ahead step, or both?
Holds     The optimizer keeps its own state: the same tensors and step counters that ``optimizer.step()`` moves. All
          ways of making a pass give the same bits (``passes``). They are also those of ``optimizer.step()``, or differ
          from them by the rounding of single operators: which, is found out before the first update (``agreement``).
          What an optimizer does beyond its formula (hooks, a step of its own, another implementation asked for) is left
          to ``optimizer.step()``. Storage never moves.
Source    torch/optim/sgd.py, torch/optim/adam.py; docs/design/0025-sweeps.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from pliant.tensors import passes
from pliant.tensors.passes import Act, Numbers, SweptParameter

Hyper = Sequence[Mapping[str, Any]]
"""for each parameter group, the settings (``lr`` and others) that are used instead of the group's own"""

_OTHERWISE = ("foreach", "fused", "capturable", "differentiable")
"""Flags of a parameter group that ask for another implementation than the one that is followed here."""
_SCALED_INSIDE = ("grad_scale", "found_inf")
"""Attributes by which a gradient scaler tells an optimizer what to do."""


@dataclass(frozen=True, slots=True)
class UpdateSweep:
    """An update of ``factor`` times these gradients."""

    gradients: Sequence[Tensor | None]
    """by parameter"""
    present: int
    """bitmap of the parameters that have one; the others are left as they are"""
    hyper: Hyper
    factor: float = 1.0
    clears: bool = False
    """all gradients are set to zero"""


@dataclass(frozen=True, slots=True)
class LookAheadSweep:
    """A step to where ``scale`` times this worker's own gradients would lead."""

    copies: Mapping[int, Tensor]
    """by parameter: where the plain weights are kept"""
    present: int | None
    """bitmap of the parameters that have an own gradient; the others stay. None: this worker has contributed nothing,
    a gradient of zero"""
    hyper: Hyper
    own: Sequence[Tensor | None] | None = None
    """None: they are parked where what is looked for is not: in the copies, or in a model that is away"""
    scale: float = 1.0


class Agreement(Enum):
    """How a sweep's update compares with that of ``optimizer.step()``, on this machine and with this torch."""

    EXACT = "exact"
    """bit for bit"""
    CLOSE = "close"
    """but for the rounding of single operators"""
    NONE = "none"
    """this is another formula"""


Hook = Callable[..., Any]


def sweeps_for(
    optimizer: Optimizer, parameters: Sequence[Tensor], is_own: Callable[[Hook], bool] = lambda hook: False
) -> Sweeps | None:
    """The sweeps over ``parameters`` (in the order of bitmaps); None: this optimizer's formula is not known.

    ``is_own``: whether a hook before its step, or before all optimizers', is Pliant's and does nothing for its updates.
    """
    return Sweeps(optimizer, parameters, is_own) if type(optimizer) in (SGD, Adam, AdamW) else None


class Sweeps:
    """What is done to all parameters of one optimizer at once."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], is_own: Callable[[Hook], bool] = lambda hook: False
    ) -> None:
        self._optimizer = optimizer
        self._is_own = is_own
        self._index = {id(p): index for index, p in enumerate(parameters)}
        self._dtypes = {p.dtype for p in parameters}

    @property
    def exact(self) -> bool:
        """Whether updates have the bits of ``optimizer.step()``, for the element types of all parameters."""
        return all(agreement(type(self._optimizer), dtype) is Agreement.EXACT for dtype in self._dtypes)

    @property
    def settles(self) -> bool:
        """Whether ``optimizer.step()`` would do nothing but follow the formula, so that a sweep may take its place."""
        optimizer = self._optimizer
        if any(agreement(type(optimizer), dtype) is Agreement.NONE for dtype in self._dtypes):
            return False
        step: Any = optimizer.__dict__.get("step")
        return (
            # torch's schedulers put a function in its place, which notes that it was called.
            (step is None or (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step))
            and all(map(self._is_own, optimizers._global_optimizer_pre_hooks.values()))
            and all(map(self._is_own, optimizer._optimizer_step_pre_hooks.values()))
            and not optimizers._global_optimizer_post_hooks
            and not optimizer._optimizer_step_post_hooks
            and not any(getattr(optimizer, name, None) is not None for name in _SCALED_INSIDE)
            and not any(_is_special(group) for group in optimizer.param_groups)
        )

    @torch.no_grad()
    def settle(self, update: UpdateSweep, away: Mapping[int, Tensor] | None = None) -> bool:
        """Make an update; False: nothing was done, ``optimizer.step()`` has to.

        ``away``: the model is at the look-ahead point, or holds anything; its plain weights are here. It holds them
        afterwards.
        """
        copies = away or {}
        planned = self._settling(update, sources=copies) if self.settles else None
        if planned is None:
            return False
        for _, index, p in self._swept():
            if index in copies:
                each = planned.setdefault(index, SweptParameter(p))
                if not each.acts & Act.SETTLE:
                    each.weights, each.copy, each.acts = copies[index], p, each.acts | Act.COPY
        self._run(planned.values())
        return True

    @torch.no_grad()
    def ahead(self, step: LookAheadSweep) -> None:
        """Put the plain weights into the copies and move the model, which holds them, to the look-ahead point."""
        planned: dict[int, SweptParameter] = {}
        self._looking_ahead(planned, step, away=False)
        self._run(planned.values())

    @torch.no_grad()
    def settle_and_look_ahead(self, update: UpdateSweep, step: LookAheadSweep, *, away: bool = False) -> bool:
        """Both in one pass; False: nothing was done.

        ``away``: the copies hold the plain weights already, and the model may hold anything, or the parked gradients.
        """
        planned = self._settling(update, weights=step.copies if away else {}) if self.settles else None
        if planned is None:
            return False
        self._looking_ahead(planned, step, away=away)
        self._run(planned.values())
        return True

    # -- what is to be done

    def _swept(self) -> Iterator[tuple[int, int, Tensor]]:
        """The number of its group, its own number, and the parameter."""
        for number, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                index = self._index.get(id(p))
                if index is not None:
                    yield number, index, p

    def _settling(
        self,
        update: UpdateSweep,
        *,
        sources: Mapping[int, Tensor] | None = None,
        weights: Mapping[int, Tensor] | None = None,
    ) -> dict[int, SweptParameter] | None:
        """What an update does to each parameter; None: one of them is left to ``optimizer.step()``.

        ``sources``, ``weights``: where it leads from and to, for those that are not in the model.
        """
        planned: dict[int, SweptParameter] = {}
        rows = _Rows(self._optimizer, update.hyper, update.factor)
        for number, index, p in self._swept():
            gradient = update.gradients[index]
            plain = (weights or {}).get(index, p)
            if gradient is None or not update.present >> index & 1:
                if gradient is not None and update.clears:
                    planned[index] = SweptParameter(plain, gradient, acts=Act.CLEAR)
                continue
            state = self._optimizer.state.get(p, {})
            kept = _state(self._optimizer, self._optimizer.param_groups[number], state)
            # The first update of a parameter also makes its state: that is the optimizer's.
            if kept is None or p.device.type != "cpu" or p.is_complex():
                return None
            each = planned[index] = SweptParameter(plain, gradient, kept)
            each.acts = Act.SETTLE | (Act.CLEAR if update.clears else Act.NONE)
            each.settle, each.counter = rows.numbers(number, state, 1), state.get("step")
            each.source = (sources or {}).get(index)
        return planned

    def _looking_ahead(self, planned: dict[int, SweptParameter], step: LookAheadSweep, *, away: bool) -> None:
        """Add the look-ahead steps to what is done to each parameter."""
        rows = _Rows(self._optimizer, step.hyper, step.scale)
        for number, index, p in self._swept():
            copy = step.copies.get(index)
            if copy is None:
                continue
            each = planned.setdefault(index, SweptParameter(copy if away else p))
            state = self._optimizer.state.get(p, {})
            has_own = step.present is not None and bool(step.present >> index & 1)
            if not has_own and not (step.present is None and _begun(self._optimizer, state)):
                # An optimizer skips a parameter without a gradient; so does the look-ahead step.
                each.copy, each.acts = (p if away else copy), each.acts | Act.COPY
                continue
            each.copy, each.point = copy, p if away else None
            each.acts |= Act.AHEAD
            parked = p if away else copy
            each.own = None if not has_own else parked if step.own is None else step.own[index]
            each.state = _state(self._optimizer, self._optimizer.param_groups[number], state) or ()
            each.ahead = rows.numbers(number, state, 2 if each.acts & Act.SETTLE else 1)

    def _run(self, planned: ValuesView[SweptParameter]) -> None:
        passes.run(planned)
        if "step" in self._optimizer.__dict__ and any(each.acts & Act.SETTLE for each in planned):
            # As the scheduler's function notes it.
            self._optimizer.__dict__["_opt_called"] = True


def _is_special(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group asks for more than the formula with plain numbers; a rate may be a tensor."""
    numbers = (value for name, value in group.items() if name not in ("params", "lr", "betas"))
    return any(group.get(flag) for flag in _OTHERWISE) or any(
        isinstance(number, Tensor) for number in (*numbers, *group.get("betas", ()))
    )


def _state(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
    """What a step reads and moves; None: some of it has not been made yet."""
    if isinstance(optimizer, SGD):
        names = ["momentum_buffer"] if group["momentum"] else []
    else:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    if not isinstance(optimizer, SGD) and not isinstance(state.get("step"), Tensor):
        return None
    kept = tuple(tensor for name in names if isinstance(tensor := state.get(name), Tensor))
    return kept if len(kept) == len(names) else None


def _begun(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Whether a step would move the weights without a gradient."""
    return isinstance(state.get("momentum_buffer" if isinstance(optimizer, SGD) else "exp_avg"), Tensor)


class _Rows:
    """The numbers of a step, for each group and count of steps."""

    def __init__(self, optimizer: Optimizer, hyper: Hyper, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._groups = [{**group, **values} for group, values in zip(optimizer.param_groups, hyper, strict=True)]
        self._made: dict[tuple[int, float], Numbers] = {}

    def numbers(self, number: int, state: Mapping[str, Any], steps: int) -> Numbers:
        """Those for a parameter of group ``number``, ``steps`` after what its state says."""
        step = 0.0 if isinstance(self._optimizer, SGD) else float(state.get("step", 0.0)) + steps
        made = self._made.get((number, step))
        if made is None:
            group = self._groups[number]
            if isinstance(self._optimizer, SGD):
                made = passes.sgd_numbers(group, self._factor)
            else:
                # Before torch 2.7 AdamW's groups have no ``decoupled_weight_decay``.
                decoupled = isinstance(self._optimizer, AdamW) or bool(group.get("decoupled_weight_decay", False))
                made = passes.adam_numbers(group, self._factor, step, decoupled=decoupled)
            self._made[number, step] = made
        return made


# -- the optimizer's own step beside a sweep

_SETTINGS: dict[type[Optimizer], tuple[dict[str, Any], ...]] = {
    SGD: (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.1, "maximize": True},
    ),
    Adam: ({"weight_decay": 0.01, "amsgrad": True}, {"betas": (0.4, 0.9), "maximize": True}),
    AdamW: ({}, {"amsgrad": True, "maximize": True}),
}
_STEPS, _COUNT = 3, 1997
"""Updates of an example, and its elements: no multiple of a vector's width, enough that some round differently, and too
few for torch to wake its threads."""
_BOUND = 8
"""Most that the rounding of single operators makes up, in units of the largest weight's last place."""


@cache
def agreement(kind: type[Optimizer], dtype: torch.dtype) -> Agreement:
    """How a sweep's update compares with this optimizer's own."""
    # Where torch adds numbers of 16 bits, it treats the last few of a tensor otherwise than the rest.
    same = dtype is not torch.bfloat16 and (kind is SGD or passes.roots_agree(dtype))
    found = Agreement.EXACT if same else Agreement.CLOSE
    for settings in _SETTINGS[kind]:
        swept, stepped = (_trained(kind, dtype, settings, by_sweep=by_sweep) for by_sweep in (True, False))
        apart = float((swept.double() - stepped.double()).abs().max())
        if not apart <= _BOUND * torch.finfo(dtype).eps * float(stepped.abs().max()):
            return Agreement.NONE
        if apart:
            found = Agreement.CLOSE
    return found


def _trained(kind: Any, dtype: torch.dtype, settings: dict[str, Any], *, by_sweep: bool) -> Tensor:
    """The weights after some updates of an example."""
    p, *gradients = (Parameter(row) for row in passes.waves(_STEPS + 2, _COUNT, dtype))
    optimizer: Optimizer = kind([p], lr=0.01, foreach=False, **settings)
    sweeps = Sweeps(optimizer, [p])
    # Without the hooks, some of which may be for all optimizers.
    step = inspect.unwrap(kind.step)
    with torch.no_grad():
        for gradient in gradients:
            p.grad = gradient.detach()
            planned = sweeps._settling(UpdateSweep([p.grad], 1, [{}])) if by_sweep else None
            if planned is None:
                # Also the first, which makes the state.
                step(optimizer)
            else:
                passes.run(planned.values())
    return p.detach()
