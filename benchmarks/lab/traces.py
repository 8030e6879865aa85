"""How many workers there are, round after round.

Question  What batch does each round have while workers come and go?
Holds     The rounds of a trace add up to the samples asked for exactly; the last one is short if need be. A trace is
          the same on every call. Where there are no workers there is no round.
"""

import csv
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LOCAL = 4  # samples of one worker in a round
REFERENCE = 32  # the batch of eight workers, for which the learning rate is chosen
MOST = 16  # times the reference batch, at most
TRACES = ("jump", "doublings", "spot", "walk")
NAMES = {
    "jump": "k 1 → 16 at a third",
    "doublings": "8 → 128 workers and back",
    "spot": "spot trace",
    "walk": "random walk",
}


def filled(batches: Iterator[int] | Sequence[int], samples: int) -> tuple[int, ...]:
    """Rounds of the given batches until ``samples`` are used up."""
    found: list[int] = []
    left = samples
    for batch in batches:
        if batch > 0:
            found.append(min(batch, left))
            left -= found[-1]
        if not left:
            break
    return tuple(found)


def fixed(samples: int, batch: int = REFERENCE) -> tuple[int, ...]:
    return filled(_by_progress(samples, lambda _: batch), samples)


def _by_progress(samples: int, batch: Callable[[float], int]) -> Iterator[int]:
    """The batch as a function of the share of samples consumed."""
    done = 0
    while True:
        now = batch(done / samples)
        yield now
        done += now


def jump(samples: int) -> tuple[int, ...]:
    """The reference batch, from a third of the run on sixteen times that."""
    return filled(_by_progress(samples, lambda done: REFERENCE * (MOST if done >= 1 / 3 else 1)), samples)


def doublings(samples: int) -> tuple[int, ...]:
    """8, 16, 32, 64, 128 workers and back, each for a ninth of the samples."""
    workers = (8, 16, 32, 64, 128, 64, 32, 16, 8)
    return filled(_by_progress(samples, lambda done: LOCAL * workers[int(done * 9 + 1e-9)]), samples)


def walk(samples: int) -> tuple[int, ...]:
    """Every fiftieth of the samples the batch is multiplied or divided by up to four, between ½ and 16 references."""
    random_ = random.Random(20190412)
    levels = [0.0]
    for _ in range(50):
        levels.append(min(math.log2(MOST), max(-1.0, levels[-1] + random_.uniform(-2, 2))))
    return filled(
        _by_progress(samples, lambda done: LOCAL * max(1, round(8 * 2 ** levels[int(done * 50 + 1e-9)]))), samples
    )


def spot(samples: int, gpus: Sequence[int]) -> tuple[int, ...]:
    """A record of GPU counts played twice, compressed in time so that the samples are used up at its end.

    A round takes the same time whatever the number of workers; with none there is no training.
    """
    played = [*gpus, *gpus]
    rounds = max(1, round(samples / (LOCAL * sum(played) / len(played))))
    places = (int(place * len(played) / rounds) % len(played) for place in itertools.count())
    return filled((LOCAL * played[place] for place in places), samples)


def read_gpus(file: Path) -> tuple[int, ...]:
    """The GPU counts of a CSV file with a column of that name."""
    with file.open() as lines:
        return tuple(int(row["GPUs"]) for row in csv.DictReader(lines))


def synthetic_gpus() -> tuple[int, ...]:
    """What stands in for the recorded trace where that is absent: 0 to 56 GPUs, one total loss at the end."""
    random_ = random.Random(20220513)
    counts = [56]
    while len(counts) < 205:
        change = random_.choice((-20, -8, -4, -2, -1, 1, 2, 4, 8, 11)) if random_.random() < 0.23 else 0
        counts.append(min(56, max(15, counts[-1] + change)))
    return (*counts, 15, *[0] * 9)


def batches(name: str, samples: int, gpus: Sequence[int]) -> tuple[int, ...]:
    if name == "spot":
        return spot(samples, gpus)
    return {"jump": jump, "doublings": doublings, "walk": walk}[name](samples)
