"""Whatever bytes there are: the readers return a value or their one documented error."""

from __future__ import annotations

import contextlib
import io
import struct
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.control import messages
from pliant.core import tickets
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.errors import JournalError
from pliant.tensors import framing, handoff

EXAMPLES = settings(max_examples=150)
LEAVES = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 7, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 0.0, -1.5, 1e308, 5e-324),
        *("", "w0", "w2.2", "train", "evaluate", "linear", "0.1.0", "float32", "x" * 101, "\x00", "9" * 5000),
    ]
)
VALUES = LEAVES | st.lists(LEAVES | st.lists(LEAVES, max_size=3), max_size=3) | st.just({"t": ["float32", [2]]})


@st.composite
def hostile(draw: st.DrawFn, kinds: list[Any], tag_field: str) -> dict[str, Any]:
    """Something with the tag and the fields of a message, and any values."""
    kind = draw(st.sampled_from(kinds))
    values = draw(st.lists(VALUES, min_size=len(kind.__struct_fields__), max_size=len(kind.__struct_fields__)))
    return {tag_field: kind.__struct_config__.tag, **dict(zip(kind.__struct_fields__, values, strict=True))}


FROM_WORKER = list(messages.FromWorker.__args__)
FROM_AGENT = list(messages.FromAgent.__args__)
RECORDS = list(journal.Record.__args__)


@EXAMPLES
@given(st.binary(max_size=200) | hostile(FROM_WORKER + FROM_AGENT, "type").map(msgspec.msgpack.encode))
def test_a_frame_is_a_message_or_none(frame: bytes) -> None:
    for decode in (messages.decode_from_worker, messages.decode_from_agent):
        try:
            message = decode(frame)
        except msgspec.DecodeError:
            continue
        # What was let in can be told on.
        messages.encode(message)


@EXAMPLES
@given(st.lists(hostile(RECORDS, "kind"), max_size=3))
def test_a_journal_is_audited_or_refused(values: list[dict[str, Any]]) -> None:
    payloads = [journal.encode(journal.RunRecord("job", "0", 0.0)), *(msgspec.json.encode(value) for value in values)]
    chain, lines = 0, list[bytes]()
    for payload in payloads:
        text, chain = journal.line(payload, chain)
        lines.append(text)
    try:
        records = list(journal.read(lines))
    except JournalError:
        return
    assert len(records) == len(lines)
    audit(records)


@EXAMPLES
@given(st.binary(max_size=300))
def test_any_bytes_are_no_journal(text: bytes) -> None:
    with contextlib.suppress(JournalError):
        assert list(journal.read(text.splitlines(keepends=True))) == []


@EXAMPLES
@given(VALUES | st.dictionaries(st.sampled_from(["t", "u", "d", "f", "x"]), VALUES, max_size=1), st.binary(max_size=64))
def test_a_state_is_whole_or_broken(skeleton: Any, rest: bytes) -> None:
    text = msgspec.json.encode(skeleton)
    sent = io.BytesIO()
    framing.write_chunks(sent, memoryview(text))  # type: ignore[arg-type]
    reader = io.BytesIO(sent.getvalue() + rest)
    try:
        state = handoff._read_state(reader, handoff._State(1, len(text), len(rest)))
    except framing.StreamBroken:
        return
    assert isinstance(state, dict)


TICKET = tickets.Ticket(1, 1, 1, tickets.Kind.TRAIN)


@EXAMPLES
@given(st.binary(min_size=0, max_size=len(tickets.pack(TICKET, 0, 16))))
def test_bytes_are_a_ticket_or_a_value_error(data: bytes) -> None:
    try:
        ticket, _ = tickets.unpack(data)
    except ValueError:
        return
    assert struct.pack("<q", ticket.era) == data[:8]
