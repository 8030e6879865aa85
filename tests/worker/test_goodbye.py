"""Who says goodbye has left its groups: its death is no longer noticed, so no exchange may depend on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn
from torch.optim import SGD

from numerics.trainings import training_of
from pliant.core.group_state import Policy, Standing, founded
from pliant.errors import Left
from pliant.types import WorkerId
from pliant.worker.collectives import Collectives
from pliant.worker.elastic.enrolment import Solo
from pliant.worker.elastic.transition import EraTransition
from pliant.worker.journal import NullJournal
from pliant.worker.loop import Worker

ME, OTHER = WorkerId("w0"), WorkerId("w1")


class Farewell(Solo):
    """Notes what happens, in order."""

    enlisted = False

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []
        self.place = SimpleNamespace(taken_up=lambda plan: None)

    def finish(self, *, left: bool, over: bool = False) -> None:
        self.happened.append(f"goodbye, {left=} {over=}")


def channel_of(farewell: Farewell) -> Any:
    """A group whose exchanges are over at once."""
    return SimpleNamespace(
        leave=lambda: farewell.happened.append("left the group"), gather=lambda packed: SimpleNamespace(over=True)
    )


def test_a_worker_without_the_outcome_leaves_the_group_before_it_says_goodbye() -> None:
    farewell = Farewell()
    group = replace(founded(Policy(8), 1, (ME, OTHER)), standings=(Standing.FOLLOWING, Standing.ACTIVE))
    model = nn.Linear(2, 1)
    training = training_of(model, SGD(model.parameters(), lr=0.1))
    worker = Worker(ME, group, channel_of(farewell), training, NullJournal(), farewell)
    with pytest.raises(Left):
        worker.leave_if_late()
    assert farewell.happened == ["left the group", "goodbye, left=True over=True"]
    worker.close()


def test_a_worker_that_is_on_no_roster_any_more_leaves_the_group_before_it_says_goodbye() -> None:
    farewell: Any = Farewell()
    member: Any = SimpleNamespace(ticket=lambda kind, flags: None, packed=lambda ticket: b"")
    lookout: Any = SimpleNamespace(wait_blindly=lambda over, at_most_s: farewell.happened.append(f"ended: {over()}"))
    checkpoints: Any = None
    transition = EraTransition(member, farewell, Collectives(channel_of(farewell)), lookout, checkpoints)
    with pytest.raises(Left):
        transition.switch((1, 2))
    # It was heard to the end: the others learn of the switch from its last ticket.
    assert farewell.happened[0] == "ended: True"
    assert "left the group" in farewell.happened[1:-1]
    assert farewell.happened[-1] == "goodbye, left=True over=False"
