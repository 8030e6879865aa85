"""What is shown of workers' output, what is known of a run, what the environment says."""

from __future__ import annotations

import asyncio
import io
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.coordinator.status import StatusTracker
from pliant.core.journal import records as journal
from pliant.environment import Job, environment_of, job_from
from pliant.errors import UsageError
from pliant.launch.output import LastError, LineSplitter, SeenTracebacks, TracebackFilter, is_transports
from pliant.launch.process import WorkerProcess
from pliant.ui import progress

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 1', "ValueError: wrong"]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))), st.data())
def test_lines_survive_any_cutting(lines: list[str], data: st.DataObject) -> None:
    stream = "".join(f"{line}\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    splitter = LineSplitter()
    shown: list[str] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        shown += splitter.feed(stream[start:stop], 0.0)
    assert shown + splitter.end() == lines


@given(st.binary(), st.lists(st.integers(1, 9)))
def test_any_bytes_become_lines_without_line_ends(stream: bytes, sizes: list[int]) -> None:
    splitter = LineSplitter()
    shown: list[str] = []
    for size in sizes:
        shown += splitter.feed(stream[:size], float(size))
        stream = stream[size:]
    shown += splitter.feed(stream, 0.0) + splitter.end()
    assert not any("\n" in line or "\r" in line for line in shown)


def test_a_line_without_end_is_shown_at_the_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"almost", 0.0) == []
    assert splitter.end() == ["almost"]
    assert splitter.end() == []


def test_line_ends_of_other_systems() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\r\ntwo\r", 0.0) == ["one"]
    assert splitter.feed(b"\n", 0.0) == ["two"]


def test_a_redrawn_line_is_shown_once_a_second() -> None:
    splitter = LineSplitter()
    shown = [line for step in range(30) for line in splitter.feed(b"\r%d%%" % step, step / 10)]
    assert 2 <= len(shown) <= 3
    assert splitter.feed(b"\r100%\n", 3.0) == ["100%"]


GLOO = [
    "[E1118 11:24:11.640973595 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed with [/x/gloo/pair.cc:1] x",
    "[rank0]:[W1118 11:24:11.640973595 ProcessGroupGloo.cpp:67] x",
    "[W1118 11:24:11.640973595 socket.cpp:759] [c10d] The client socket has failed to connect to [vm]:29500",
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect, willRetry=1",
]


@pytest.mark.parametrize("line", GLOO)
def test_the_transports_own_lines_are_told_from_the_users(line: str) -> None:
    assert is_transports(line)
    for own in (
        f"caught: {line}",
        f" {line}",
        line[1:],
        "[E] ProcessGroupGloo.cpp",
        "[epoch 3] loss 0.1",
        "[W0] gloo/",
    ):
        assert not is_transports(own)
    assert not is_transports("[E1118 11:24:11.640973595 ProcessGroupNCCL.cpp:67] Watchdog caught collective operation")


def test_a_traceback_is_shown_once_for_all_workers() -> None:
    seen = SeenTracebacks()
    first, second, cut = TracebackFilter(seen), TracebackFilter(seen), TracebackFilter(seen)
    for line in TRACEBACK:
        assert first.feed(line, 0.0) == [] and second.feed(line, 0.0) == []
    assert cut.feed(TRACEBACK[0], 0.0) == []
    assert first.end() == TRACEBACK
    assert second.end() == [] and cut.end() == []


def test_another_traceback_is_shown() -> None:
    seen = SeenTracebacks()
    first, second = TracebackFilter(seen), TracebackFilter(seen)
    for line in TRACEBACK:
        first.feed(line, 0.0)
        second.feed(line.replace("wrong", "also wrong"), 0.0)
    assert first.end() and second.end()


def test_a_traceback_that_ends_nothing_is_shown_after_a_pause() -> None:
    held = TracebackFilter(SeenTracebacks())
    assert held.feed("before", 0.0) == ["before"]
    held.feed(TRACEBACK[0], 0.0)
    assert held.quiet(0.1) == []
    assert held.quiet(2.0) == TRACEBACK[:1]
    assert held.feed("after", 1.0) == ["after"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a warning\nanother", ""),
        ("\n".join(TRACEBACK), "ValueError: wrong"),
        ("\n".join([*TRACEBACK, "and on it goes"]), "ValueError: wrong"),
        ("\n".join(f"[rank0]: {line}" for line in TRACEBACK), "ValueError: wrong"),
        (
            "\n".join([*TRACEBACK, "", "During handling …:", "", *TRACEBACK[:2], "    ^^^^", "my.Error: also"]),
            "my.Error: also",
        ),
        ("\n".join(TRACEBACK[:2]), ""),
        ("\n".join([*TRACEBACK, *TRACEBACK[:2]]), "ValueError: wrong"),
    ],
)
def test_the_last_exception_in_one_line(text: str, error: str) -> None:
    last = LastError()
    for line in text.split("\n"):
        last.feed(line)
    assert last.text == error


def round_record(number: int, samples: list[int], applied: bool = True) -> journal.RoundRecord:
    flags = 0 if applied else journal.NONFINITE
    tickets = [journal.TicketLine([], 1, n, float(n), 0.5, 0.1, 0.0, 0.0, 0.0, 0.0, 1.0, flags) for n in samples]
    batch = sum(samples)
    return journal.RoundRecord(1, number, 1, batch, batch, 1.0, 0.1, 0.25, applied, batch * number, tickets)


def test_the_status_follows_the_journal() -> None:
    tally = StatusTracker("job")
    tally.plan(4, None)
    tally.add(journal.EraRecord(1, ["w0", "w1", "w2"]), 0.0)
    tally.add(journal.PhaseRecord(1, "train", 1, 80, 80, [4, 4, 4], [1, 1, 1], 0), 0.0)
    for number in range(1, 5):
        tally.add(round_record(number, [6, 4, 0], applied=number != 2), number / 2)
    tally.tick(2.0)
    status = tally.status
    assert (status.samples_total, status.epoch_done, status.skipped, status.spares) == (40, 40, 1, 1)
    assert status.samples_per_s == pytest.approx(20.0)
    assert [worker.pace for worker in status.workers] == pytest.approx([12.0, 8.0, 0.0])
    # 1.5 of 4 epochs took 2 s.
    assert status.eta_s == pytest.approx(2.0 * 2.5 / 1.5)
    tally.add(journal.PhaseEndRecord(2, [], 0.75), 2.0)
    tally.tick(60.0)
    assert status.samples_per_s == 0.0 and status.result == 0.75
    assert re.search(r"epoch 2/4 50% · .* · batch 10 · rate 0\.1 · loss 0\.2500 · ", progress.line(status))
    assert "1 spare" in progress.line(status) and "1 skipped" in progress.line(status)
    told = msgspec.structs.replace(round_record(5, [6, 4, 0]), measured=(3, 0.5), noise_scale=1234.5)
    tally.add(told, 60.0)
    tally.add(round_record(6, [6, 4, 0]), 60.0)
    assert "batch 10 · noise 1,234 · rate" in progress.line(status)


def test_an_evaluation_that_is_over_is_not_shown() -> None:
    tally = StatusTracker("job")
    evaluation = journal.PhaseRecord(2, "evaluate", 0, 80, 80, [4], [1], 0)
    tally.add(journal.EraRecord(1, ["w0"]), 0.0)
    tally.add(journal.PhaseRecord(1, "train", 0, 80, 80, [4], [1], 0), 0.0)
    for over in ("train", ""):
        tally.add(msgspec.structs.replace(evaluation, inner=over == "train"), 1.0)
        assert tally.status.is_evaluating and " · evaluating · " in progress.line(tally.status)
        tally.add(journal.PhaseEndRecord(2, [], 0.75), 2.0)
        assert tally.status.task == over and "evaluating" not in progress.line(tally.status)
        if over:
            tally.add(journal.PhaseEndRecord(1, [], None), 2.0)
    assert tally.status.results == 2


def test_who_is_in_the_journal_alone_is_not_on_its_way() -> None:
    tally = StatusTracker("job")
    phase = journal.PhaseRecord(1, "train", 0, 80, 80, [4, 4], [1, 1], 0)
    tally.resume([journal.EraRecord(1, ["w0", "w1"]), phase, round_record(1, [6, 4])], 0.0)
    tally.describe("w1", "w1", "training", 0)
    assert {worker.name: worker.state for worker in tally.status.workers} == {"w0": "ended", "w1": "training"}


def test_a_log_gets_plain_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = progress.Terminal(out, err)
    tally = StatusTracker("job")
    tally.add(journal.EraRecord(1, ["w0"]), 0.0)
    tally.add(journal.PhaseRecord(1, "train", 0, 8, 8, [4], [1], 0), 0.0)
    screen.progress(tally.status)
    tally.add(round_record(1, [4]), 0.1)
    for _ in range(3):
        screen.progress(tally.status)
    screen.output("w0", "[bold]hello[/bold]", "stdout")
    assert out.getvalue() == "[w0] [bold]hello[/bold]\n"
    assert err.getvalue().count("\n") == 1 and err.getvalue().startswith("pliant: epoch 1 50%")


@given(
    st.builds(
        Job,
        st.just("127.0.0.1:1"),
        st.text(min_size=1),
        st.just("w0"),
        st.floats(0.001, 1.0),
        st.none() | st.integers(1, 10**6),
    )
)
def test_a_job_survives_the_environment(job: Job) -> None:
    assert job_from(environment_of(job)) == job


def test_no_job_in_the_environment() -> None:
    assert job_from({"PLIANT_PACE": "0.5"}) is None


@pytest.mark.parametrize(
    "changed", [{"PLIANT_TOKEN": ""}, {"PLIANT_PACE": "2"}, {"PLIANT_PACE": "x"}, {"PLIANT_SIZE": "0"}]
)
def test_a_broken_environment_is_refused(changed: dict[str, str]) -> None:
    environment = environment_of(Job("127.0.0.1:1", "secret", "w0"))
    with pytest.raises(UsageError) as caught:
        job_from({**environment, **changed})
    assert next(iter(changed)) in str(caught.value) and "secret" not in str(caught.value)


def test_a_worker_whose_log_is_on_a_full_disk_is_reported_all_the_same() -> None:
    async def started() -> tuple[list[str], int]:
        shown: list[str] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        worker = WorkerProcess(
            "w0",
            Path("/dev/full"),
            SeenTracebacks(),
            lambda _, line, stream: shown.append(line),
            lambda _, status: ended.set_result(status),
        )
        worker.start([sys.executable, "-c", "print('a word'); raise SystemExit(3)"], dict(os.environ))
        return shown, await asyncio.wait_for(ended, 60)

    assert asyncio.run(started()) == (["a word"], 3)
