"""Optimizers of the script other than the one given to ``join``.

Question  Does the script train something beside the run, which would differ from worker to worker?
Holds     The rules hold from ``join`` to the end of the run. An optimizer that holds parameters of the model, of the
          joined optimizer or of ``state=`` objects may not step at all. Any other one may not step in two micro-batches
          of a loop over batches: it would train on this worker's samples alone. An optimizer that is made and dropped
          within a micro-batch (adversarial examples), or that steps outside of a loop, is allowed. So are the parts of
          which a joined optimizer is made: they step while it does.
Source    torch.optim.optimizer.register_optimizer_step_pre_hook, which sees the steps of the whole process: threads
          with runs of their own look only at steps of their own thread, and at optimizers with their parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pliant.errors import UsageError
from pliant.types import is_list_or_tuple, is_mapping

_joined: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""the optimizers of the open runs of this process"""


def check_not_joined(optimizer: Optimizer) -> None:
    """Refuse a second ``join`` while the first one's run is open."""
    if optimizer in _joined:
        raise UsageError(
            "this optimizer is in a run that is still open: end that one first with run.close(), or let "
            "`with pliant.join(…) as run:` do it; for a new start make model and optimizer anew"
        )


class OtherOptimizers:
    """Watches the steps of all optimizers, for one run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        *,
        stepping: Callable[[], bool],
    ) -> None:
        """``stepping``: whether the run itself is making an update."""
        self._model, self._optimizer, self._state = model, optimizer, state
        self._stepping = stepping
        self._thread = threading.get_ident()
        self._drawn = 0
        self._in_loop = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """the micro-batch in which each of them has stepped; weak, since the next object may get the same address"""
        _joined.add(optimizer)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def enter_micro_batch(self) -> None:
        """The script's loop body begins with the next micro-batch."""
        self._drawn += 1
        self._in_loop = True

    def leave_loop(self) -> None:
        """The script is out of its loop over batches."""
        self._in_loop = False

    def close(self) -> None:
        """The run is over: other optimizers may step again."""
        self._hook.remove()
        _joined.discard(self._optimizer)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        # The run's own optimizer has its own hook, and may consist of others.
        if optimizer in _joined or self._stepping():
            return
        name = type(optimizer).__name__
        if not self._held().isdisjoint(_identities([optimizer])):
            raise UsageError(
                f"another optimizer ({name}) changes parameters of the run, on each worker in its own way: put them as "
                "groups with their own settings into the one optimizer given to join (two kinds, as Muon and AdamW: "
                "one class whose step() makes both), or freeze them"
            )
        if not self._in_loop or threading.get_ident() != self._thread:
            return
        if self._seen.setdefault(optimizer, self._drawn) != self._drawn:
            raise UsageError(
                f"a second optimizer ({name}) goes on from micro-batch to micro-batch, with this worker's samples "
                "alone: train all in one run (GAN: both networks in one module, both parameter lists as groups of the "
                "one optimizer given to join), or in a `pliant run` of its own; one for adversarial examples is made "
                "anew in each micro-batch"
            )

    def _held(self) -> set[int]:
        """What only the run may change. Computed anew: the script may have put another object into ``state``."""
        return set(_identities([self._model, self._optimizer, *_objects(self._state.values())]))


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    """The objects in ``state=``, those in lists and dicts too."""
    for value in values:
        if is_mapping(value):
            yield from _objects(value.values())
        elif is_list_or_tuple(value):
            yield from _objects(value)
        else:
            yield value


def _identities(owners: Iterable[Any]) -> Iterator[int]:
    """The parameters that modules, optimizers and anything else with ``parameters()`` hold."""
    for owner in owners:
        if isinstance(owner, Optimizer):
            yield from (id(p) for group in owner.param_groups for p in group["params"])
        elif isinstance(owner, Tensor):
            yield id(owner)
        elif callable(getattr(owner, "parameters", None)):
            try:
                found: list[Any] = list(owner.parameters())
            except Exception:
                # It is not a module's ``parameters``.
                continue
            yield from (id(p) for p in found if isinstance(p, Tensor))
