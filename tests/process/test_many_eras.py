"""One process goes through many eras and keeps nothing of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import Launcher

pytestmark = pytest.mark.slow
PREPARED = False

SCRIPT = Path(__file__).parent / "scripts" / "many_eras.py"
ERAS = 120
"""by hand: ``python tests/process/scripts/many_eras.py 1000``"""


def test_no_thread_descriptor_or_memory_stays(launch: Launcher) -> None:
    run = launch.python(str(SCRIPT), str(ERAS))
    assert run.wait() == 0, run.output
    found = json.loads(run.lines[-1])
    early, late = found["early"], found["late"]
    assert found["eras"] >= ERAS
    # A thread and its socket may just be ending when it is measured.
    assert late["threads"] <= early["threads"] + 3, found
    assert late["descriptors"] <= early["descriptors"] + 4, found
    assert late["memory"] <= early["memory"] + 20_000, found
    assert late["left"] <= 20, found
    assert len(set(found["digests"].values())) == 1 and set(found["digests"]) == {"w0", "w1"}, found
