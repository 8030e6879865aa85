"""How scripts are drawn.

Question  Which scripts are worth running?
Holds     Every drawn script is one that a user may write: it is right, or refused at once. Needs hypothesis, a
          dependency of development only.
Source    ours.
"""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st
from msgspec.structs import replace

from pliant.testing.habits.values import CLIP, SAMPLE, SET, UPDATE, Event, Habits, Model, What, WorkerFault

_EXACT = ("sgd", "adam", "adamw")
_EVENTS: tuple[What, ...] = get_args(What)


@st.composite
def habits(draw: Any, *, processes: bool = False) -> Habits:
    """A script; ``processes``: one that is run with a coordinator."""
    workers = draw(st.sampled_from((2, 3) if processes else (1, 2, 2, 3, 3, 4)))
    drawn = Habits(
        **draw(_models()),
        **draw(_optimizers()),
        **draw(_loops(workers)),
        sizes=tuple(draw(st.lists(st.integers(1, 6), min_size=workers, max_size=workers))),
        paces=tuple(draw(st.lists(st.sampled_from((1.0, 0.5, 0.25)), min_size=workers, max_size=workers))),
        events=tuple(draw(_events(workers))),
    )
    if processes:
        drawn = replace(_without(drawn, "break alone", "freeze alone"), **draw(_processes(workers)))
        if drawn.optimizer != "sgd" and (drawn.float32 or drawn.model == "mixed"):
            # As below, of some thousand: in so many rounds a difference in the 16th digit grows to one in the third.
            drawn = replace(drawn, wide=False)
    if drawn.schedule in ("batch", "cycle"):
        # torch's own schedulers do not know a group that comes later.
        drawn = _without(drawn, "add group")
    # Normalization is passed over for a micro-batch of one sample.
    late = drawn.model == "branch" or (drawn.norm and drawn.model != "cnn") or drawn.does("unfreeze")
    if drawn.momentum and drawn.kernel == "fused" and late:
        # torch's own kernel fails where a parameter of a group gets its first gradient later than others.
        drawn = replace(drawn, kernel="")
    if drawn.large and drawn.optimizer != "sgd" and (drawn.float32 or drawn.model == "mixed"):
        # Among a million gradients some are nothing but rounding, and these optimizers go by the sign.
        drawn = replace(drawn, large=False)
    if drawn.does("break alone"):
        # Whoever has left its loop does not see that the others' last `step` says True.
        drawn = replace(_without(drawn, *SET, *(() if drawn.inside else CLIP)), hooks=drawn.hooks or drawn.ema)
    if drawn.ema and drawn.norm:
        # Statistics are equal on all workers where all are at the same update.
        drawn = replace(drawn, hooks=True)
    if not processes and drawn.batch < 2 * workers:
        # A spare's script does not pass the lines of an update: what it misses comes with the coordinator's handoff.
        drawn = replace(_without(drawn, *SET), ema=drawn.ema and drawn.hooks)
    if drawn.steps and (drawn.floating or drawn.batch * 2 > drawn.samples):
        # Where each epoch is a round or two, what happens to a sample may leave none: it would never come to its end.
        drawn = _without(drawn, *SAMPLE)
    if drawn.hooks and drawn.does("oom") and not drawn.does(*SET, *UPDATE):
        # What is done in the body at an update needs `step`: who does not call it there does not do it.
        drawn = replace(drawn, skips=draw(st.booleans()))
    return drawn


def _without(habits: Habits, *what: What) -> Habits:
    return replace(habits, events=tuple(event for event in habits.events if event.what not in what))


@st.composite
def _processes(draw: Any, workers: int) -> dict[str, Any]:
    """Long enough for something to happen in it."""
    fault = st.builds(
        WorkerFault, at=st.integers(1, 12), worker=st.integers(0, workers - 1), signal=st.sampled_from(("kill", "term"))
    )
    faults = tuple(draw(st.lists(fault, max_size=min(2, workers - 1), unique_by=lambda fault: fault.worker)))
    checkpoints = draw(st.integers(0, 3)) == 1
    if checkpoints:
        at = draw(st.integers(1, 12))
        faults = tuple(WorkerFault(at=at, worker=worker) for worker in range(workers))
    return {
        "samples": draw(st.integers(40, 120)),
        "epochs": draw(st.integers(2, 4)),
        "steps": draw(st.integers(12, 40)) if draw(st.integers(0, 4)) == 1 else 0,
        "loaders": draw(st.integers(0, 1)),
        "faults": faults,
        "checkpoints": checkpoints,
        "grows": draw(st.integers(1, 8)) if draw(st.integers(0, 3)) == 1 else 0,
    }


@st.composite
def _models(draw: Any) -> dict[str, Any]:
    model = draw(st.sampled_from((*get_args(Model), "cnn")))
    return {
        "model": model,
        "norm": draw(st.booleans()),
        "channels_last": model == "cnn" and draw(st.integers(0, 2)) < 2,
        "wide": draw(st.integers(0, 5)) == 1,
        "large": draw(st.integers(0, 15)) == 1,
        "float32": draw(st.integers(0, 5)) == 1,
    }


@st.composite
def _optimizers(draw: Any) -> dict[str, Any]:
    optimizer = draw(st.sampled_from((*_EXACT, "rmsprop", "adagrad")))
    chosen: dict[str, Any] = {
        "optimizer": optimizer,
        "decay": draw(st.sampled_from((0.0, 0.01))),
        "maximize": draw(st.booleans()),
        "groups": draw(st.booleans()),
        "kernel": draw(st.sampled_from(("", "foreach") if optimizer == "rmsprop" else ("", "foreach", "fused"))),
        "clip": draw(st.sampled_from((None, 0.05))),
        "schedule": draw(st.sampled_from(("", "batch", "cycle", "epoch"))),
    }
    if optimizer in ("sgd", "rmsprop"):
        chosen["momentum"] = draw(st.sampled_from((0.0, 0.9)))
    if optimizer == "sgd" and chosen["momentum"]:
        chosen["nesterov"] = draw(st.booleans())
        chosen["dampening"] = 0.0 if chosen["nesterov"] else draw(st.sampled_from((0.0, 0.3)))
    if optimizer in ("adam", "adamw"):
        chosen["amsgrad"] = draw(st.booleans())
    return chosen


@st.composite
def _loops(draw: Any, workers: int) -> dict[str, Any]:
    return {
        "samples": draw(st.integers(8 * workers, 40)),
        "epochs": draw(st.integers(1, 2)),
        "steps": draw(st.integers(1, 9)) if draw(st.integers(0, 4)) == 1 else 0,
        "batch": draw(st.integers(1, 16)),
        "floating": draw(st.integers(0, 3)) == 1,
        "delay": draw(st.sampled_from((0, 1, "auto"))),
        "correction": draw(st.sampled_from(("lookahead", "none"))),
        "scaler": draw(st.integers(0, 4)) == 1,
        "ema": draw(st.integers(0, 3)) == 1,
        "hooks": draw(st.booleans()),
        "inside": draw(st.booleans()),
        "tokens": draw(st.booleans()),
        "evaluates": draw(st.booleans()),
    }


@st.composite
def _events(draw: Any, workers: int) -> list[Event]:
    one = st.builds(Event, at=st.integers(0, 8), what=st.sampled_from(_EVENTS), place=st.integers(0, workers - 1))
    return [draw(one) for _ in range(draw(st.sampled_from((0, 1, 2, 3, 4))))]
