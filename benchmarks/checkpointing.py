"""What checkpoints cost while they are written: CPU, the main thread's time, memory.

Question  How much does a checkpoint of the large model every five seconds take from the training?
Holds     One worker that never sleeps, so that nothing is hidden in waiting; a job's other workers notice nothing.
          Stretches of time with checkpoints and without take turns in one run: drift of the machine meets both alike.
          CPU seconds are those of the whole process (getrusage), the main thread's its own; both per round.
Source    Issue 5, "checkpointing"; docs/benchmarks.md.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F

import pliant
from benchmarks.results import Trial
from benchmarks.workload import Device, make_dataset, make_model, make_optimizer

BATCH, SIZE = 64, 16
EVERY_S = 5.0
STRETCH_S = 10.5
"""Two checkpoints fit into it; the second is written before it ends."""
PAIRS, QUICK_PAIRS = 6, 2
MODEL = "large"

Say = Callable[[str], None]


@dataclass(slots=True)
class Stretch:
    """What was used in some seconds of training."""

    rounds: int
    cpu_s: float
    main_s: float
    peak_mb: float


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    """The largest resident size since it was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def stretches(directory: str, pairs: int) -> tuple[list[Stretch], float]:
    """With checkpoints, without, with, …; and the bytes of the state in MB."""
    device = Device(lambda: 0.0)
    model = make_model(MODEL, device)
    optimizer = make_optimizer(model)
    found: list[Stretch] = []
    # The first one warms up.
    wanted = 2 * pairs + 1
    with pliant.join(model, optimizer, batch=BATCH, checkpoint=directory, checkpoint_every=EVERY_S) as run:
        saving = run._worker._saving
        assert saving is not None
        began, used_s, main_s, since_s = run.round, _cpu_s(), time.thread_time(), time.monotonic()
        _forget_peak()
        for x, y in run.batches(make_dataset(MODEL), size=SIZE):
            device.begin(len(x))
            run.backward(F.cross_entropy(model(x), y))
            if not run.step() or time.monotonic() - since_s < STRETCH_S or saving._writing is not None:
                continue
            found.append(
                Stretch(run.round - began, _cpu_s() - used_s, time.thread_time() - main_s, _peak_mb()),
            )
            if len(found) == wanted:
                break
            # Next comes one with checkpoints, the first after five seconds, or one without.
            saving._every_s = EVERY_S if len(found) % 2 else float("inf")
            saving._due_s = time.monotonic() + saving._every_s
            began, used_s, main_s, since_s = run.round, _cpu_s(), time.thread_time(), time.monotonic()
            _forget_peak()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return found[1:], sum(tensor.nbytes for tensor in [*model.parameters(), *state]) / 1e6


def measure(pairs: int, say: Say) -> tuple[Trial, ...]:
    """One run; every pair of stretches is a repeat."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="pliant-checkpoints-") as directory:
            found, state_mb = stretches(directory, pairs)
    finally:
        torch.set_num_threads(threads)
    trials: list[Trial] = []
    usual_mb = median(stretch.peak_mb for stretch in found[1::2])
    for repeat, (with_, without) in enumerate(zip(found[::2], found[1::2], strict=True)):
        cpu = (with_.cpu_s / with_.rounds) / (without.cpu_s / without.rounds) - 1
        main = (with_.main_s / with_.rounds) / (without.main_s / without.rounds) - 1
        copies = (with_.peak_mb - usual_mb) * 1.048576 / state_mb
        figures = {
            "rounds": float(with_.rounds),
            "cpu": cpu,
            "main": main,
            "copies": copies,
            "round_ms": without.cpu_s / without.rounds * 1e3,
            "state_mb": state_mb,
        }
        trials.append(Trial("pliant", MODEL, "checkpoints", repeat, figures))
        say(
            f"pair {repeat}  {with_.rounds} rounds  CPU {100 * cpu:+.2f} %  main thread {100 * main:+.2f} %  "
            f"{copies:.2f} copies"
        )
    return tuple(trials)
