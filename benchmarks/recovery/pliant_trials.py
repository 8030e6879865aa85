"""Pliant's trials: kill, stop, join, leave.

Question  What do the others notice, and is every sample still accounted for?
Holds     Members come back by themselves between trials: the launcher restarts what was killed, a stopped worker
          rejoins when it goes on. Every session ends with its journal audited. Figures that need the journal are taken
          after the end.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import reason
from benchmarks.recovery.disturbance import idle_s, longest_gap, lost_s, next_update_s, usual_gap_s
from benchmarks.recovery.options import Options
from benchmarks.recovery.session import QUIET_S, WORKERS, Session, Trouble, pliant, recent, send, session
from benchmarks.recovery.stamps import Trace
from benchmarks.results import Trial
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.launch import requests, run_directory

RUN = "run"
DEAD_AFTER_S = 1.0  # of the sessions with stopped workers
RECOVERY_S = 30.0
END_S = 30.0
AFTER_S = 0.5  # beyond a newcomer's first contribution, beyond a leaver's last: the rounds in which shares adapt
LEADER_EVERY = 4  # every fourth victim is the leader

Done = Callable[[Trial], None]


def command(directory: Path) -> list[list[str]]:
    options = ["-n", str(WORKERS), "--dir", str(directory / RUN), "-m", "benchmarks.systems"]
    return [pliant("run", *options, "pliant_elastic", str(directory))]


@dataclass(slots=True)
class Book:
    """What the journal says: each worker's samples, and its idle time by the progress after each round."""

    samples: dict[str, int] = field(default_factory=dict)
    idle: dict[str, dict[int, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_book(path: Path) -> Book:
    book = Book()
    with path.open("rb") as lines:
        book.problems = list(audit(journal.read(lines)).problems)
    roster: list[str] = []
    with path.open("rb") as lines:
        for record in journal.read(lines):
            if isinstance(record, journal.EraRecord):
                roster = record.roster
            elif isinstance(record, journal.RoundRecord):
                for worker, ticket in zip(roster, record.tickets, strict=True):
                    book.samples[worker] = book.samples.get(worker, 0) + ticket.samples
                    book.idle.setdefault(worker, {})[record.samples_total] = ticket.idle_s
    return book


@dataclass(slots=True)
class Open:
    """A session and the trials that wait for its journal."""

    session: Session
    later: list[Callable[[Book | None], Trial]] = field(default_factory=list)


def _await_end(running: Session) -> None:
    try:
        status = running.processes[0].wait(END_S)
    except subprocess.TimeoutExpired:
        raise Trouble(reason(running.directory, f"the run did not end within {END_S:g} s")) from None
    if status:
        raise Trouble(reason(running.directory, f"the run ended with status {status}"))


@contextmanager
def audited(
    model: str, options: Options, repeat: int, done: Done, lines: Callable[[Path], list[list[str]]] = command
) -> Iterator[Open]:
    """A session whose end is awaited, whose journal is audited and whose open trials are closed with it."""
    with session(lines, model, options, keep=True) as running:
        opened = Open(running)
        try:
            yield opened
            (running.directory / "stop").touch()
            _await_end(running)
            book = read_book(running.directory / RUN / journal.JOURNAL)
        except Trouble:
            for trial in opened.later:
                done(trial(None))
            raise
        for problem in book.problems[:3]:
            done(Trial("pliant", model, "audit", repeat, failure=problem))
        done(Trial("pliant", model, "audit", repeat, {"problems": float(len(book.problems))}))
        for trial in opened.later:
            done(trial(book))
        if book.problems:
            raise Trouble(f"the audit found {len(book.problems)} problems")


def in_sessions(act: str, model: str, repeats: int, done: Done, serve: Callable[[int], Iterator[int]]) -> None:
    """Repeat until there are enough; ``serve`` yields what is done. A session that fails is noted and replaced once."""
    repeat, failures = 0, 0
    while repeat < repeats and failures < 2:
        try:
            for finished in serve(repeat):
                repeat = finished + 1
        except Trouble as trouble:
            failures += 1
            done(Trial("pliant", model, act, repeat, failure=str(trouble)))


def choose(members: list[Trace], repeat: int, hit: dict[str, int]) -> Trace:
    """The leader now and then, else a slot that was hit least: the launcher's cooldown doubles per slot."""
    leads = [trace for trace in members if trace.steps[-1].leads]
    if repeat % LEADER_EVERY == LEADER_EVERY - 1 and leads:
        return leads[0]
    rest = [trace for trace in members if trace not in leads]
    return min(rest, key=lambda trace: (hit.get(slot_of(trace), 0), random.random()))


def slot_of(trace: Trace) -> str:
    return trace.name.split(".")[0]


def unplanned(act: str, model: str, repeats: int, done: Done) -> None:
    """Kill or stop one worker after another, each time at a random moment of a round."""
    number = signal.SIGKILL if act == "kill" else signal.SIGSTOP
    options = Options(dead_after_s=DEAD_AFTER_S) if act == "stop" else Options()

    def serve(first: int) -> Iterator[int]:
        hit: dict[str, int] = {}
        with audited(model, options, first, done) as opened:
            running = opened.session
            for repeat in range(first, repeats):
                members = running.settled(WORKERS, QUIET_S)
                victim = choose(members, repeat, hit)
                hit[slot_of(victim)] = hit.get(slot_of(victim), 0) + 1
                time.sleep(random.uniform(0.0, 0.3))
                at_s = send(victim.pid, number)
                others = [trace for trace in members if trace is not victim]
                try:
                    found = recovered(running, others, at_s, act)
                finally:
                    if number == signal.SIGSTOP:
                        send(victim.pid, signal.SIGCONT)
                found["leader"] = float(victim.steps[-1].leads)
                done(Trial("pliant", model, act, repeat, found))
                yield repeat

    in_sessions(act, model, repeats, done, serve)


def recovered(running: Session, others: list[Trace], at_s: float, act: str) -> dict[str, float]:
    since_s = at_s - 5.0
    running.until(
        f"the next update after a {act}",
        lambda: next_update_s(recent(others, since_s), at_s) is not None,
        RECOVERY_S,
    )
    # The slower ones' stamps of the same update: the longest gap is over all of them.
    time.sleep(AFTER_S)
    running.traces.refresh()
    seen = recent(others, since_s)
    next_s = next_update_s(seen, at_s)
    assert next_s is not None
    gap_s, _ = longest_gap(seen, at_s, at_s + next_s, at_s)
    return {"next_update_s": next_s, "gap_s": gap_s, "usual_gap_s": max(usual_gap_s(trace, at_s) for trace in seen)}


def planned(model: str, repeats: int, done: Done) -> None:
    """A fifth worker comes, then one goes (the leader now and then), again and again."""

    def serve(first: int) -> Iterator[int]:
        with audited(model, Options(), first, done) as opened:
            running = opened.session
            access = None
            for repeat in range(first, repeats):
                members = running.settled(WORKERS, QUIET_S)
                access = access or run_directory.access(running.directory / RUN)
                asked_s = time.monotonic()
                requests.post(access, "/scale", {"workers": WORKERS + 1})
                follow_in(opened, model, members, asked_s, repeat)
                members = running.settled(WORKERS + 1, QUIET_S)
                _follow_out(opened, access, model, members, repeat)
                yield repeat

    in_sessions("join", model, repeats, done, serve)


def follow_in(opened: Open, model: str, others: list[Trace], asked_s: float, repeat: int, act: str = "join") -> None:
    """Wait for a newcomer's first contribution; the trial waits for the journal."""
    running = opened.session
    known = {trace.pid for trace in running.traces.by_pid.values()}

    def newcomer() -> Trace | None:
        fresh = [trace for trace in running.traces.by_pid.values() if trace.pid not in known]
        return next((trace for trace in fresh if trace.steps), None)

    running.until("a newcomer's first contribution", lambda: newcomer() is not None, 120.0)
    joiner = newcomer()
    assert joiner is not None
    ready_s, first_s = joiner.ready_s, joiner.steps[0].ends_s
    assert ready_s is not None
    time.sleep(AFTER_S + 0.3)
    running.traces.refresh()
    seen = recent(others, asked_s - 5.0)
    ends_s = first_s + AFTER_S
    usual = [usual_gap_s(trace, asked_s) for trace in seen]
    gap_s, gap_rounds = longest_gap(seen, ready_s, ends_s, asked_s)
    taken_in = [step for trace in seen[:1] for step in trace.steps if step.after.era >= joiner.steps[0].after.era]
    followed = {step.after.progress for step in taken_in if step.ends_s <= joiner.steps[0].begins_s}
    figures = {
        "contributes_s": first_s - ready_s,
        "starts_s": first_s - asked_s,
        "gap_s": gap_s - max(usual),
        "gap_rounds": gap_rounds,
        "lost_s": max(lost_s(trace, ready_s, ends_s, asked_s) for trace in seen),
        "rounds_followed": float(len(followed)),
    }

    def closed(book: Book | None) -> Trial:
        if book is None:
            return Trial("pliant", model, act, repeat, figures)
        # By now they have gone on for a while with the newcomer.
        later = recent(others, asked_s - 5.0)
        idle = {trace.pid: book.idle.get(trace.name, {}) for trace in later}
        beyond = [idle_s(trace, idle[trace.pid], ready_s, ends_s, asked_s, first_s) for trace in later]
        beyond_before = [idle_s(trace, idle[trace.pid], ready_s, ends_s, asked_s) for trace in later]
        idles = {"idle_s": max(beyond), "idle_beyond_before_s": max(beyond_before)}
        return Trial("pliant", model, act, repeat, {**figures, **idles})

    opened.later.append(closed)


def _follow_out(opened: Open, access: run_directory.Access, model: str, members: list[Trace], repeat: int) -> None:
    """Let a worker go, by the command and by SIGTERM in turn; the trial waits for the journal."""
    running = opened.session
    leaver = choose(members, repeat, {})
    others = [trace for trace in members if trace is not leaver]
    time.sleep(random.uniform(0.0, 0.3))
    asked_s = time.monotonic()
    if repeat % 2:
        send(leaver.pid, signal.SIGTERM)
    else:
        requests.post(access, "/drain", {"worker": leaver.name})
    running.until("the end of a worker that is to leave", lambda: leaver not in running.traces.alive(), RECOVERY_S)
    gone_s = time.monotonic()
    time.sleep(AFTER_S)
    running.traces.refresh()
    seen = recent(others, asked_s - 5.0)
    gap_s, gap_rounds = longest_gap(seen, asked_s, gone_s + AFTER_S, asked_s)
    # The same over as long a time in which nothing happened: how long gaps are on this machine anyway.
    _, quiet_rounds = longest_gap(seen, 2 * asked_s - gone_s - AFTER_S, asked_s, asked_s)
    leads = float(leaver.steps[-1].leads)
    figures = {"gap_s": gap_s, "gap_rounds": gap_rounds, "quiet_rounds": quiet_rounds, "leader": leads}

    def closed(book: Book | None) -> Trial:
        if book is not None:
            computed = sum(step.samples for step in leaver.steps)
            figures["recomputed"] = float(computed - book.samples.get(leaver.name, 0))
        return Trial("pliant", model, "leave", repeat, figures)

    opened.later.append(closed)
