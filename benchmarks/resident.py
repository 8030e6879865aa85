"""How much memory this process has, as the system sees it.

Holds     The figures are of the program that runs now: those of ``getrusage`` go on from the process that started it.
"""

from pathlib import Path


def status_mb(name: str) -> float:
    """``VmRSS``, or ``VmHWM``: the largest of that."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


def forget_peak() -> None:
    """From now on VmHWM is of what follows."""
    Path("/proc/self/clear_refs").write_text("5")
