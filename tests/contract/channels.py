"""What every ``Channel`` promises, as functions that each member of a group runs at the same time.

Run as a process of its own it is one member of groups over gloo, one group for each promise:

    python channels.py DIRECTORY PLACE MEMBERS
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pliant.tensors.process_group.channel import Channel, Summation
from pliant.tensors.process_group.gloo import Alone, Gloo
from pliant.tensors.process_group.nccl import Nccl
from pliant.testing.clock import Process, World
from pliant.testing.collective import VirtualGroup
from pliant.testing.exact import Flat
from pliant.testing.meeting import Meeting

CHANNELS: list[type[Channel]] = [Alone, Gloo, Nccl, VirtualGroup]
"""All implementations: the type checker finds what one of them lacks. Nccl needs a GPU and is checked only so."""

PATIENCE_S = 60.0


@dataclass
class End:
    """One member's end of a group, with the numbers that it can sum."""

    channel: Channel
    make: Callable[[list[int]], Any]
    """a tensor of these numbers"""
    read: Callable[[Any], list[int]]

    @property
    def place(self) -> int:
        return self.channel.place

    @property
    def members(self) -> int:
        return self.channel.members

    def ticket(self, what: int = 0) -> bytes:
        return bytes([self.place, what] * 8)

    def tickets(self, what: int = 0) -> list[bytes]:
        """Everybody's."""
        return [bytes([place, what] * 8) for place in range(self.members)]

    def numbers(self, length: int, factor: int = 1) -> Any:
        """A tensor that differs from member to member."""
        return self.make([factor * (self.place + 1) * (index + 1) for index in range(length)])

    def total(self, length: int, factor: int = 1) -> list[int]:
        """The sum of these over all members."""
        members = sum(range(1, self.members + 1))
        return [factor * members * (index + 1) for index in range(length)]

    def wait(self, summation: Summation) -> None:
        """Until it is over, as a worker waits: a little at a time."""
        for _ in range(30_000):
            if summation.wait(0.002):
                assert summation.over
                assert summation.seconds >= 0.0
                return
        raise AssertionError("the exchange is not over")


# -- promises


def exchange_gathers_in_order_and_sums_in_place(end: End) -> None:
    sums = [end.numbers(5), end.numbers(3, factor=2)]
    summation = end.channel.exchange(end.ticket(), sums)
    end.wait(summation)
    assert summation.tickets() == end.tickets()
    assert summation.tickets() == end.tickets(), "they can be read again"
    assert [end.read(each) for each in sums] == [end.total(5), end.total(3, factor=2)]


def gather_and_add_up_are_the_halves_of_an_exchange(end: End) -> None:
    """A member may learn from the tickets what it adds up with the others, who do both at once."""
    sums = [end.numbers(4)]
    if end.place == 0:
        gathered = end.channel.gather(end.ticket())
        end.wait(gathered)
        summed = end.channel.add_up(sums)
        end.wait(summed)
        assert summed.tickets() == []
    else:
        gathered = end.channel.exchange(end.ticket(), sums)
        end.wait(gathered)
    assert gathered.tickets() == end.tickets()
    assert end.read(sums[0]) == end.total(4)


def parts_are_one_exchange(end: End) -> None:
    """``begin`` and ``go_on``: it is over after the last part and not before."""
    sums = [end.numbers(4, factor) for factor in (1, 2, 3)]
    summation = end.channel.begin(end.ticket())
    for part in sums[:2]:
        end.channel.go_on(summation, [part])
    assert not summation.wait(0.05) and not summation.over
    end.channel.go_on(summation, sums[2:], last=True)
    end.wait(summation)
    assert summation.tickets() == end.tickets()
    assert [end.read(each) for each in sums] == [end.total(4, factor) for factor in (1, 2, 3)]


def several_exchanges_run_in_their_order(end: End) -> None:
    sums = [end.numbers(4, factor) for factor in (1, 2, 3)]
    running = [end.channel.exchange(end.ticket(what), [each]) for what, each in enumerate(sums)]
    end.wait(running[-1])
    for what, summation in enumerate(running):
        assert summation.over
        assert summation.tickets() == end.tickets(what)
    assert [end.read(each) for each in sums] == [end.total(4, factor) for factor in (1, 2, 3)]


def an_empty_list_of_sums_is_a_gathering(end: End) -> None:
    summation = end.channel.exchange(end.ticket(), [])
    end.wait(summation)
    assert summation.tickets() == end.tickets()


def broadcast_overwrites_in_place(end: End) -> None:
    root = end.members - 1
    tensor = end.numbers(6)
    looks: list[int] = []
    end.channel.broadcast(tensor, root, lambda: looks.append(1))
    assert end.read(tensor) == [(root + 1) * (index + 1) for index in range(6)]
    # The next operation is the same for all.
    exchange_gathers_in_order_and_sums_in_place(end)


def told_is_what_was_told(end: End) -> None:
    """Whoever has the bytes tells them, of any length; the others are told."""
    payload = bytes(range(256)) * 3 + b"!"
    if end.members == 1 or end.place == 1:
        end.channel.tell(payload, min(1, end.members - 1))
    else:
        assert end.channel.told(1, lambda: None) == payload
    exchange_gathers_in_order_and_sums_in_place(end)


class Enough(Exception):
    """Ends a wait."""


def check_ends_a_wait(end: End) -> None:
    if end.members == 1:
        return
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise Enough

    if end.place == 1:
        return
    try:
        end.channel.told(1, check)
    except Enough:
        assert len(looks) == 3
    else:
        raise AssertionError("it was told what nobody has said")


def nothing_succeeds_without_everybody(end: End) -> None:
    """One hands in nothing and leaves: the others' sums fail, or do not end; whoever has left can do nothing more."""
    if end.members == 1:
        return
    if end.place == end.members - 1:
        end.channel.leave()
    else:
        try:
            summation = end.channel.exchange(end.ticket(), [end.numbers(4)])
        except RuntimeError:
            return
        if summation.wait(0.5):
            try:
                summation.tickets()
            except RuntimeError:
                pass
            else:
                raise AssertionError("a sum was completed without everybody")
        end.channel.leave()
    end.channel.leave()
    for start in (lambda: end.channel.gather(end.ticket()), lambda: end.channel.begin(end.ticket())):
        try:
            start()
        except RuntimeError as error:
            assert "left" in str(error)
        else:
            raise AssertionError("something was started in a group that was left")


PROMISES: list[Callable[[End], None]] = [
    exchange_gathers_in_order_and_sums_in_place,
    gather_and_add_up_are_the_halves_of_an_exchange,
    parts_are_one_exchange,
    several_exchanges_run_in_their_order,
    an_empty_list_of_sums_is_a_gathering,
    broadcast_overwrites_in_place,
    told_is_what_was_told,
    check_ends_a_wait,
    nothing_succeeds_without_everybody,
]


# -- groups


def tensors_of(channel: Channel) -> End:
    return End(channel, lambda values: torch.tensor(values, dtype=torch.float64), lambda tensor: tensor.long().tolist())


def alone(promise: Callable[[End], None]) -> None:
    """A group of one."""
    promise(tensors_of(Alone()))


def in_virtual_time(promise: Callable[[End], None], seed: int, members: int) -> None:
    """Members of the simulator's group."""
    world = World(f"{promise.__name__} {seed}")
    meeting = Meeting(world, 1, members, 0.004)
    over: list[int] = []

    def member(place: int) -> Callable[[Process], int]:
        def body(process: Process) -> int:
            group = VirtualGroup(meeting, place, process)
            promise(End(group, Flat, lambda flat: list(flat.values)))
            over.append(place)
            if len(over) == members:
                world.stop()
            return 0

        return body

    for place in range(members):
        process = Process(world, f"w{place}", place, member(place))
        meeting.processes[place] = process
        process.start()
    world.run()


class Files:
    """A control channel: a file for each key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, attempt: int, key: str, value: bytes) -> None:
        path = self._path(attempt, key)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(value)
        part.rename(path)

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        path, deadline_s = self._path(attempt, key), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() >= deadline_s:
                raise TimeoutError(key)
            time.sleep(0.001)
        return path.read_bytes()

    def _path(self, attempt: int, key: str) -> Path:
        return self._directory / f"{attempt}-{key.replace('/', '_')}"


def outcome(directory: Path, promise: str, place: int) -> Path:
    """Where a member writes what has gone wrong, and nothing where all was well."""
    return directory / f"{promise}.{place}"


def main(directory: Path, place: int, members: int) -> None:
    """One member over gloo, through all promises."""
    torch.set_num_threads(1)
    channel = Files(directory)
    for attempt, promise in enumerate(PROMISES, start=1):
        error = ""
        group = Gloo(channel, attempt=attempt, place=place, members=members, address="127.0.0.1")
        try:
            promise(tensors_of(group))
        except Exception:
            error = traceback.format_exc()
        # Whoever leaves early cuts the others' sums.
        channel.put(attempt, f"done/{place}", b"")
        for other in range(members):
            channel.get(attempt, f"done/{other}", PATIENCE_S)
        group.leave()
        outcome(directory, promise.__name__, place).write_text(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
