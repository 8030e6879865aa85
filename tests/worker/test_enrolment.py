"""What a worker tells the coordinator, and when it may not."""

from typing import Any

import pytest

from pliant.control.messages import Call
from pliant.worker.elastic.enrolment import Enrolment


class Line:
    """A connection that counts what it is asked to send."""

    def __init__(self) -> None:
        self.asked = 0

    def send_lines_again(self) -> None:
        self.asked += 1


class Place:
    """A place in the run, with a connection of its own."""

    def __init__(self) -> None:
        self.link: Any = Line()

    def enlist(self, call: Call | None) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("evicted", [False, True])
def test_a_worker_that_was_taken_off_the_roster_sends_no_lines_of_its_last_era(evicted: bool) -> None:
    places: list[Any] = [Place(), Place()]
    enrolment = Enrolment(places[0], lambda: places[1])
    enrolment.enlist(None)
    if evicted:
        enrolment.come_back()
    enrolment.send_lines_again()
    assert [place.link.asked for place in places] == ([0, 0] if evicted else [1, 0])
