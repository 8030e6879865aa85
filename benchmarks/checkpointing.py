"""What checkpoints cost while they are written: CPU, the main thread's time, memory.

Question  How much does a checkpoint of the large model every five seconds take from the training?
Holds     One worker that never sleeps, so that nothing is hidden in waiting; a job's other workers notice nothing. The
          main thread is timed where it begins a copy and where it completes one before an update, in CPU seconds and,
          as the pause, in seconds: all of one checkpoint together, judged beside the same run's median micro-batch;
          the writing in its own thread, in CPU seconds, and related
          to what the process used (getrusage) over all rounds: two stretches of such a run differ by more than both, on
          a machine that others use.
Source    Issue 5, "checkpointing"; docs/benchmarks.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

import pliant
from benchmarks.resident import forget_peak, status_mb
from benchmarks.results import Trial
from benchmarks.statistics import cpu_s
from benchmarks.workload import Device, make_dataset, make_model, make_optimizer
from pliant.worker.checkpoint_writer import CheckpointWriter, Thread
from pliant.worker.loop import Worker

BATCH, SIZE = 64, 16
EVERY_S = 5.0
ROUNDS, QUICK_ROUNDS = 600, 150
REPEATS, QUICK_REPEATS = 5, 2
MODEL = "large"

Say = Callable[[str], None]


@dataclass(slots=True)
class Course:
    """One run."""

    copied_s: list[float] = field(default_factory=list)
    """CPU of the main thread, for each checkpoint"""
    paused_s: list[float] = field(default_factory=list)
    """how long it did nothing else, for each checkpoint"""
    micro_batch_s: list[float] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)
    """of the thread that writes"""
    rounds: int = 0
    cpu_s: float = 0.0
    main_s: float = 0.0
    extra_mb: list[float] = field(default_factory=list)
    """for each checkpoint: the largest resident size while it was there over the largest without it, before"""
    without_mb: float | None = None
    """None: none is there"""
    state_mb: float = 0.0

    def begin(self) -> None:
        """A checkpoint comes to be."""
        self.without_mb = status_mb("VmHWM")
        forget_peak()

    def written(self) -> None:
        """It is written; its copy is still there."""
        if self.without_mb is not None:
            self.extra_mb.append(status_mb("VmHWM") - self.without_mb)

    def rest(self) -> None:
        """None is there."""
        if self.without_mb is not None:
            self.without_mb = None
            forget_peak()


def trained(directory: str, rounds: int) -> Course:
    """So many rounds with a checkpoint every five seconds."""
    course, device = Course(), Device(lambda: 0.0)
    model = make_model(MODEL, device)
    optimizer = make_optimizer(model)
    with pliant.join(model, optimizer, batch=BATCH, checkpoint=directory, checkpoint_every=EVERY_S) as run:
        worker = run._worker
        assert isinstance(worker, Worker)
        saving = worker._checkpoints.saving
        assert isinstance(saving, CheckpointWriter)
        _watch(saving, worker.training, course)
        used_s, main_s = cpu_s(), time.thread_time()
        for x, y in run.batches(make_dataset(MODEL), size=SIZE):
            device.begin(len(x))
            began_s = time.perf_counter()
            run.backward(F.cross_entropy(model(x), y))
            course.micro_batch_s.append(time.perf_counter() - began_s)
            if run.step() and saving._writing is None and saving._room is None:
                course.rest()
                if run.round >= rounds:
                    break
        course.rounds, course.cpu_s, course.main_s = run.round, cpu_s() - used_s, time.thread_time() - main_s
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    course.state_mb = sum(tensor.nbytes for tensor in [*model.parameters(), *state]) / 1e6
    return course


def _watch(saving: Any, training: Any, course: Course) -> None:
    """Time every copy and every writing, and note the memory that they take."""
    prepare, save, finish_copy = saving.prepare, saving.save, training.finish_copy

    def timed(work: Callable[[], object]) -> None:
        began_s, used_s = time.perf_counter(), time.thread_time()
        work()
        course.paused_s[-1] += time.perf_counter() - began_s
        course.copied_s[-1] += time.thread_time() - used_s

    def prepared(*arguments: Any) -> bool:
        if saving._room is None:
            course.begin()
            course.paused_s.append(0.0)
            course.copied_s.append(0.0)
            timed(lambda: prepare(*arguments))
            return False
        return prepare(*arguments)

    def saved(*arguments: Any) -> None:
        timed(lambda: save(*arguments))

    def finished() -> None:
        if training.copying is not None:
            timed(finish_copy)

    def begin(work: Callable[[], object]) -> Thread:
        def written() -> None:
            began_s = time.thread_time()
            work()
            course.written_s.append(time.thread_time() - began_s)
            course.written()

        return Thread(written)

    saving.prepare, saving.save, saving._begin, training.finish_copy = prepared, saved, begin, finished
    forget_peak()


def measure(rounds: int, repeats: int, say: Say, keep: Callable[[tuple[Trial, ...]], None]) -> tuple[Trial, ...]:
    """So many runs of so many rounds; ``keep`` gets all there are after each."""
    trials: list[Trial] = []
    for repeat in range(repeats):
        trials.append(Trial("pliant", MODEL, "checkpoints", repeat, _measured(rounds, say)))
        keep(tuple(trials))
    return tuple(trials)


def _measured(rounds: int, say: Say) -> dict[str, float]:
    """One run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="pliant-checkpoints-") as directory:
            course = trained(directory, rounds)
    finally:
        torch.set_num_threads(threads)
    # Removing old ones is done in such a thread, too; it costs next to nothing.
    written_s = sum(course.written_s)
    figures = {
        "rounds": float(course.rounds),
        "checkpoints": float(len(course.copied_s)),
        "copy_ms": median(course.copied_s) * 1e3,
        "pause_ms": median(course.paused_s) * 1e3,
        "longest_pause_ms": max(course.paused_s) * 1e3,
        "micro_batch_ms": median(course.micro_batch_s) * 1e3,
        "pause_ratio": max(course.paused_s) / median(course.micro_batch_s),
        "cpu": (sum(course.copied_s) + written_s) / (course.cpu_s - sum(course.copied_s) - written_s),
        "main": sum(course.copied_s) / (course.main_s - sum(course.copied_s)),
        "copies": max(course.extra_mb) / course.state_mb,
        "round_ms": course.cpu_s / course.rounds * 1e3,
        "state_mb": course.state_mb,
    }
    say(
        f"{course.rounds} rounds  {len(course.copied_s)} checkpoints  CPU {100 * figures['cpu']:+.2f} %  "
        f"main thread {100 * figures['main']:+.2f} %  paused for {figures['pause_ms']:.1f} ms, at most "
        f"{figures['longest_pause_ms']:.1f} (a micro-batch: {figures['micro_batch_ms']:.1f})  "
        f"{figures['copies']:.2f} copies"
    )
    return figures
