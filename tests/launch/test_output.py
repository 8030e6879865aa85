"""What is shown of workers' output: pliant.launch.output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.launch.output import LastError, LineSplitter, SeenTracebacks, TracebackFilter, is_transports

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
