"""Waiting for something outside this process, never without an end."""

import time
from collections.abc import Callable

POLL_S = 0.02


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """True as soon as the condition holds, False when the time is over."""
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(POLL_S)
    return True
