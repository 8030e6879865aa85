"""A ticket travels as bytes and comes back as it was: core.tickets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pliant.core.tickets import Flag, Kind, Ticket, pack, unpack

WHOLE = st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(allow_nan=False)
TICKETS = st.builds(
    Ticket,
    era=WHOLE,
    round=WHOLE,
    phase=WHOLE,
    kind=st.sampled_from(Kind),
    flags=st.integers(0, 7).map(Flag),
    epoch=WHOLE,
    length=WHOLE,
    order=WHOLE,
    size=WHOLE,
    ahead=WHOLE,
    micro_batches=WHOLE,
    samples=WHOLE,
    weight=REAL,
    busy_s=REAL,
    idle_s=REAL,
    sum_s=REAL,
    loss_sum=REAL,
    squared_norm=REAL,
    scale=REAL,
    digest=st.integers(0, 2**64 - 1),
    trained=st.binary(max_size=40),
    wanted=st.binary(max_size=40),
)

BLANK = Ticket(1, 1, 1, Kind.TRAIN)


@given(TICKETS, st.integers(0, 300), st.data())
def test_packing_is_exact_and_of_one_size(ticket: Ticket, bits: int, data: st.DataObject) -> None:
    bitmap = data.draw(st.integers(0, 2**bits - 1))
    packed = pack(ticket, bitmap, bits)
    assert len(packed) == len(pack(BLANK, 0, bits)) + len(ticket.trained + ticket.wanted)
    again, again_bitmap = unpack(packed)
    assert again == ticket
    assert again_bitmap == bitmap
    assert type(again.kind) is Kind
    assert type(again.flags) is Flag


def test_an_undefined_loss_travels_too() -> None:
    ticket, _ = unpack(pack(Ticket(1, 1, 1, Kind.TRAIN, loss_sum=float("nan")), 0, 0))
    assert ticket.loss_sum != ticket.loss_sum
