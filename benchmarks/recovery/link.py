"""A newcomer behind a slow link: two network namespaces of our own, joined by one shaped wire.

Question  Do the others go on at their pace while a newcomer's state takes many rounds to arrive?
Holds     Only namespaces made here are touched, and they are removed at the end, whatever happens. Needs root, ``ip``
          and ``tc``. The model is the small one with weights beside it that are handed on but not summed: on one wire a
          round carries nearly as many bytes as the state of a model that is trained as a whole, and the handoff of that
          could never outlast many rounds.
Source    ours; token bucket filter, tc-tbf(8).
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.namespaces import NoNetwork, inside, ip, namespaces, shape
from benchmarks.recovery.disturbance import usual_gap_s
from benchmarks.recovery.options import Options
from benchmarks.recovery.pliant_trials import RUN, Book, Done, audited, follow_in
from benchmarks.recovery.session import QUIET_S, Trouble, pliant, recent
from benchmarks.results import Trial
from pliant.launch import run_directory

HERE = 3  # workers on the fast side
RATE = "400mbit"  # a round of the small model takes about 150 ms on it
BURST = "256kb"
FROZEN_MB = 192  # 4 s and more on the same wire
STEADY_S = 4.0  # with the newcomer in
SUBNET = "10.211.77"
LEFT_OUT = ("idle_s", "idle_beyond_before_s", "lost_s")  # a round is longer with the newcomer in, for good


@dataclass(frozen=True, slots=True)
class Wire:
    """The names of the two namespaces."""

    fast: str
    slow: str


@contextmanager
def wire() -> Iterator[Wire]:
    """Two namespaces and a shaped pair of interfaces between them."""
    names = Wire(f"pliant-f{os.getpid()}", f"pliant-s{os.getpid()}")
    try:
        with namespaces([names.fast, names.slow]):
            ip("-n", names.fast, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names.slow)
            for number, name in enumerate((names.fast, names.slow), 1):
                ip("-n", name, "address", "add", f"{SUBNET}.{number}/24", "dev", "wire")
                ip("-n", name, "link", "set", "wire", "up")
                shape(name, "wire", RATE, BURST)
            yield names
    except NoNetwork as error:
        raise Trouble(str(error)) from error


def _inside(namespace: str, line: list[str]) -> list[str]:
    # Every interface may carry gloo here; environment() confines it to loopback.
    return inside(namespace, [line[0], "-u", "GLOO_SOCKET_IFNAME", *line[1:]])


def slow_link(repeats: int, done: Done) -> None:
    """Three workers on one side; a fourth joins over the slow wire."""
    for repeat in range(repeats):
        try:
            with wire() as names:
                _once(names, repeat, done)
        except Trouble as trouble:
            done(Trial("pliant", "small", "link", repeat, failure=str(trouble)))
            return


def _once(names: Wire, repeat: int, done: Done) -> None:
    host = f"{SUBNET}.1"

    def lines(directory: Path) -> list[list[str]]:
        options = [
            "-n",
            str(HERE),
            "--host",
            host,
            "--insecure",
            "--dir",
            str(directory / RUN),
            "-m",
            "benchmarks.systems",
        ]
        return [_inside(names.fast, pliant("run", *options, "pliant_elastic", str(directory)))]

    with audited("small", Options(frozen_mb=FROZEN_MB), repeat, done, lines) as opened:
        running = opened.session
        members = running.settled(HERE, QUIET_S)
        run = running.directory / RUN
        address, token = run_directory.access(run).address, str(run / run_directory.TOKEN)
        options = ["--join", address, "--token-file", token, "--dir", str(running.directory / "joined")]
        line = pliant("run", *options, "-n", "1", "-m", "benchmarks.systems", "pliant_elastic", str(running.directory))
        asked_s = time.monotonic()
        running.add(_inside(names.slow, line))
        follow_in(opened, "small", members, asked_s, repeat, act="link")
        running.settled(HERE + 1, STEADY_S)
        now_s = time.monotonic()
        steady_s = max(usual_gap_s(trace, now_s) for trace in recent(members, asked_s))
        opened.later[-1] = _with_steady(opened.later[-1], steady_s)


def _with_steady(trial: Callable[[Book | None], Trial], steady_s: float) -> Callable[[Book | None], Trial]:
    """Beside it what a round takes with the newcomer in: on this wire that alone is longer than without it."""

    def closed(book: Book | None) -> Trial:
        found = trial(book)
        figures = {name: value for name, value in found.figures.items() if name not in LEFT_OUT}
        return replace(found, figures={**figures, "steady_gap_s": steady_s})

    return closed
