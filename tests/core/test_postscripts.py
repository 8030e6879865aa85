"""What is said after the ticket completes it, for everybody alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pliant.core import postscripts
from pliant.core.tickets import Flag, Kind, Ticket

BITS = 7
seconds = st.floats(0, 1e6)
said = st.tuples(seconds, st.one_of(st.none(), st.floats(0, 1e30)), st.integers(0, 2**BITS - 1))


def ticket(flags: Flag = Flag.NONE) -> Ticket:
    return Ticket(1, 2, 3, Kind.TRAIN, flags)


@given(st.lists(st.one_of(st.none(), said), min_size=1, max_size=5))
def test_added_up_it_says_everybodys(members: list[tuple[float, float | None, int] | None]) -> None:
    rows = [
        postscripts.nothing(len(members), BITS)
        if one is None
        else postscripts.written(len(members), place, BITS, busy_s=one[0], squared_norm=one[1], bitmap=one[2])
        for place, one in enumerate(members)
    ]
    summed = [sum(column) for column in zip(*rows, strict=True)]
    tickets, bitmap = postscripts.read(summed, [ticket(Flag.LEAVING)] * len(members))
    union = 0
    for one, found in zip(members, tickets, strict=True):
        busy_s, norm, bits = one or (0.0, 0.0, 0)
        union |= bits
        assert found.busy_s == busy_s
        assert found.squared_norm == (norm or 0.0)
        assert found.flags == Flag.LEAVING | (Flag.NONFINITE if norm is None else Flag.NONE)
    assert bitmap == union


def test_a_quiet_ticket_stays_quiet() -> None:
    values = postscripts.written(1, 0, BITS, busy_s=1.0, squared_norm=2.0, bitmap=0)
    assert postscripts.read(values, [ticket()])[0][0].flags is Flag.NONE
