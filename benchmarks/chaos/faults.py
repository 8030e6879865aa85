"""What happens to a run, and when.

Question  Which faults does a seed stand for?
Holds     A pure function of seed, length and kinds. A fault says what is done; to whom follows from ``pick`` and who is
          there at that moment.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass

EVERY_S = 5.0
SOONEST_S = 0.3

NAMES = {
    "kill": "SIGKILL of a worker",
    "storm": "SIGKILL of all workers but two at once",
    "host": "SIGKILL of a joined launcher, its workers with it",
    "nap": "SIGSTOP, SIGCONT before `dead_after`",
    "doze": "SIGSTOP, SIGCONT after `dead_after`",
    "term": "SIGTERM to a worker",
    "drain": "`pliant drain`",
    "scale": "`pliant scale`",
    "join": "`pliant run --join`",
    "coordinator": "SIGKILL of the coordinator",
    "disk": "the journal's disk is full",
    "blink": "a host's link cut, restored before `dead_after`",
    "cut": "a host's link cut, restored after `dead_after`",
    "total": "SIGKILL of all workers at once",
    "launcher": "SIGKILL of the launcher that owns the run; `pliant run --resume`",
}
WEIGHTS = {
    "kill": 5,
    "storm": 1,
    "host": 1,
    "nap": 2,
    "doze": 2,
    "term": 2,
    "drain": 1,
    "scale": 2,
    "join": 2,
    "coordinator": 2,
    "disk": 2,
    "blink": 1,
    "cut": 2,
    "total": 1,
    "launcher": 0.5,
}
LENGTHS = {"nap": (0.1, 0.7), "doze": (1.2, 3.0), "blink": (0.1, 0.7), "cut": (1.2, 4.0), "disk": (0.1, 2.0)}
"""in units of ``dead_after``"""


@dataclass(frozen=True, slots=True)
class Fault:
    """``at_s`` from the start; ``pick`` from 0 to 1 chooses whom; ``length`` in units of ``dead_after``."""

    kind: str
    at_s: float
    pick: float
    length: float


def drawn(seed: int, seconds: float, kinds: Collection[str], every_s: float = EVERY_S) -> list[Fault]:
    """The faults of a seed, in order; each of the kinds is as likely as its weight."""
    chance = random.Random(seed)
    known = [kind for kind in NAMES if kind in kinds]
    faults: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += SOONEST_S + chance.expovariate(1.0 / (every_s - SOONEST_S))
        kind = chance.choices(known, [WEIGHTS[kind] for kind in known])[0]
        pick, part = chance.random(), chance.random()
        if at_s > seconds:
            return faults
        low, high = LENGTHS.get(kind, (0.0, 0.0))
        faults.append(Fault(kind, at_s, pick, low + part * (high - low)))
