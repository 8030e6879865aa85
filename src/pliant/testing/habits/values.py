"""A user's script as a value.

Question  What does a script do to its model, its optimizer and its loop?
Holds     A value says all of it: the same value is the same script, in threads, as processes and in plain PyTorch. It
          prints as what differs from the plainest script, and as JSON it is an argument of one command.
Source    ours.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Model = Literal["mlp", "cnn", "tied", "branch", "outside", "mixed"]
What = Literal[
    "freeze",
    "unfreeze",
    "add group",
    "freeze alone",
    "evaluate",
    "evaluate twice",
    "gather",
    "gather everywhere",
    "save",
    "slow save",
    "clip",
    "clip off",
    "break",
    "break alone",
    "oom",
    "inf",
]

SET: frozenset[What] = frozenset({"freeze", "unfreeze", "add group", "freeze alone"})
"""what changes the trained set: at an update or between epochs"""

GATHER: frozenset[What] = frozenset({"gather", "gather everywhere"})
"""``evaluate`` that collects the output of every sample"""

EVALUATE: frozenset[What] = GATHER.union(("evaluate", "evaluate twice"))
"""what all workers compute together"""

CLIP: frozenset[What] = frozenset({"clip", "clip off"})
"""another bound on the gradient's norm"""

FOLLOW: frozenset[What] = EVALUATE.union(CLIP, ("save", "slow save"))
"""what all workers do at the same update: in the body of the loop, or in ``on_update``"""

UPDATE: frozenset[What] = FOLLOW.union(("break",))
"""what is done at an update beside changes of the trained set"""

SAMPLE: frozenset[What] = frozenset({"oom", "inf"})
"""what happens to the micro-batch that has a certain sample, whoever computes it"""


class Event(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True, forbid_unknown_fields=True):
    """Something a script does."""

    at: int
    """from this round on, once, at the next moment that fits; what happens to a sample: which one, in every epoch"""
    what: What
    place: int = 0
    """who breaks or freezes alone, or is slow to save"""


class WorkerFault(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True, forbid_unknown_fields=True):
    """What happens to a real worker, once."""

    at: int
    """from this round on"""
    worker: int
    signal: Literal["kill", "term"] = "kill"


class Habits(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True, forbid_unknown_fields=True):
    """What a script does; the defaults are the plainest one."""

    model: Model = "mlp"
    norm: bool = False
    wide: bool = False
    """so large that a synchronous round is summed in parts"""
    large: bool = False
    """so large that its gradients have memory of their own kind"""
    channels_last: bool = False
    float32: bool = False
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    kernel: Literal["", "foreach", "fused"] = ""
    groups: bool = False
    """two parameter groups, each with its own rate and decay"""
    samples: int = 24
    epochs: int = 1
    steps: int = 0
    """so many updates in all, in place of ``epochs``; 0: it goes by epochs"""
    batch: int = 8
    floating: bool = False
    sizes: tuple[int, ...] = (4,)
    """each worker's micro-batch"""
    paces: tuple[float, ...] = ()
    delay: Literal[0, 1, "auto"] = 0
    correction: Literal["lookahead", "none"] = "lookahead"
    clip: float | None = None
    schedule: Literal["", "batch", "cycle", "epoch"] = ""
    scaler: bool = False
    ema: bool = False
    hooks: bool = False
    """what follows updates is done in ``on_update``, not in the body of the loop"""
    inside: bool = False
    """what all do at an update is done in ``on_update``, not in the body of the loop"""
    tokens: bool = False
    loaders: int = 0
    evaluates: bool = False
    """after every epoch"""
    skips: bool = False
    """a micro-batch that did not fit into memory is passed over by ``continue``: without ``step``"""
    events: tuple[Event, ...] = ()
    faults: tuple[WorkerFault, ...] = ()
    """of real processes only, like what follows"""
    grows: int = 0
    """from this round on there is one worker more"""
    checkpoints: bool = False
    """where all are lost, the run goes on from one"""

    @property
    def workers(self) -> int:
        return len(self.sizes)

    def does(self, *what: What) -> bool:
        """Whether any of these happens."""
        return any(event.what in what for event in self.events)


def packed(habits: Habits) -> str:
    """As JSON, in one line: what differs from the plainest script."""
    plain = Habits()
    given = {name: value for name, value in msgspec.structs.asdict(habits).items() if value != getattr(plain, name)}
    return msgspec.json.encode(given).decode()


def unpacked(text: str | bytes) -> Habits:
    """The inverse of ``packed``; raises ``msgspec.ValidationError`` on what is none."""
    return msgspec.json.decode(text, type=Habits)
