"""The settings of ``join``, checked once.

Question  Which settings does ``join`` take, what depends on the optimizer, and which values are refused?
Holds     All settings are checked here, before anything starts; the rest of Pliant reads one frozen value.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from pliant.core.group_state import FEISTEL, Policy
from pliant.core.tuning import delay as overlap
from pliant.core.tuning import rates as rules
from pliant.core.tuning.rates import Rule
from pliant.errors import UsageError
from pliant.worker.training import momentum_of


@dataclass(frozen=True, slots=True)
class Floating:
    """An open batch: each round has the samples that the workers compute while the last sum is in flight.

    ``reference`` is the batch that the learning rate was chosen for. ``at_most`` bounds the samples of one round.
    Without it, rounds are bounded where more samples no longer raise goodput, once the gradient noise is known. A
    worker alone and rounds without delay use ``reference`` as a fixed batch, because they do not overlap with a sum.
    """

    reference: int
    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``join``, checked."""

    policy: Policy
    correction: str
    clip_norm: float | None
    schedule_by: str
    seed: int
    dead_after_s: float
    hung_after_s: float
    optimizer: str
    checkpoint: str | None = None
    """where checkpoints are written, the same in every process"""

    def agreed(self) -> dict[str, str]:
        """The settings that must be equal on all workers, as text for comparison and for messages."""
        policy = self.policy
        return {
            "batch": f"Floating({policy.batch}, at_most={policy.at_most})" if policy.floating else str(policy.batch),
            "delay": "auto" if policy.delay == overlap.AUTO else str(policy.delay),
            "rates": str(policy.rule),
            "correction": self.correction,
            "clip_norm": str(self.clip_norm),
            "schedule_by": self.schedule_by,
            "seed": str(self.seed),
            "dead_after": repr(self.dead_after_s),
            "hung_after": repr(self.hung_after_s),
            "optimizer": self.optimizer,
            "momentum": repr(policy.momentum),
            # The leader writes checkpoints, and the leader changes: with two addresses each would get a part of them.
            # If machines mount a directory in different places, a symbolic link gives it one name.
            "checkpoint": str(self.checkpoint),
        }


# Heartbeats are sent ten times in ``dead_after``; on a busy machine a shorter silence proves nothing.
_LEAST_DEAD_AFTER_S = 0.5


def resolved(
    optimizer: Optimizer,
    *,
    batch: int | Floating,
    delay: int | str,
    correction: str,
    rates: str | Rule | None,
    clip_norm: float | None,
    schedule_by: str,
    seed: int,
    dead_after: float,
    hung_after: float,
    checkpoint: Any = None,
) -> Settings:
    """Check the arguments of ``join``, and fill in defaults that depend on the optimizer."""
    reference, at_most = (batch.reference, batch.at_most) if isinstance(batch, Floating) else (batch, None)
    _positive_whole("batch", reference)
    if at_most is not None and _positive_whole("at_most", at_most) < reference:
        raise UsageError(f"at_most={at_most} is below reference={reference}: raise at_most or lower reference")
    _one_of("delay", delay, ("auto", 1, 0))
    _one_of("correction", correction, ("lookahead", "none"))
    _one_of("schedule_by", schedule_by, ("batch", "epoch"))
    rule = _rule(rates, optimizer)
    check_clip_norm(clip_norm)
    if not dead_after >= _LEAST_DEAD_AFTER_S:
        raise UsageError(f"dead_after is {dead_after}: give seconds, at least {_LEAST_DEAD_AFTER_S:g}")
    if not hung_after >= dead_after:
        raise UsageError(f"hung_after is {hung_after}: give seconds, at least dead_after, which is {dead_after:g}")
    policy = Policy(
        batch=reference,
        floating=isinstance(batch, Floating),
        at_most=at_most,
        delay=overlap.AUTO if delay == "auto" else int(delay),
        rule=rule,
        momentum=momentum_of(optimizer),
        order=FEISTEL,
    )
    return Settings(
        policy=policy,
        correction=correction,
        clip_norm=None if clip_norm is None else float(clip_norm),
        schedule_by=schedule_by,
        seed=int(seed),
        dead_after_s=float(dead_after),
        hung_after_s=float(hung_after),
        optimizer=type(optimizer).__name__,
        checkpoint=_absolute(checkpoint),
    )


def _positive_whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}: give a positive whole number of samples, e.g. {name}=256")
    return value


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise UsageError(f"{name} is {value!r}: choose one of {', '.join(map(repr, allowed))}")


def _rule(rates: Any, optimizer: Optimizer) -> Rule:
    """The rate rule that the user asks for, or the default for the optimizer."""
    adam = isinstance(optimizer, Adam | AdamW)
    rule = rules.of(("sqrt" if adam else "linear") if rates is None else rates)
    if rule.moments and not adam:
        raise UsageError(
            f"rates is {rule} but the optimizer is {type(optimizer).__name__}: only Adam and AdamW have those moments, "
            "leave moments=True out"
        )
    return rule


def check_checkpoint(address: Any, every: Any) -> None:
    """Refuse an address that is not a path or URL, and an interval that is not a positive number."""
    if address is not None and not (isinstance(address, str | os.PathLike) and str(address)):
        raise UsageError(f"checkpoint is {address!r}: give a directory, or an address such as s3://bucket/run")
    if isinstance(every, bool) or not isinstance(every, int | float) or not every > 0:
        raise UsageError(f"checkpoint_every is {every!r}: give seconds, more than 0")


def check_clip_norm(bound: Any) -> None:
    """Refuse a value that is not a positive number or None."""
    number = not isinstance(bound, bool) and isinstance(bound, int | float)
    if bound is not None and not (number and bound > 0):
        raise UsageError(f"clip_norm is {bound!r}: give a positive number, or None")


def _absolute(address: Any) -> str | None:
    """A directory as an absolute path, because the script may change its directory, and other workers have another."""
    if address is None or "://" in str(address) or "::" in str(address):
        return None if address is None else str(address)
    # Not resolved: a symbolic link is how two machines give a directory the same name.
    return os.path.normpath(Path(address).expanduser().absolute())


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Refuse an object without ``step``, and a scheduler of another optimizer."""
    if scheduler is None:
        return
    name = type(scheduler).__name__
    if isinstance(getattr(scheduler, "scheduler", None), LRScheduler):
        raise UsageError(f"the scheduler is wrapped in {name} (Accelerate): give join the plain one, .scheduler")
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"scheduler is a {name}: give one of torch.optim.lr_scheduler")
    if isinstance(other := getattr(scheduler, "optimizer", None), Optimizer) and other is not optimizer:
        raise UsageError(
            f"the scheduler ({name}) was made for another optimizer than the one given to join: make it from that one"
        )


def check_scaler(scaler: Any) -> None:
    """Refuse an object that is not a ``torch.amp.GradScaler``."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler is a {type(scaler).__name__}: give a torch.amp.GradScaler")


def check_state(state: Any) -> None:
    """Refuse a ``state`` that is not a dict."""
    if state is not None and not isinstance(state, dict):
        raise UsageError(f"state is a {type(state).__name__}: give a dict, e.g. state={{'best': 0.0}}")


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse models and optimizers that Pliant cannot train, with the remedy."""
    if isinstance(optimizer, list | tuple):
        raise UsageError("several optimizers in one join: put the parameters into groups of one optimizer")
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise UsageError(
            f"the optimizer is wrapped in {type(optimizer).__name__} (Accelerate, Fabric), which makes steps of its "
            "own: give join the plain one, .optimizer, and leave the distribution to Pliant"
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim optimizer")
    if isinstance(optimizer, LBFGS):
        raise UsageError("LBFGS evaluates the loss several times per step: use SGD, Adam or another first-order one")
    if isinstance(optimizer, SparseAdam):
        raise UsageError("SparseAdam needs sparse gradients, which cannot be summed in a flat buffer: use Adam")
    for name, module in model.named_modules():
        # A Fabric module forwards to ``_forward_module``, which may itself be a DDP one; a compiled model is plain.
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(
            module, "_forward_module"
        ):
            where = f"{name or 'the model'} is wrapped in {type(module).__name__}"
            raise UsageError(f"{where}: give join the plain module, {name or 'model'}.module")
        if getattr(module, "sparse", False) is True:
            raise UsageError(f"{name or type(module).__name__} has sparse=True: build it with sparse=False")
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained:
        raise UsageError("no parameter of the optimizer requires a gradient: nothing can be trained")
    if not {id(p) for p in trained} & {id(p) for p in model.parameters()}:
        raise UsageError("the optimizer has no parameter of this model: make it from model.parameters()")
    for p in trained:
        if type(p.data) is not torch.Tensor:
            raise UsageError(f"a parameter is a {type(p.data).__name__} (FSDP, DTensor): give join the plain module")
    if len({p.device for p in trained}) > 1:
        raise UsageError("the parameters are on several devices: a worker drives one device")
