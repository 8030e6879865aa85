"""The journal's readers on journals that were damaged, or written by somebody who means harm.

Question  Is a journal either read as it was written, or refused?
Holds     Damaged bytes are refused with ``JournalError``, or what is read is what was written up to there. A journal
          with right checksums and wrong contents is refused, or audited to the end without an exception. A coordinator
          that takes one over goes on from it and appends to it, or says why not.
Source    ours; docs/reliability.md. The valid journals are those of simulated runs with faults.
"""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.fuzz.mutation import bent, deformed
from benchmarks.fuzz.surface import Volley
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.status import Status
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.core.membership import events
from pliant.errors import JournalError, UsageError
from pliant.testing.scenes import NAMES, drawn
from pliant.testing.simulation import Simulation

SEEDS = 1
"""Simulated runs per scene: with faults of every kind, in every policy."""

MOST_LINES = 48
"""Of a valid journal: longer ones take longer and have nothing else in them."""

HUGE = (b"9" * 30, b"9" * 400, b"9" * 5000, b"1e400", b"-9999999999999999999", b"1.7976931348623157e308")


def valid_journals() -> list[bytes]:
    """The journals of simulated runs."""
    found: list[bytes] = []
    for name in NAMES:
        for seed in range(SEEDS):
            simulation = Simulation(drawn(name, seed), seed)
            if simulation.run().error is not None:
                raise AssertionError(f"{name} {seed} failed by itself")
            lines = bytes(simulation.host.disk.content).splitlines(keepends=True)
            found.append(b"".join(lines[:MOST_LINES]))
    return found


def chained(payloads: list[bytes]) -> bytes:
    """Lines with right checksums."""
    chain, lines = 0, list[bytes]()
    for payload in payloads:
        text, chain = journal.line(payload, chain)
        lines.append(text)
    return b"".join(lines)


class JournalSurface:
    """Bytes and records against the journal's readers."""

    name = "journal"

    def __init__(self) -> None:
        self._journals = valid_journals()
        self._payloads = [
            [line[: line.rindex(b',"crc":"')] + b"}" for line in text.splitlines()] for text in self._journals
        ]
        self._known = {text: list(journal.read(text.splitlines(keepends=True))) for text in self._journals}
        self._directory = TemporaryDirectory(prefix="pliant-fuzz-")
        self._file = Path(self._directory.name) / "journal.jsonl"

    def close(self) -> None:
        self._directory.cleanup()

    def fire(self, chance: Random) -> Volley:
        """A few journals."""
        volley = Volley()
        for _ in range(4):
            if chance.random() < 0.4:
                accepted = self._read(chance)
            elif chance.random() < 0.9:
                # Running the decision code again takes ten times as long as all the rest.
                accepted = self._audit(self._forged(chance), replay=chance.random() < 0.3)
            else:
                accepted = self._resume(chance)
            volley.count(accepted)
        return volley

    def _read(self, chance: Random) -> bool:
        """Damage, seen by the checksums alone."""
        whole = chance.choice(self._journals)
        text = bent(chance, whole, self._journals)
        try:
            records = list(journal.read(text.splitlines(keepends=True)))
        except JournalError:
            return False
        if not any(records == known[: len(records)] for known in self._known.values()):
            raise AssertionError(f"damage went unnoticed: {text!r}")
        return True

    def _forged(self, chance: Random) -> bytes:
        """Wrong contents with right checksums."""
        payloads = list(chance.choice(self._payloads))
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            at, other = chance.randrange(len(payloads)), chance.randrange(len(payloads))
            match chance.randrange(10):
                case 0 if len(payloads) > 1:
                    del payloads[at]
                case 1:
                    payloads.insert(at, payloads[other])
                case 2:
                    payloads[at], payloads[other] = payloads[other], payloads[at]
                case 3:
                    payloads[at:] = chance.choice(self._payloads)[at:] or payloads[at:]
                case _:
                    payloads[at] = _payload(deformed(chance, msgspec.json.decode(payloads[at])))
        if chance.random() < 0.1:
            at = chance.randrange(len(payloads))
            payloads[at] = payloads[at].replace(b":1,", b":" + chance.choice(HUGE) + b",")
        return chained(payloads)

    def _audit(self, text: bytes, *, replay: bool) -> bool:
        try:
            records = list(journal.read(text.splitlines(keepends=True)))
        except JournalError:
            return False
        report = audit(records, replay=replay)
        msgspec.json.encode(report.summary)
        return True

    def _resume(self, chance: Random) -> bool:
        """A new coordinator finds it on disk."""
        torn = bent(chance, chance.choice(self._journals), self._journals)
        self._file.write_bytes(torn if chance.random() < 0.3 else self._forged(chance))
        try:
            file, account = JournalFile.reopened(self._file)
        except (JournalError, UsageError):
            return False
        now_s = 100.0
        coordinator = Coordinator.resumed(RunSpec("sim", "x", "0.1.0"), file, account, 2, lambda: now_s, 1e9)
        for _ in range(3):
            now_s += 0.5
            coordinator.handle(events.Tick(), now_s)
        msgspec.json.decode(coordinator.status(), type=Status)
        before = file.place.lines
        file_records = list(file.since(journal.BEGINNING))
        file.append([journal.EndRecord("over", False)])
        file.close()
        again = list(journal.read(self._file.read_bytes().splitlines(keepends=True)))
        if again[:before] != list(file_records) or len(again) < before + 1:
            raise AssertionError("what was appended does not go on from what was read")
        return True


def _payload(value: Any) -> bytes:
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
        return b"{}"
    return text if text[-1:] == b"}" and text[:1] == b"{" and len(text) > 2 else b'{"kind":"round"}'
