"""The parameters that this worker's script trains now.

Question  Which parameters does the script train at present, and how does a newcomer come to train the same ones?
Holds     All parameters that can ever be trained exist at ``join``: the optimizer's and the model's. A parameter is
          trained while it is in a parameter group and requires a gradient. The script may change that between any two
          updates. Changes that other workers could not follow (a parameter that was replaced or made later, a group
          that was removed, another dtype) are refused, with the remedy.
Source    docs/design/0018-trained-set.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from pliant.bitmaps import bitmap, members
from pliant.errors import UsageError

# Longer lists of names are shortened in a message.
_MOST_NAMES = 3


def all_parameters(model: nn.Module, optimizer: Optimizer) -> list[Parameter]:
    """The optimizer's parameters in its order, then those that only the model has; each once."""
    found: dict[int, Parameter] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.setdefault(id(p), p)
    for p in model.parameters():
        found.setdefault(id(p), p)
    return list(found.values())


class TrainedSet:
    """Follows the script's changes of ``requires_grad`` and of the optimizer's parameter groups."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.parameters = all_parameters(model, optimizer)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._index = {id(p): index for index, p in enumerate(self.parameters)}
        self._kinds = [(p.dtype, p.device) for p in self.parameters]
        self._groups: list[list[int]] = []
        """the parameter groups, as of the last look"""
        self._lengths: list[int] = []
        self._requires: list[bool] = []
        self._now = b""
        self._pending: Mapping[str, Any] | None = None
        """a state that was taken over and is still to be applied"""
        self._known = 0
        """how many groups there were then: they have its hyper-parameters already"""
        self.look()

    # -- what is trained

    def look(self) -> bytes:
        """The set of parameters that are trained now. Raises ``UsageError`` on a change that cannot be followed."""
        requires = [p.requires_grad for p in self.parameters]
        # Lengths show almost every change, at a fraction of the time; ``check`` compares everything.
        lengths = [len(group["params"]) for group in self._optimizer.param_groups]
        if requires == self._requires and lengths == self._lengths:
            return self._now
        if lengths != self._lengths:
            self._take_groups()
            self._lengths = lengths
        self._requires = requires
        optimized = [index for group in self._groups for index in group]
        self._now = bitmap((index for index in optimized if requires[index]), len(self.parameters))
        return self._now

    @property
    def optimized(self) -> list[int]:
        """The indices of all parameters that the optimizer holds, frozen or not."""
        return [index for group in self._groups for index in group]

    def _take_groups(self) -> None:
        groups: list[list[int]] = []
        for number, group in enumerate(self._optimizer.param_groups):
            unknown = next((p for p in group["params"] if id(p) not in self._index), None)
            if unknown is not None:
                raise UsageError(
                    f"parameter group {number} has a parameter of shape {tuple(unknown.shape)} that was not there at "
                    "join: make all layers before join, and keep those for later frozen (requires_grad_(False)) or out "
                    "of the optimizer until add_param_group"
                )
            groups.append([self._index[id(p)] for p in group["params"]])
        remaining = itertools.zip_longest(self._groups, groups[: len(self._groups)], fillvalue=list[int]())
        if any(not set(before) <= set(now) for before, now in remaining):
            raise UsageError(
                "a parameter or a whole group was taken out of the optimizer: freeze it instead "
                "(p.requires_grad_(False)), its state is kept then"
            )
        self._groups = groups

    def check(self) -> None:
        """Raise if the model has other parameters than at ``join``, or they have another type."""
        self._take_groups()
        for index, (p, kind) in enumerate(zip(self.parameters, self._kinds, strict=True)):
            if (p.dtype, p.device) != kind:
                raise UsageError(
                    f"{self.name(index)} was {_kind(kind)} at join and is {_kind((p.dtype, p.device))} now: "
                    "convert the model (model.to, .half, .cuda) before join"
                )
        for name, p in self._model.named_parameters():
            if id(p) not in self._index:
                raise UsageError(
                    f"{name} was replaced or added after join, and no optimizer or other worker knows it: make all "
                    "layers (a new head, LoRA adapters) before join; for later, freeze them (requires_grad_(False))"
                )

    def name(self, index: int) -> str:
        """The name of a parameter in messages."""
        found = self._names.get(id(self.parameters[index]))
        return found or f"parameter {index} of the optimizer (shape {tuple(self.parameters[index].shape)})"

    def named(self, indices: Sequence[int]) -> str:
        """The names of several parameters in messages."""
        names = [self.name(index) for index in indices]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more

    # -- taking the group's set over

    def state_dict(self) -> dict[str, Any]:
        """What a newcomer needs in order to train the same parameters, in the same groups."""
        if self._pending is not None:
            return dict(self._pending)
        self.look()
        hyper = [
            {name: value for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups
        ]
        return {
            "groups": self._groups,
            "requires": [p.requires_grad for p in self.parameters],
            "hyper": hyper,
        }

    def take_over(self, state: Mapping[str, Any], *, later: bool, hyper: bool = True) -> None:
        """Train what the group trains; ``later``: once the script has come to where the group is (``settle``).

        On its way there the script may still change the set. Without ``hyper`` the existing groups keep their
        hyper-parameters: the schedule has set them.
        """
        own = self._optimizer.param_groups
        self._pending, self._known = state, len(own)
        for group, values in zip(own, state["hyper"] if hyper else (), strict=False):
            group.update(values)
        if not later:
            self.settle()

    def settle(self) -> None:
        """Apply the state that was taken over: parameter groups, and which parameters are frozen."""
        state, self._pending = self._pending, None
        if state is None:
            return
        self.look()
        own = self._optimizer.param_groups
        for number, (group, hyper) in enumerate(zip(state["groups"], state["hyper"], strict=True)):
            if number < len(self._groups):
                if sorted(self._groups[number]) != sorted(group):
                    raise UsageError(
                        f"parameter group {number} has other parameters here than on the other workers: build the "
                        "optimizer alike on every worker, and add groups in the same order"
                    )
                if number >= self._known:
                    # The script has added it on its way; the state has its present hyper-parameters.
                    own[number].update(hyper)
            else:
                self._optimizer.add_param_group({"params": [self.parameters[index] for index in group], **hyper})
        for p, requires in zip(self.parameters, state["requires"], strict=True):
            if p.requires_grad != requires:
                p.requires_grad_(requires)
        self.look()

    def adopt(self, agreed: bytes) -> list[int]:
        """Train what the group has agreed on, although this script's code for it has not run.

        Returns the parameters that the optimizer lacks.
        """
        wanted = set(members(agreed))
        held = set(self.optimized)
        for index, p in enumerate(self.parameters):
            if index in held and p.requires_grad != (index in wanted):
                p.requires_grad_(index in wanted)
        self.look()
        return sorted(wanted - held)


def _kind(kind: tuple[Any, Any]) -> str:
    dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} on {device}"
