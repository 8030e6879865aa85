"""Which tests run side by side.

Question  How are the tests divided into lots that take about the same time?
Holds     Every test is in exactly one lot. A new file or directory needs no entry here: it counts as ``UNKNOWN_S``
          until somebody measures it (``make seconds`` after ``make test``).
Source    Longest processing time first (Graham 1969).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
REPORTS = TESTS.parent / ".pytest_cache"

FIRST_S = 45
"""Style and types, which the first lot begins with."""

UNKNOWN_S = 30

# Processor time, measured on a busy machine: processes of the tests fill both cores, so that counts.
SECONDS = {
    "bench": 14,
    "contract": 53,
    "core": 45,
    "docs": 40,
    "fuzz": 11,
    "habits": 95,
    "lab": 3,
    "launch": 2,
    "numerics": 80,
    "process/test_agents.py": 43,
    "process/test_audited_end.py": 5,
    "process/test_bad_input.py": 118,
    "process/test_chaos.py": 30,
    "process/test_convergence.py": 17,
    "process/test_coordinator_death.py": 18,
    "process/test_deaths.py": 57,
    "process/test_demo.py": 58,
    "process/test_drifting.py": 24,
    "process/test_evaluate.py": 40,
    "process/test_examples.py": 58,
    "process/test_formation.py": 20,
    "process/test_full_disk.py": 1,
    "process/test_groups.py": 14,
    "process/test_guards.py": 78,
    "process/test_habits.py": 150,
    "process/test_ipv6.py": 16,
    "process/test_joining.py": 60,
    "process/test_large_data.py": 17,
    "process/test_launch.py": 119,
    "process/test_leaving.py": 27,
    "process/test_long_reading.py": 23,
    "process/test_lost_directory.py": 14,
    "process/test_many_buffers.py": 13,
    "process/test_many_eras.py": 11,
    "process/test_mixed_precision.py": 58,
    "process/test_replay.py": 118,
    "process/test_resuming.py": 11,
    "process/test_slow.py": 75,
    "process/test_trained_set.py": 50,
    "process/test_training.py": 56,
    "process/test_trust.py": 19,
    "process/test_updates.py": 74,
    "process/test_wireguard.py": 7,
    "sim": 125,
    "worker": 2,
}


def units() -> list[str]:
    """What is divided: directories, and single files where processes are started."""
    directories = [path.name for path in TESTS.iterdir() if any(path.glob("test_*.py")) and path.name != "process"]
    return sorted([*directories, *(f"process/{path.name}" for path in TESTS.glob("process/test_*.py"))])


def divided(found: Iterable[str], lots: int) -> list[list[str]]:
    """The lots; whatever takes longest is placed first, always where the least is."""
    loads = [FIRST_S, *[0] * (lots - 1)]
    made: list[list[str]] = [[] for _ in range(lots)]
    for unit in sorted(found, key=lambda unit: (-SECONDS.get(unit, UNKNOWN_S), unit)):
        place = loads.index(min(loads))
        loads[place] += SECONDS.get(unit, UNKNOWN_S)
        made[place].append(unit)
    return made


def measured(report: Path) -> dict[str, float]:
    """Seconds of each unit in a report that pytest wrote with ``--junitxml``."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # tests.process.test_launch, or with a class behind it
        _, room, *rest = case.attrib["classname"].split(".")
        unit = f"process/{rest[0]}.py" if room == "process" else room
        seconds[unit] = seconds.get(unit, 0.0) + float(case.attrib["time"])
    return seconds


def ran(number: int, lot: Iterable[str]) -> int:
    """pytest's exit status; one process for each kind, because files of both may have the same name."""
    status = 0
    for kind, starts in (("others", False), ("process", True)):
        paths = [str(TESTS / unit) for unit in lot if unit.startswith("process/") is starts]
        if paths:
            report = f"--junitxml={REPORTS / f'lot-{number}-{kind}.xml'}"
            command = [sys.executable, "-m", "pytest", "--durations=15", report, *paths]
            status = subprocess.run(command, check=False).returncode or status
    return status


def main(first: str, *rest: str) -> int:
    """``lots.py 2 3``: run the second of three lots; ``lots.py report.xml …``: print what SECONDS should say."""
    if first.isdigit():
        return ran(int(first), divided(units(), int(rest[0]))[int(first) - 1])
    found = [item for report in (first, *rest) for item in measured(Path(report)).items()]
    for unit, seconds in sorted(found):
        print(f'    "{unit}": {max(1, round(seconds))},')
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
