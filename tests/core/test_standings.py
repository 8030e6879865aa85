"""Who has just begun to compute."""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core import standings
from pliant.core.group_state import Policy, Standing, founded
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId

ROSTER = tuple(WorkerId(name) for name in ("w0", "w1", "w2"))
FOLLOWING, ACTIVE = Standing.FOLLOWING, Standing.ACTIVE


def tickets(*micro_batches: int) -> list[Ticket]:
    return [Ticket(1, 0, 0, Kind.TRAIN, Flag.NONE, micro_batches=count) for count in micro_batches]


def test_who_has_begun_is_fresh_until_it_adds_something_or_is_gone() -> None:
    after = founded(Policy(8), 1, ROSTER)
    before = replace(after, standings=(ACTIVE, FOLLOWING, FOLLOWING))
    # Spares add nothing either, and are not fresh.
    assert standings.fresh(frozenset(), after, after, tickets(1, 0, 0)) == frozenset()
    begun = standings.fresh(frozenset(), before, after, tickets(1, 0, 0))
    assert begun == {ROSTER[1], ROSTER[2]}
    left = standings.fresh(begun, after, after, tickets(1, 1, 0))
    assert left == {ROSTER[2]}
    assert standings.fresh(
        left, after, replace(after, standings=(ACTIVE, ACTIVE, Standing.LEAVING)), tickets(1, 1, 0)
    ) == (frozenset())
