"""The append-only record of a run: its form on disk.

Question  What is written down of eras, phases and rounds, and how is damage recognised?
Holds     One JSON object per line, the last field its checksum, chained over all lines before it: a line
          that was changed, dropped or swapped breaks the chain. Floats are written so that they read back
          bit for bit. Only what cannot be computed from earlier lines is written, plus what a reader needs
          to check it (spans, batch, rate).
Source    ours; docs/design/0003-journal.md.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Union

import msgspec

from pliant.core.group_state import PERMUTATION
from pliant.core.tickets import Flag
from pliant.errors import JournalError

JOURNAL = "journal.jsonl"
"""The file's name in a run directory."""

VERSION = 1
NONFINITE = int(Flag.NONFINITE)

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""What no counter of a run reaches, every float holds exactly, and sums of many still fit into a machine word."""

Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Sums of times stay finite."""

Ahead = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
"""Micro-batches that a loader wants to know in advance: as many are dealt to it."""

Name = Annotated[str, msgspec.Meta(max_length=100)]
Hex = Annotated[str, msgspec.Meta(pattern="^([0-9a-f][0-9a-f])*$", max_length=100_000)]
Delay = Annotated[int, msgspec.Meta(ge=-1, le=1)]
ExitStatus = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class RunRecord(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    """The first line."""

    job: str
    library: str
    started_unix_s: float
    version: Count = VERSION
    script: str = ""
    """the digest of the script's file; empty: not known (a module)"""
    arguments: str = ""
    """the digest of its arguments"""


class EntryLine(msgspec.Struct, frozen=True, array_like=True):
    """What a member brought into an unplanned era, per open phase from the outermost on."""

    active: bool
    dropped: list[Count]
    kept: list[Count]
    points: list[tuple[Count, Count, Count, Count]] = []
    """where the dropped contributions were computed (``tickets.Point``): look-ahead points were built from them"""


class ChangeLine(msgspec.Struct, frozen=True, array_like=True):
    """Who came, went or was lost, when and why: for people."""

    unix_s: Seconds
    kind: Name
    worker: Name
    text: str


class EraRecord(msgspec.Struct, frozen=True, tag="era", tag_field="kind", omit_defaults=True):
    """A roster takes effect, after the records before it."""

    era: Count
    roster: list[Name]
    entries: list[EntryLine] | None = None
    """of an unplanned era; None: the first one, or a planned one"""
    void: Count = 0
    """the round number that an unplanned era passes over: a lost worker may have applied it"""
    unix_s: Seconds = 0.0
    """when it was written down: this and what follows the coordinator adds; nothing is decided by it"""
    changes: list[ChangeLine] = []
    """since the era before, as far as this coordinator has seen them"""


class PolicyRecord(msgspec.Struct, frozen=True, tag="policy", tag_field="kind"):
    """What the decisions depend on besides the tickets: the settings all workers agreed on."""

    batch: Count
    floating: bool
    at_most: Count | None
    delay: Delay
    rule: str
    """as ``core.tuning.rates.Rule`` writes itself"""
    momentum: float
    samples_limit: Count | None = None
    trial: Count = 0
    """rounds for which a delay is tried, where it is decided from round to round"""
    settings: dict[str, str] = {}
    """all that the scripts must agree on, as text"""
    parameters: str = ""
    """what is trained: how many tensors and numbers, and a checksum of their names, shapes and types"""
    updates_limit: Count | None = None
    order: Name = PERMUTATION
    """how the samples of an epoch are ordered; journals that do not say are of the time before there was a choice"""


class PhaseRecord(msgspec.Struct, frozen=True, tag="phase", tag_field="kind", omit_defaults=True):
    """All workers entered a phase; per worker its micro-batch size and look-ahead of its loader."""

    phase: Count
    task: str
    epoch: Count
    length: Count
    limit: Count
    """positions to be used, below ``length`` only where ``epochs(samples=…)`` ends inside an epoch"""
    sizes: list[Count]
    ahead: list[Ahead]
    order: Count
    absent: list[Count] = []
    """members whose script has not made this call: they go along without samples"""
    ready: list[Count] = []
    """followers that hold the whole state from here on"""
    inner: bool = False
    """an ``evaluate`` in the body of the loop before it, whose phase had just ended"""
    trained: list[Hex] = []
    """per worker the set of parameters that its script trains (``core.trained_set``), where one is not the agreed
    one"""


class TicketLine(msgspec.Struct, frozen=True, array_like=True):
    """A ticket as journaled, in the order of the roster."""

    spans: list[tuple[Count, Count]]
    micro_batches: Count
    samples: Count
    weight: float
    busy_s: Seconds
    idle_s: Seconds
    sum_s: Seconds
    cost_s: Seconds
    loss_sum: float
    squared_norm: float
    scale: float
    flags: Count
    point: tuple[Count, Count, Count, Count] | None = None
    """where it was computed (``tickets.Point``); None: it went along, or was written by an older Pliant"""


class DriftLine(msgspec.Struct, frozen=True, array_like=True):
    """Some members' weights were not those of the others: ``core.drift.Drift``."""

    round: int
    """after which they differed"""
    digests: list[tuple[int, int, int]]
    """member, arithmetic and digest of each that was compared"""
    healed: list[int]
    """members that take the state over again"""
    expelled: list[int]
    """members that are thrown out"""
    donor: int
    sketches: list[float] = []
    """of each that was compared, where they compute differently"""


class RoundRecord(msgspec.Struct, frozen=True, tag="round", tag_field="kind", omit_defaults=True):
    """One applied round. ``factor`` multiplies the schedule's rate; ``rate`` is what the first group got."""

    era: Count
    round: Count
    phase: Count
    batch: Count
    weight: float
    factor: float
    rate: float
    loss: float | None
    applied: bool
    """false: samples spent without an update, because a part was not finite or nothing had any weight"""
    samples_total: Count
    tickets: list[TicketLine]
    entered: list[tuple[Count, Count, Ahead]] = []
    """who became ready with this exchange: member, micro-batch size, look-ahead of its loader"""
    delay: Delay | None = None
    """was decided anew: in force from here on, until something changes"""
    harvests: tuple[float | None, float | None] | None = None
    """why: what the group made of its workers with delay 0 and 1"""
    momentum: float | None = None
    """in force, where a scheduler has moved it"""
    measured: tuple[Count, float] | None = None
    """an earlier round and the squared norm of its mean gradient, as the tickets brought it"""
    noise_scale: float | None = None
    """after that; only then, and only where it is known and finite"""
    scheduled_total: float | None = None
    """where it is not ``samples_total``: what the schedule has counted (AdaScale)"""
    drift: DriftLine | None = None
    """whose weights differ, as the tickets of this round have shown"""
    clip_norm: float | None = None
    """the bound on the gradient's norm in force, where the scripts have set one since ``join``; 0: none"""
    trained: list[Hex] = []
    """per worker the set that its contribution was computed for, where one is not what was agreed before"""
    wanted: list[Hex] = []
    """per worker the set that its script trained when it handed in, likewise"""

    @property
    def skipped(self) -> bool:
        """Whether some worker's part was not finite (a round without any weight is not applied either)."""
        return any(ticket.flags & NONFINITE for ticket in self.tickets)


class ExchangeRecord(msgspec.Struct, frozen=True, tag="exchange", tag_field="kind", omit_defaults=True):
    """One exchange of an ``evaluate``: samples spent without an update."""

    era: Count
    phase: Count
    batch: Count
    tickets: list[TicketLine]
    entered: list[tuple[Count, Count, Ahead]] = []
    """who became ready with this exchange: member, micro-batch size, look-ahead of its loader"""
    sums: list[list[tuple[Name, float, float]]] = []
    """where several means are measured: name, sum and count of each, in the order of the roster"""


class PhaseEndRecord(msgspec.Struct, frozen=True, tag="phase_end", tag_field="kind", omit_defaults=True):
    """A phase is drained. ``cut`` are positions a ``break`` left out; ``result`` is evaluate's mean."""

    phase: Count
    cut: list[tuple[Count, Count]]
    result: float | None = None
    """of several means the one that stands for all"""
    results: dict[str, float | None] = {}
    """where several means were measured: each by its name"""


class CheckpointRecord(msgspec.Struct, frozen=True, tag="checkpoint", tag_field="kind"):
    """A checkpoint is complete. It exists from here on; those that no record names do not."""

    name: Name
    records: Count
    """of the workers, before it: what it is the outcome of"""
    round: Count


class RewindRecord(msgspec.Struct, frozen=True, tag="rewind", tag_field="kind"):
    """Nobody was left who held the state: the run goes on from a checkpoint. What came after that is void."""

    name: Name
    records: Count
    """of the workers, that stay: voided ones keep their numbers"""
    worker: Name
    """who has read it"""
    round: Count
    """the next one has a higher number than this: that of the checkpoint, or of the last void one"""


class FinishingRecord(msgspec.Struct, frozen=True, tag="finishing", tag_field="kind"):
    """A worker has come to the end of its script: the run has its result, and is not begun again, whoever dies now."""

    worker: Name


class GapRecord(msgspec.Struct, frozen=True, tag="gap", tag_field="kind"):
    """Records of the workers are missing here: the disk has lost them, and nobody keeps them any more."""

    first: Count
    """the number of the first one"""
    next: Count
    """the number of the record that follows"""
    reason: str = ""


class EndRecord(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """The last line of a run that ended, well or not: it closes the journal."""

    reason: str
    completed: bool
    exit_status: ExitStatus = 0
    """with which launchers end"""
    rounds: Count = 0
    """that count, as all that follows: a reader compares it with what it has read"""
    samples: Count = 0
    lines: Count | None = None
    """before this one; None: written by an older Pliant, so that the end cannot be proved"""
    digest: str = ""
    """over those lines: ``JournalPosition.digest``"""


Record = Union[  # noqa: UP007 - msgspec reads it at run time
    RunRecord,
    EraRecord,
    PolicyRecord,
    PhaseRecord,
    RoundRecord,
    ExchangeRecord,
    PhaseEndRecord,
    CheckpointRecord,
    RewindRecord,
    FinishingRecord,
    GapRecord,
    EndRecord,
]


def digest_of(*parts: bytes) -> str:
    """A short name for contents, the same for the same ones."""
    return hashlib.sha256(b"".join(b"%d " % len(part) + part for part in parts)).hexdigest()[:16]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_CHECKSUM = b',"crc":"%08x"}\n'
_CHECKSUM_LENGTH = len(_CHECKSUM % 0)


FROM_WORKERS = (EraRecord, PolicyRecord, PhaseRecord, RoundRecord, ExchangeRecord, PhaseEndRecord, RewindRecord)
"""Made by all workers alike, and numbered; runs, checkpoints, finishes and ends are the coordinator's own to write."""


def effective(records: Iterable[Record]) -> list[Record]:
    """The history that counts: without what a rewind has gone back behind, and the ends before it."""
    return [record for _, record in numbered(records)]


def numbered(records: Iterable[Record]) -> list[tuple[int, Record]]:
    """The same, each with how many records of the workers were written before it, void ones too."""
    listed = list(records)
    rewinds = [(place, each.records) for place, each in enumerate(listed) if isinstance(each, RewindRecord)]
    return list(counting(listed, rewinds))


def counting(records: Iterable[Record], rewinds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Record]]:
    """The same of a stream, in which these rewinds will come: the place of each and how many records it keeps."""
    return ((number, record) for number, record, counts in judged(records, rewinds) if counts)


def judged(records: Iterable[Record], rewinds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Record, bool]]:
    """All records of a stream, each with its number and whether it counts."""
    number = 0
    # Going back twice keeps what both keep.
    limits: list[tuple[int, int]] = []
    for place, kept in reversed(rewinds):
        limits.append((place, min(kept, limits[-1][1]) if limits else kept))
    for place, record in enumerate(records):
        while limits and limits[-1][0] <= place:
            limits.pop()
        yield number, record, not limits or _stays(number, record, limits[-1][1])
        number = next_number(number, record)


def next_number(number: int, record: Record) -> int:
    """How many records of the workers there are after this one, missing ones included."""
    if isinstance(record, GapRecord):
        return max(number, record.next)
    return number + isinstance(record, FROM_WORKERS)


def _stays(number: int, record: Record, records: int) -> bool:
    """Whether a record is part of the history up to so many of the workers'."""
    if isinstance(record, CheckpointRecord):
        # Written after what it is of.
        return record.records <= records
    return number < records and not isinstance(record, FinishingRecord | EndRecord)


def encode(record: Record) -> bytes:
    """The record as a JSON object, without checksum."""
    return _encoder.encode(record)


def decode(payload: bytes) -> Record:
    """The inverse of ``encode``."""
    try:
        return _decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        # What msgspec raises is a ValueError, but for nesting without end.
        raise JournalError(f"not a journal record: {error}") from error


def line(payload: bytes, chain: int) -> tuple[bytes, int]:
    """The line to append for ``payload``, and the chain's new value; the first line's chain is 0."""
    checksum = zlib.crc32(payload, chain)
    return payload[:-1] + _CHECKSUM % checksum, checksum


def unsealed(text: bytes, chain: int, number: int = 1) -> bytes:
    """The inverse of ``line``. Raises ``JournalError`` with the line's number where it is none or does not fit."""
    if len(text) <= _CHECKSUM_LENGTH or not text.endswith(b"\n"):
        raise JournalError(f"line {number} is incomplete: the journal was cut off while being written")
    payload = text[:-_CHECKSUM_LENGTH] + b"}"
    if text != line(payload, chain)[0]:
        raise JournalError(f"line {number} does not fit its checksum: the journal was changed or damaged")
    return payload


class JournalPosition(msgspec.Struct, frozen=True):
    """A place in a journal: what is before it."""

    size: int = 0
    """bytes"""
    lines: int = 0
    chain: int = 0
    """the checksum of the line before it"""
    digest: str = ""
    """over all lines before it: SHA-256 of the digest before the last line and of that line, in hexadecimal digits"""

    def after(self, text: bytes) -> JournalPosition:
        """The place behind this line."""
        # ``"xxxxxxxx"}`` and the newline: the checksum of the last line is where the chain goes on.
        chain = int(text[-11:-3], 16)
        digest = hashlib.sha256(self.digest.encode() + text).hexdigest()
        return JournalPosition(self.size + len(text), self.lines + 1, chain, digest)


BEGINNING = JournalPosition()


def read(lines: Iterable[bytes]) -> Iterator[Record]:
    """The records of a journal, each checked. Raises ``JournalError`` naming the first bad line."""
    for _, record in placed(lines):
        yield record


def placed(lines: Iterable[bytes], place: JournalPosition = BEGINNING) -> Iterator[tuple[JournalPosition, Record]]:
    """The same from a place on, each with the place behind it."""
    for text in lines:
        number = place.lines + 1
        payload = unsealed(text, place.chain, number)
        record = decode(payload)
        if number == 1 and (not isinstance(record, RunRecord) or record.version != VERSION):
            raise JournalError(f"not a version {VERSION} journal: read it with the Pliant that wrote it")
        if isinstance(record, EndRecord) and not _closes(record, place):
            raise JournalError(f"line {number} closes a journal of other lines: something before it was changed")
        place = place.after(text)
        yield place, record


def _closes(end: EndRecord, place: JournalPosition) -> bool:
    """Whether it was written at this place; an older Pliant has not said."""
    return end.lines is None or (end.lines, end.digest) == (place.lines, place.digest)


def closing(end: EndRecord, place: JournalPosition) -> EndRecord:
    """The end as it is written at this place."""
    return msgspec.structs.replace(end, lines=place.lines, digest=place.digest)


_REWIND = b'{"kind":"rewind",'


def rewinds_in(lines: Iterable[bytes]) -> list[tuple[int, int]]:
    """The place of each rewind among the lines, and how many records it keeps; a line that is none is passed over."""
    found: list[tuple[int, int]] = []
    for place, text in enumerate(lines):
        if text.startswith(_REWIND) and text.endswith(b"\n"):
            record = decode(text)
            if isinstance(record, RewindRecord):
                found.append((place, record.records))
    return found
