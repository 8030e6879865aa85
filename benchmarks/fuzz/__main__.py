"""``python -m benchmarks.fuzz SURFACE INPUTS SEED START``: one surface in a process of its own, its outcome as JSON.

Holds     A signal that asks it to end ends the volleys; what was reached is told.
"""

import signal
import sys
import threading

import msgspec

from benchmarks.fuzz.schedule import hammered


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    name, inputs, seed, start = sys.argv[1:5]
    outcome = hammered(name, int(inputs), int(seed), int(start), _say, lambda: not over.is_set())
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
