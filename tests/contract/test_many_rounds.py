"""The coordinator after very many rounds of eight workers, which a generator makes and the real one writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.coordinating import PER_TICK, succeed

from pliant.coordinator.state_keeper import KEEP_BYTES

ROOT = Path(__file__).parents[2]
LINE_BYTES = 1000
"""of a round: a bit more than it has"""


def test_what_a_successor_reads_does_not_grow_with_the_journal() -> None:
    """No more than what is written between two state files, a tick's lines included."""
    some, many = (succeed(count, lambda text: None).figures for count in (2_000, 20_000))
    assert many["rounds"] == 20_000 and many["journal_mb"] > 9 * some["journal_mb"]
    for found in (some, many):
        assert 0 < found["read_mb"] * 1e6 < KEEP_BYTES + 2 * PER_TICK * LINE_BYTES


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_rounds_are_not_too_many() -> None:
    """In a process of its own: memory is that of the coordinators alone."""
    code = (
        "import json, sys; from benchmarks.coordinating import succeed; "
        "print(json.dumps(succeed(1_000_000, lambda text: None).figures))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] == 1_000_000 and found["journal_mb"] > 500
    assert found["resident_mb"] <= 200 and found["grown_mb"] <= 20
    # Within a second where nobody else works here; where somebody does, the whole journal takes longer too.
    assert found["serves_s"] <= max(1.0, found["whole_s"] / 50)
