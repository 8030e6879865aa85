"""The era's process group: tickets gathered and gradients summed in the background.

Question  How does a contribution travel while the worker computes on?
Holds     Nothing here blocks the caller except ``wait`` and ``broadcast``. No Python runs in gloo's threads (one that
          asks for the interpreter while it shuts down takes the process with it), so completion is polled. A group
          is formed over the control channel, under an attempt number that is never used twice. ``rank`` exists in
          this module only.
Source    Facts about gloo in DESIGN ("measured on this kind of machine"); docs/design/0005-exchange.md.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Death is told by the coordinator, not by this timeout: a micro-batch may take minutes (compilation).
_TIMEOUT = timedelta(hours=12)
_FORMING_S = 60.0
# An idle worker's look at its exchange: a look costs a microsecond, a sum over loopback takes milliseconds.
_POLL_S = 0.0005


class KeyValue(Protocol):
    """What forming a group needs of the control channel."""

    def put(self, attempt: int, key: str, value: bytes) -> None: ...

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes: ...


class Prefixed(dist.Store):
    """A torch store over the control channel; gloo calls set, get and wait only."""

    def __init__(self, channel: KeyValue, attempt: int, prefix: str = "") -> None:
        super().__init__()
        self._channel = channel
        self._attempt = attempt
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:  # type: ignore[override]
        self._channel.put(self._attempt, self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self._channel.get(self._attempt, self._prefix + key, _FORMING_S)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        for key in keys:
            self._channel.get(self._attempt, self._prefix + key, timeout.total_seconds() if timeout else _FORMING_S)


class Summation:
    """One round's exchange, under way or over."""

    def __init__(self, works: Sequence[Any], tickets: Callable[[], list[bytes]]) -> None:
        self.works = list(works)
        self.tickets_when_over = tickets
        self._finished: list[Any] = []
        self._start_s = time.perf_counter()
        self.seconds = 0.0
        """from hand-in until it was seen to be over"""

    @property
    def over(self) -> bool:
        """Whether everything is in, or the exchange has failed."""
        if self.works and all(work.is_completed() for work in self.works):
            self._finished, self.works = self.works, []
            self.seconds = time.perf_counter() - self._start_s
        return not self.works

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, for a limited time."""
        deadline_s = time.perf_counter() + timeout_s
        while not self.over:
            if time.perf_counter() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def tickets(self) -> list[bytes]:
        """Everybody's tickets, in the order of the roster; raises what went wrong. Only once it is over."""
        for work in self._finished:
            work.wait()
        return self.tickets_when_over()


class Alone:
    """A group of one: every exchange is over at once."""

    members = 1
    place = 0

    def exchange(self, ticket: bytes, sums: Sequence[Tensor]) -> Summation:
        return Summation([], lambda: [ticket])

    def broadcast(self, tensor: Tensor) -> None:
        """Nobody to tell."""

    def leave(self) -> None:
        """Nothing to take down."""


class Gloo:
    """The workers of an era, connected by gloo."""

    def __init__(self, channel: KeyValue, *, attempt: int, place: int, members: int, address: str) -> None:
        self.members = members
        self.place = place
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave most of it out
        options = gloo._Options()
        options._timeout = _TIMEOUT
        # Many hosts resolve their own name to 127.0.1.1: listen where the coordinator was reached from.
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(Prefixed(channel, attempt), place, members, options)
        self._last: Summation | None = None

    def exchange(self, ticket: bytes, sums: Sequence[Tensor]) -> Summation:
        """Gather everybody's tickets and add up ``sums`` in place; returns at once."""
        mine = torch.frombuffer(bytearray(ticket), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.members)]
        works = [self._group.allgather([theirs], [mine]), *(self._group.allreduce([tensor]) for tensor in sums)]
        self._last = Summation(works, lambda: [bytes(each.numpy()) for each in theirs])
        return self._last

    def broadcast(self, tensor: Tensor) -> None:
        """Give everybody the leader's values, in place; blocks. Only at the start of an era."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def leave(self) -> None:
        """Take the group down without waiting for anybody."""
        self._group.abort()
        if self._last is not None and not self._last.over:
            # gloo's abort frees nobody and its destructor waits for the sum, that is until the others' processes have
            # ended, who wait in the same way: a group that is left in the middle of a sum is never destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
