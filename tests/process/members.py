"""One member of the groups that ``test_groups`` forms: run as a process of its own.

    python members.py DIRECTORY PLACE FIRST LAST      a member that lives through the attempts from FIRST to LAST
    python members.py DIRECTORY victim ATTEMPT        one that takes part in one group and meets its fate there

A directory is the control channel: a file per key. The members' schedule is a pure function of the attempt.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pliant.tensors.process_group import gloo as groups

MEMBERS = 4
"""of every group: the last place is the victims', where there is one"""
FATES = {5: "killed", 13: "killed with a forked child", 21: "stopped", 29: "killed while connecting"}
"""attempt → what happens to the member at the last place"""
WARM_UP = 4
"""groups before the first count: torch starts its pools with the first operations"""
PATIENCE_S = 60.0


class Files:
    """A control channel; also where members tell each other how far they are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.before_get: Callable[[str], None] = lambda key: None

    def put(self, attempt: int, key: str, value: bytes) -> None:
        path = self._path(attempt, key)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(value)
        part.rename(path)

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        self.before_get(key)
        path, deadline_s = self._path(attempt, key), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() >= deadline_s:
                raise TimeoutError(key)
            time.sleep(0.001)
        return path.read_bytes()

    def meet(self, attempt: int, what: str, place: int, others: range | list[int]) -> None:
        """Wait until all ``others`` have got here too."""
        self.put(attempt, f"{what}/{place}", b"")
        for other in others:
            self.get(attempt, f"{what}/{other}", PATIENCE_S)

    def _path(self, attempt: int, key: str) -> Path:
        return self.directory / f"{attempt}-{key.replace('/', '_')}"


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.001)


def forming(channel: Files, attempt: int, place: int, members: int) -> groups.FormingGroup[groups.Gloo]:
    return groups.FormingGroup(
        lambda wrapped: groups.Gloo(wrapped, attempt=attempt, place=place, members=members, address="127.0.0.1"),
        channel,
    )


class Member:
    """A member of all groups, one after another."""

    def __init__(self, channel: Files, place: int) -> None:
        self.channel = channel
        self.place = place
        self.leave_s: list[float] = []

    def run(self, attempt: int) -> None:
        match FATES.get(attempt), attempt % 4:
            case None, 0 | 1:
                self.whole(attempt)
            case None, 2:
                self.one_hands_in_nothing(attempt)
            case None, _:
                self.one_never_forms(attempt)
            case "killed while connecting", _:
                self.one_dies_while_connecting(attempt)
            case _:
                self.one_meets_its_fate(attempt)

    def formed(self, attempt: int, members: int) -> groups.Gloo:
        under_way = forming(self.channel, attempt, self.place, members)
        until(lambda: under_way.over, "the group")
        return under_way.result()

    def leave(self, group: groups.Gloo) -> None:
        start = time.perf_counter()
        group.leave()
        self.leave_s.append(time.perf_counter() - start)

    def whole(self, attempt: int) -> None:
        """A follower gathers first and adds up afterwards; the others do both at once."""
        group = self.formed(attempt, MEMBERS - 1)
        sums = [torch.full((50_000,), float(self.place + 1)), torch.ones(3, dtype=torch.float64)]
        ticket = bytes([self.place] * 16)
        if self.place == attempt % (MEMBERS - 1):
            gathered = group.gather(ticket)
            until(lambda: gathered.over, "the tickets")
            summed = group.add_up(sums)
            until(lambda: summed.over, "the sums")
            assert summed.tickets() == []
        else:
            gathered = group.exchange(ticket, sums)
            until(lambda: gathered.over, "the exchange")
        assert gathered.tickets() == [bytes([place] * 16) for place in range(MEMBERS - 1)]
        assert float(sums[0].sum()) == 50_000 * sum(range(1, MEMBERS))
        root = attempt % (MEMBERS - 1)
        told = torch.tensor([float(self.place)])
        group.broadcast(told, root, check=lambda: None)
        assert float(told) == root
        self.leave(group)

    def one_hands_in_nothing(self, attempt: int) -> None:
        group = self.formed(attempt, MEMBERS - 1)
        summation = self.started(group) if self.place != attempt // 4 % (MEMBERS - 1) else None
        self.channel.meet(attempt, "started", self.place, range(MEMBERS - 1))
        self.left_in_the_middle(group, summation)

    def one_never_forms(self, attempt: int) -> None:
        absent = attempt // 4 % (MEMBERS - 1)
        if self.place == absent:
            return
        under_way = forming(self.channel, attempt, self.place, MEMBERS - 1)
        self.channel.meet(attempt, "waiting", self.place, [each for each in range(MEMBERS - 1) if each != absent])
        under_way.abandon()
        self.refused(under_way)

    def one_meets_its_fate(self, attempt: int) -> None:
        group = self.formed(attempt, MEMBERS)
        summation = self.started(group)
        self.channel.meet(attempt, "started", self.place, range(MEMBERS))
        if self.place in (0, MEMBERS - 2) and FATES[attempt].startswith("killed"):
            until(lambda: summation.over, "the end of a neighbour")
        self.left_in_the_middle(group, summation)

    def one_dies_while_connecting(self, attempt: int) -> None:
        under_way = forming(self.channel, attempt, self.place, MEMBERS)
        self.channel.get(attempt, "dead", PATIENCE_S)
        under_way.abandon()
        self.refused(under_way)

    def started(self, group: groups.Gloo) -> groups.GlooSummation:
        return group.exchange(bytes(16), [torch.ones(300_000), torch.ones(300_000)])

    def left_in_the_middle(self, group: groups.Gloo, summation: groups.GlooSummation | None) -> None:
        self.leave(group)
        if summation is not None:
            until(lambda: summation.over, "the end of a sum whose group was left")
            try:
                summation.tickets()
            except RuntimeError:
                return
            raise AssertionError("the sum was completed without everybody")

    def refused(self, under_way: groups.FormingGroup[groups.Gloo]) -> None:
        until(lambda: under_way.over, "the end of the forming")
        try:
            under_way.result()
        except RuntimeError:
            return
        raise AssertionError("an abandoned group was formed")


def counts() -> dict[str, int]:
    # Tensors are freed by gloo's threads: what glibc keeps for later is no leak.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


class Own:
    """A connection and an epoll instance of the user's, which must stay as they are."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.near = socket.create_connection(self.server.getsockname())
        self.far, _ = self.server.accept()
        self.loop = select.epoll()
        for each in (self.server, self.near, self.far):
            self.loop.register(each, select.EPOLLIN)

    def check(self) -> None:
        self.near.sendall(b"still here")
        assert self.far.recv(10) == b"still here"
        with socket.create_connection(self.server.getsockname()):
            self.server.accept()[0].close()


def live(channel: Files, place: int, attempts: range) -> None:
    """Form and leave a group per attempt; print what this process held before and after."""
    own = Own()
    member = Member(channel, place)
    for attempt in range(WARM_UP):
        member.whole(1_000_000 + attempt)
    until(lambda: threading.active_count() == 1, "the undertaker")
    before, start = counts(), time.perf_counter()
    member.leave_s = []
    for attempt in attempts:
        member.run(attempt)
    seconds = time.perf_counter() - start
    until(lambda: threading.active_count() == 1, "the undertaker")
    own.check()
    # Threads that have ended are in the kernel's list for a moment longer.
    until(lambda: counts()["threads"] <= before["threads"], "threads to end")
    print(json.dumps({"before": before, "after": counts(), "leave_s": member.leave_s, "seconds": seconds}), flush=True)


def suffer(channel: Files, attempt: int) -> None:
    """Be the last member of one group."""
    place, fate = MEMBERS - 1, FATES[attempt]
    channel.get(attempt, "here/0", PATIENCE_S)
    if fate == "killed while connecting":
        # gloo asks for the others' addresses when it has published its own.
        channel.before_get = lambda key: None if key.startswith("here/") else die(channel, attempt)
    group = groups.Gloo(channel, attempt=attempt, place=place, members=MEMBERS, address="127.0.0.1")
    if fate == "killed with a forked child" and os.fork() == 0:
        # As a loader's process: it outlives its parent, and the others must not take it for the parent.
        channel.get(attempt, "child may go", PATIENCE_S)
        os._exit(0)
    channel.meet(attempt, "started", place, range(MEMBERS - 1))
    if fate == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    die(channel, attempt)
    group.leave()


def die(channel: Files, attempt: int) -> None:
    channel.put(attempt, "dead", b"")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A member that dies while it connects is noticed by gloo's timeout only.
    groups._CONNECTING = timedelta(seconds=1)
    # So is, at times, a connection that is cut in the middle of a large message.
    groups._SUMMING = timedelta(seconds=2)
    files = Files(Path(sys.argv[1]))
    if sys.argv[2] == "victim":
        suffer(files, int(sys.argv[3]))
    else:
        live(files, int(sys.argv[2]), range(int(sys.argv[3]), int(sys.argv[4])))
