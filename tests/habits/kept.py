"""Scripts that failed once."""

from __future__ import annotations

from msgspec.structs import replace

from pliant.testing.habits import Habits
from pliant.testing.habits.values import Event, WorkerFault

KEPT: list[Habits] = [
    # The optimizer's first state lost its memory format on all workers but the leader.
    Habits(model="cnn", channels_last=True, float32=True, optimizer="adagrad", kernel="fused", sizes=(4, 4)),
    # Alone with a scaler, the only pass of an update did not fit into memory.
    Habits(scaler=True, batch=3, sizes=(5,), events=(Event(at=3, what="oom"),)),
    # The loss scale moved while a new group's gradients were outside of the layout: they were off by a factor of two.
    Habits(
        model="cnn",
        norm=True,
        optimizer="adam",
        decay=0.01,
        amsgrad=True,
        maximize=True,
        kernel="fused",
        samples=26,
        epochs=2,
        batch=4,
        sizes=(4, 2),
        paces=(0.5, 0.5),
        delay=1,
        clip=0.05,
        scaler=True,
        inside=True,
        tokens=True,
        evaluates=True,
        events=(Event(6, "clip", 1), Event(4, "add group", 1), Event(2, "clip off"), Event(4, "clip", 1)),
    ),
    # The same, where it shows in one worker's part at most times.
    Habits(
        model="outside",
        norm=True,
        momentum=0.9,
        dampening=0.3,
        groups=True,
        samples=37,
        floating=True,
        sizes=(2, 1),
        paces=(0.25, 1.0),
        delay=1,
        scaler=True,
        hooks=True,
        tokens=True,
        events=(Event(2, "add group"), Event(4, "gather", 1)),
    ),
    # A layer that was unfrozen, too; the saved weights showed it.
    Habits(
        model="cnn",
        channels_last=True,
        optimizer="rmsprop",
        momentum=0.9,
        maximize=True,
        groups=True,
        samples=39,
        epochs=2,
        batch=11,
        floating=True,
        sizes=(6, 5),
        paces=(0.5, 0.5),
        delay=1,
        correction="none",
        clip=0.05,
        schedule="cycle",
        scaler=True,
        ema=True,
        inside=True,
        events=(Event(6, "evaluate twice"), Event(0, "unfreeze"), Event(3, "clip off"), Event(5, "save")),
    ),
    # Outputs were gathered twice at one update, in other micro-batches: the second ones were compared with the first.
    Habits(
        optimizer="adagrad",
        maximize=True,
        kernel="foreach",
        samples=34,
        epochs=2,
        steps=8,
        batch=12,
        floating=True,
        sizes=(5, 6, 5, 3),
        paces=(0.5, 0.25, 0.25, 0.25),
        delay="auto",
        correction="none",
        schedule="cycle",
        ema=True,
        hooks=True,
        inside=True,
        tokens=True,
        events=(Event(0, "clip off", 1), Event(5, "gather everywhere", 3), Event(5, "evaluate"), Event(5, "gather", 3)),
    ),
    Habits(
        model="branch",
        norm=True,
        optimizer="adam",
        samples=27,
        batch=5,
        sizes=(5, 2),
        paces=(0.25, 1.0),
        correction="none",
        schedule="cycle",
        ema=True,
        hooks=True,
        inside=True,
        evaluates=True,
        events=(Event(5, "evaluate"), Event(4, "gather everywhere"), Event(4, "gather everywhere")),
    ),
    # One left its loop while a round was in flight, and the other evaluated at that round's update: it is refused.
    Habits(
        optimizer="adamw",
        decay=0.01,
        maximize=True,
        samples=25,
        epochs=2,
        batch=7,
        sizes=(5, 6),
        paces=(0.5, 0.25),
        delay=1,
        correction="none",
        clip=0.05,
        schedule="batch",
        hooks=True,
        events=(Event(1, "break alone"), Event(2, "gather"), Event(5, "break alone"), Event(6, "save", 1)),
    ),
    # It evaluated, too, but after its loop.
    Habits(sizes=(4, 2), delay=1, evaluates=True, events=(Event(1, "break alone"), Event(2, "evaluate"))),
]

KEPT_PROCESSES: list[Habits] = [
    # A spare came to the end of the last loop when the others, who had the user's state, had gone already.
    Habits(
        model="tied",
        optimizer="rmsprop",
        momentum=0.9,
        samples=44,
        epochs=2,
        batch=2,
        sizes=(1, 2, 3),
        paces=(0.5, 0.25, 1.0),
        delay="auto",
        loaders=1,
        events=(Event(at=3, what="evaluate"), Event(at=5, what="evaluate")),
    ),
    # Spares go along with the first round: the replay did not know what their statistics had been before it.
    Habits(
        model="cnn",
        norm=True,
        optimizer="rmsprop",
        samples=82,
        epochs=3,
        batch=1,
        floating=True,
        sizes=(3, 3, 3),
        paces=(1.0, 0.5, 1.0),
        ema=True,
        hooks=True,
        events=(Event(at=6, what="break"),),
        faults=(WorkerFault(at=11, worker=0), WorkerFault(at=7, worker=1, signal="term")),
    ),
    # A checkpoint between a change of the trained set and its taking effect: who went on from it never made the change.
    Habits(
        model="branch",
        optimizer="adamw",
        samples=111,
        epochs=3,
        steps=18,
        batch=7,
        sizes=(4, 3, 6),
        paces=(1.0, 1.0, 0.25),
        delay="auto",
        schedule="epoch",
        evaluates=True,
        events=(Event(at=8, what="unfreeze"),),
        faults=tuple(WorkerFault(at=12, worker=worker) for worker in range(3)),
        checkpoints=True,
    ),
]
"""as real processes"""

_SLOW = Habits(
    model="branch",
    optimizer="adamw",
    groups=True,
    samples=90,
    steps=40,
    batch=8,
    floating=True,
    sizes=(2, 3, 2),
    clip=0.05,
    evaluates=True,
    events=(Event(1, "clip"), Event(3, "slow save"), Event(5, "gather everywhere"), Event(6, "clip off")),
    faults=(WorkerFault(14, worker=2),),
)

# The leader is left out while it saves; the others go on to what all are asked for at later updates.
SLOW_PROCESSES: list[Habits] = [replace(_SLOW, delay=1, inside=True), _SLOW]
"""few are drawn that do several of these things to each other"""
