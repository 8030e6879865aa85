"""Journals of real runs, and what an audit has found in them.

Question  Are journals that were written some time ago still read, written and judged as they were then?
Holds     Every one is of a run of tests/process; the only text in it that depends on the machine, the path of the
          checkpoints, is replaced, and the lines are sealed anew. ``python tests/core/stored.py`` judges them anew,
          after a change that means to judge otherwise.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec

from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit

JOURNALS = Path(__file__).parent / "journals"
VERDICTS = JOURNALS / "verdicts.json"


def names() -> list[str]:
    return sorted(path.name.removesuffix(".jsonl.gz") for path in JOURNALS.glob("*.jsonl.gz"))


def lines(name: str) -> list[bytes]:
    """As they are on disk."""
    return gzip.decompress((JOURNALS / f"{name}.jsonl.gz").read_bytes()).splitlines(keepends=True)


def verdict(name: str) -> Any:
    """What the audit finds, the decision code run again."""
    report = audit(journal.effective(journal.read(lines(name))))
    return json.loads(msgspec.json.encode(report))


def verdicts() -> dict[str, Any]:
    return json.loads(VERDICTS.read_text())


if __name__ == "__main__":
    found = {name: verdict(name) for name in names()}
    VERDICTS.write_text(json.dumps(found, indent=1) + "\n")
