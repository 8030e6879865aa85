"""What a worker says of itself between two eras: worker.elastic.rendezvous, and what is handed round at an era's
start."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pliant.control.link import Position
from pliant.control.mailbox import Mailbox
from pliant.control.messages import EraStart, Signature, Welcome
from pliant.core.finished_calls import NONE
from pliant.core.group_state import Policy, founded
from pliant.core.tuning.rates import linear
from pliant.types import WorkerId
from pliant.worker.elastic.rendezvous import Rendezvous
from pliant.worker.snapshot import GroupSnapshot, decoded, encoded


class Line:
    """To a coordinator that starts another era whenever one is over."""

    worker = "w1"

    def __init__(self) -> None:
        self.mailbox = Mailbox(Welcome("job", "w1", 1, 5.0, 0, running=True))
        # Waiting for the user's state: it holds the weights, and not all.
        self.position = Position(era=1, exchange=7, round=7, active=False)
        self.said: list[tuple[int, int, bool, bool]] = []

    def stopped(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None:
        self.said.append((era, exchange, active, whole))
        self.mailbox.take(EraStart(1, era + 1, era + 1, ["w1", "w2"], "w1", exchange, {}))


class Formed:
    over = True

    def __init__(self, *, fails: bool) -> None:
        self.failed = fails

    def result(self) -> Any:
        if self.failed:
            raise RuntimeError("connection refused")
        return "a group"

    def abandon(self) -> None: ...


def test_the_last_holder_of_the_weights_says_so_again_when_a_group_cannot_be_formed() -> None:
    link: Any = Line()
    attempts: list[int] = []

    def form(attempt: int, place: int, members: int) -> Any:
        attempts.append(attempt)
        return Formed(fails=len(attempts) < 3)

    place = Rendezvous(link, form, Signature("", [], {}), "")
    place.stop(1, 7, active=True, whole=False)
    seat = place.next_seat(1, lambda plan: None)
    assert seat.era == 4
    assert link.said == [(1, 7, True, False), (2, 7, True, False), (3, 7, True, False)]


@pytest.mark.parametrize("live", [0, 1, 2**64 - 1, 2**64, 1 << 158 | 5])
def test_any_number_of_buffers_is_handed_round_and_written_down(live: int) -> None:
    group = founded(Policy(8, floating=False, at_most=None, delay=0, rule=linear(), momentum=0.0), 1, (WorkerId("w0"),))
    handed = GroupSnapshot(group, 3, live, undrained=False)
    assert decoded(encoded(handed, known=0), NONE) == handed
    assert msgspec.json.decode(msgspec.json.encode(handed), type=GroupSnapshot) == handed
