"""The loss scale of mixed precision, and the script's ``torch.amp.GradScaler``.

Question  By what is a loss multiplied, and what does the script's scaler report meanwhile?
Holds     The group's scale (``core.tuning.loss_scale``) is the only one. The scaler never steps, unscales or updates;
          after each round it is set to the group's scale, so that ``get_scale`` and ``state_dict`` are right on every
          worker. The usual calls of a scaler in the script would scale twice or unscale too early: they are refused.
Source    torch.amp.GradScaler; docs/design/0004-numerics.md; docs/guide/mixed-precision.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from pliant.core.tuning import loss_scale
from pliant.core.tuning.loss_scale import Scale
from pliant.errors import UsageError
from pliant.tensors import untyped

_OWN_CALLS = (
    "scaler.unscale_, scaler.step or scaler.update was called by the script: remove all three; "
    "run.step() does what they do for the whole group (clipping is join(clip_norm=…))"
)
_SCALED = (
    "the loss was multiplied by scaler.scale(…) already: write run.backward(loss) with the plain loss; "
    "Pliant scales it, since join has the scaler"
)
_NOTE = (
    "pliant: join(scaler=…) makes these calls itself: remove scaler.scale, scaler.unscale_, scaler.step and "
    "scaler.update from the loop; run.backward(loss) and run.step() are enough"
)

# How many graph nodes are searched for a loss that was scaled already; at most a division or a sum follows in practice.
_NODES = 16


class LossScale:
    """The group's loss scale, on one worker. ``scaler`` is enabled."""

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        # A scaler that has scaled nothing has no scale yet, and fails every other call with an assertion.
        scaler.scale(torch.zeros((), device=optimizer.param_groups[0]["params"][0].device))
        self._scale = self._told()
        self._account = untyped.accounts_of(scaler)

    def _told(self) -> Scale:
        state = self._scaler.state_dict()
        return Scale(
            scale=float(state["scale"]),
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
            finite_rounds=int(state["_growth_tracker"]),
        )

    def read(self) -> None:
        """The scaler has just been loaded with the leader's state."""
        self._scale = self._told()

    @property
    def value(self) -> float:
        return self._scale.scale

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale."""
        return self._scaler.scale(loss)

    def follow(self, *, finite: bool) -> float:
        """Change the scale as all workers do after a round; returns the factor by which it changed."""
        before = self._scale.scale
        self._set(loss_scale.after(self._scale, finite=finite))
        return self._scale.scale / before

    def _set(self, scale: Scale) -> None:
        self._scale = scale
        self._scaler.load_state_dict(
            {
                "scale": scale.scale,
                "growth_factor": scale.growth_factor,
                "backoff_factor": scale.backoff_factor,
                "growth_interval": scale.growth_interval,
                "_growth_tracker": scale.finite_rounds,
            }
        )

    # -- handing on

    def state(self) -> list[float]:
        """The scale and what determines its changes, as numbers."""
        return list(msgspec.structs.astuple(self._scale))

    def take(self, state: Sequence[float]) -> None:
        """Take over what another worker's ``state`` says."""
        kinds: list[type[Any]] = [type(value) for value in msgspec.structs.astuple(self._scale)]
        self._set(Scale(*(kind(value) for kind, value in zip(kinds, state, strict=True))))

    # -- what the script must not call

    def refuse_own_calls(self) -> None:
        """Raise if the script has unscaled, stepped or updated by itself.

        torch keeps account of the first two, and begins a new account with ``update``; gradients that it unscales do
        not show it in their version counters.
        """
        account = untyped.accounts_of(self._scaler)
        if account is not self._account or id(self._optimizer) in account:
            raise UsageError(_OWN_CALLS)

    def refuse_scaled(self, loss: Tensor) -> None:
        """Raise if the script has scaled ``loss``: some multiplication in front of it has the scaler's own scale."""
        mine = untyped.scale_of(self._scaler)
        nodes: list[Any] = [loss.grad_fn]
        for seen in range(_NODES):
            if mine is None or seen >= len(nodes):
                return
            node = nodes[seen]
            factor = getattr(node, "_saved_other", None) if node is not None and node.name() == "MulBackward0" else None
            if isinstance(factor, Tensor) and factor.data_ptr() == mine.data_ptr():
                raise UsageError(_SCALED)
            if node is not None:
                nodes += [following for following, _ in node.next_functions]

    def explain(self, error: BaseException) -> None:
        """Add to an error that torch's scaler has raised in the script what to do about it."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and trace.tb_frame.f_globals.get("__name__", "").endswith(".grad_scaler"):
            error.add_note(_NOTE)
