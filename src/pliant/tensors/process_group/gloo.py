"""The era's process group: an all-gather of tickets and an all-reduce of gradients in the background.

Question  How are contributions summed while the worker goes on computing, and how are groups formed and left?
Holds     Only ``Gloo()``, ``wait``, ``broadcast``, ``told`` and ``FormingGroup.result`` block the caller. No Python
          runs in gloo's threads (a thread that asks for the interpreter while it shuts down aborts the process), so
          completion is polled. A group is formed over the control channel, under an attempt number that is never used
          twice. It may be left at any moment, even during a sum: its connections are cut, and its memory stays
          allocated until gloo's threads are done with it. The word ``rank`` is used in this package only.
Source    Facts about gloo in DESIGN ("measured on this kind of machine"); docs/design/0005-exchange.md and
          0007-elastic.md.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pliant.tensors.process_group import failures, teardown
from pliant.tensors.process_group.channel import Summation
from pliant.tensors.process_group.gloo_sockets import GlooSockets
from pliant.tensors.process_group.reachability import ProbePort, Unconnected, unreached

# The all-gather of tickets waits for the slowest member, whose micro-batch may take minutes (compilation).
# The coordinator reports dead members, so this timeout need not.
_HANDING_IN = timedelta(hours=2)
# A whole sum starts when all tickets are in, and needs no main thread. If a connection breaks in the middle of a large
# message, gloo never ends the operation: this timeout does, and until then its memory is in use.
_SUMMING = timedelta(seconds=60)
# The sum of a bucket waits for the slowest member's backward pass. Longer than any pass, and short enough to free the
# memory of an operation that gloo never ends.
_SUMMING_PARTS = timedelta(minutes=10)
# How long members wait for each other to begin forming the group.
_FORMING_S = 60.0
# Once all have begun, connecting takes milliseconds. If a member dies then, gloo may block for five times this.
_CONNECTING = timedelta(seconds=10)
# How often an idle worker polls its exchange: a poll costs a microsecond, a sum over loopback takes milliseconds.
_POLL_S = 0.0005
# How often a blocked caller checks whether it may go on waiting.
_CHECK_S = 0.005
# How soon a thread that waits for another member's key notices that the group was abandoned.
_REVOKED_S = 0.05


class KeyValue(Protocol):
    """The key-value store of the control channel that a group is formed with. ``get`` raises TimeoutError in time."""

    def put(self, attempt: int, key: str, value: bytes) -> None: ...

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes: ...


class ControlStore(dist.Store):
    """A torch ``Store`` over the control channel; gloo calls only ``set``, ``get`` and ``wait``."""

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


class GlooSummation:
    """A ``Summation``. Its memory belongs to the group until it is over, even if the group is left."""

    def __init__(
        self, works: Sequence[Any], tickets: Callable[[], list[bytes]] = list, memory: Sequence[Tensor] = ()
    ) -> None:
        self._works = list(works)
        self._tickets = tickets
        self._memory = list(memory)
        self._error: RuntimeError | None = None
        self._start_s = time.perf_counter()
        self._more = False
        self.seconds = 0.0
        """time from hand-in until a poll saw that it was over"""

    def await_more(self) -> None:
        """More sums will be added: the exchange is not over before ``complete``."""
        self._more = True

    def add(self, works: Sequence[Any], memory: Sequence[Tensor]) -> None:
        """Add further operations that were started."""
        self._works += works
        self._memory += memory

    def complete(self) -> None:
        """No more operations will be added."""
        if self._more:
            self._more, self._start_s = False, time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether the exchange has completed or failed: its tensors are not accessed any more."""
        works = self._works
        if self._more:
            return False
        if works and all(work.is_completed() for work in works):
            self.seconds = time.perf_counter() - self._start_s
            self._error = _first_error(works)
            # A work object keeps the group's connections open.
            self._works, self._memory = [], []
        return not self._works

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, for a limited time."""
        deadline_s = time.perf_counter() + timeout_s
        while not self.over:
            if time.perf_counter() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def tickets(self) -> list[bytes]:
        """All tickets, in the order of the roster; raises the error if the exchange failed. Only once it is over."""
        if self._error is not None:
            raise RuntimeError(str(self._error)) from None
        return self._tickets()


def _first_error(works: Sequence[Any]) -> RuntimeError | None:
    error = None
    for work in works:
        try:
            # Called for each work: on CUDA this makes the compute stream wait for the sum.
            work.wait()
        except RuntimeError as failure:
            error = error or failure.with_traceback(None)
    return error


class Alone:
    """A group of one worker: nothing is waited for, and every tensor is its own sum."""

    members = 1
    place = 0

    def exchange(self, ticket: bytes, sums: Sequence[Tensor]) -> GlooSummation:
        return GlooSummation([], lambda: [ticket])

    def gather(self, ticket: bytes) -> GlooSummation:
        return GlooSummation([], lambda: [ticket])

    def add_up(self, sums: Sequence[Tensor]) -> GlooSummation:
        return GlooSummation([])

    def begin(self, ticket: bytes) -> GlooSummation:
        summation = self.gather(ticket)
        summation.await_more()
        return summation

    def go_on(self, summation: Summation, sums: Sequence[Tensor], *, last: bool = False) -> None:
        assert isinstance(summation, GlooSummation)
        if last:
            summation.complete()

    def broadcast(self, tensor: Tensor, root: int = 0, check: Callable[[], None] | None = None) -> None:
        """Nothing to send: there is no other worker."""

    def tell(self, payload: bytes, root: int) -> None:
        """Nothing to send: there is no other worker."""

    def told(self, root: int, check: Callable[[], None]) -> bytes:
        raise RuntimeError("nobody else is in a group of one")

    def leave(self) -> None:
        """Nothing to take down."""


class Gloo:
    """The workers of an era, connected by gloo."""

    def __init__(self, channel: KeyValue, *, attempt: int, place: int, members: int, address: str) -> None:
        self.members = members
        self.place = place
        self._under_way: list[GlooSummation] = []
        self._wiring = GlooSockets(address)
        try:
            with ProbePort(address, members) as doorbell:
                # gloo's own timeout is short: it must not begin before all members are there and reachable.
                others = _everybody(channel, attempt, place, members, doorbell.address)
                missing = unreached(others)
                if missing:
                    raise Unconnected("the data ports of other members cannot be reached", missing)
                self._group: Any = _connected(ControlStore(channel, attempt), place, members, self._wiring.device)
        except BaseException:
            self._wiring.release()
            raise
        teardown.leave_at_exit(self)

    def exchange(self, ticket: bytes, sums: Sequence[Tensor]) -> GlooSummation:
        """All-gather the tickets and all-reduce ``sums`` in place; returns at once."""
        return self._exchanging(ticket, sums)

    def gather(self, ticket: bytes) -> GlooSummation:
        """The first half of ``exchange``, for a caller that needs the tickets before it knows the sums."""
        return self._exchanging(ticket, [])

    def add_up(self, sums: Sequence[Tensor]) -> GlooSummation:
        """The second half of ``exchange``; it has no tickets."""
        return self._started(self._summing(sums), list, sums)

    def begin(self, ticket: bytes) -> GlooSummation:
        """Start an exchange with only the ticket; tensors to sum follow by ``go_on``."""
        summation = self._exchanging(ticket, [])
        summation.await_more()
        return summation

    def go_on(self, summation: Summation, sums: Sequence[Tensor], *, last: bool = False) -> None:
        """All-reduce these tensors, too, after the earlier ones; ``last``: there will be no more."""
        assert isinstance(summation, GlooSummation)
        summation.add(self._summing(sums, _SUMMING_PARTS), sums)
        if last:
            summation.complete()

    def broadcast_async(self, tensor: Tensor, root: int) -> GlooSummation:
        """Broadcast the tensor of the member at index ``root``, in place; returns at once."""
        return self._started([self._spreading(tensor, root)], list, [tensor])

    def broadcast(self, tensor: Tensor, root: int = 0, check: Callable[[], None] | None = None) -> None:
        """The same, but block until it is over. ``check`` is called meanwhile and may end the wait by raising."""
        spreading = self.broadcast_async(tensor, root)
        while not spreading.wait(_CHECK_S):
            if check is not None:
                check()
        spreading.tickets()

    def tell(self, payload: bytes, root: int) -> None:
        """Send bytes to the members that call ``told``; all members that have them call this. Returns at once."""
        self.broadcast_async(torch.tensor([len(payload)]), root)
        self.broadcast_async(torch.frombuffer(bytearray(payload), dtype=torch.uint8), root)

    def told(self, root: int, check: Callable[[], None]) -> bytes:
        """Receive the bytes of the member at index ``root``; blocks. ``check`` may end the wait by raising."""
        length = torch.zeros(1, dtype=torch.int64)
        self.broadcast(length, root, check)
        payload = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast(payload, root, check)
        return bytes(payload.numpy())

    def leave(self) -> None:
        """Take the group down without waiting for other members; running sums fail, here and there."""
        if self._group is None:
            return
        for each in self._under_way:
            each.complete()
        remains = teardown.Teardown(self._group, self._wiring, [each for each in self._under_way if not each.over])
        # The thread that drops the last reference waits for gloo to end: this must not be the caller's.
        self._group, self._under_way = None, []
        remains.dispose()

    def _exchanging(self, ticket: bytes, sums: Sequence[Tensor]) -> GlooSummation:
        mine = torch.frombuffer(bytearray(ticket), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.members)]
        # All members start the same collectives in the same order: tickets, then sums.
        works = [self._present().allgather([theirs], [mine]), *self._summing(sums)]
        return self._started(works, lambda: [bytes(each.numpy()) for each in theirs], [mine, *theirs, *sums])

    def _summing(self, sums: Sequence[Tensor], timeout: timedelta = _SUMMING) -> list[Any]:
        options = dist.AllreduceOptions()
        options.timeout = timeout
        return [self._present().allreduce([tensor], options) for tensor in sums]

    def _spreading(self, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._present().broadcast([tensor], options)

    def _started(
        self, works: Sequence[Any], tickets: Callable[[], list[bytes]], memory: Sequence[Tensor]
    ) -> GlooSummation:
        summation = GlooSummation(works, tickets, memory)
        self._under_way = [each for each in self._under_way if not each.over] + [summation]
        return summation

    def _present(self) -> Any:
        if self._group is None:
            raise RuntimeError("this group was left")
        return self._group


def _everybody(channel: KeyValue, attempt: int, place: int, members: int, address: bytes) -> dict[int, bytes]:
    """The addresses of the other members by index; waits until all have published theirs."""
    channel.put(attempt, f"here/{place}", address)
    others = [other for other in range(members) if other != place]
    return {other: channel.get(attempt, f"here/{other}", _FORMING_S) for other in others}


def _connected(store: dist.Store, place: int, members: int, device: Any) -> Any:
    """gloo's process group: connected with a short timeout, used with a long one."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave most of it out
    options = gloo._Options()
    options._devices = [device]
    extensible = hasattr(gloo, "_set_default_timeout")
    options._timeout = _CONNECTING if extensible else _HANDING_IN
    # One thread: a sum begins, and its timeout starts, only when the all-gather of tickets is over.
    options._threads = 1
    try:
        group = gloo(store, place, members, options)
    except Abandoned:
        raise
    except RuntimeError as error:
        raise failures.as_own(error) or Unconnected(f"the members could not be connected: {error}") from error
    if extensible:
        group._set_default_timeout(_HANDING_IN)
    return group


# -- forming in the background

Group = TypeVar("Group", bound=Gloo)


class Abandoned(RuntimeError):
    """The group that was being formed is not needed any more."""


class _Revocable:
    """The control channel, usable until the forming is abandoned."""

    def __init__(self, channel: KeyValue) -> None:
        self._channel = channel
        self.revoked = False

    def put(self, attempt: int, key: str, value: bytes) -> None:
        self._check()
        self._channel.put(attempt, key, value)

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._check()
            left_s = deadline_s - time.monotonic()
            try:
                return self._channel.get(attempt, key, max(0.0, min(left_s, _REVOKED_S)))
            except TimeoutError:
                if left_s <= _REVOKED_S:
                    raise TimeoutError(f"waited {timeout_s:g} s for {key!r}") from None

    def _check(self) -> None:
        if self.revoked:
            raise Abandoned("the group was abandoned while it was being formed")


class FormingGroup(Generic[Group]):
    """A group that is being formed in the background: ``FormingGroup(lambda channel: Gloo(channel, …), link)``."""

    def __init__(self, make: Callable[[KeyValue], Group], channel: KeyValue) -> None:
        self._channel = _Revocable(channel)
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._error: BaseException | None = None
        self.over = False
        """whether ``result`` would return without waiting"""
        self._thread = teardown.in_background(lambda: self._form(make), "pliant-forming", self.abandon)

    @property
    def failed(self) -> bool:
        """Whether it is over without a group."""
        return self.over and self._error is not None

    def result(self) -> Group:
        """The group, which the caller now owns; raises the error if forming failed. Waits until it is over."""
        self._thread.join()
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            raise self._error or Abandoned("the group was abandoned or taken before")
        return group

    def abandon(self) -> None:
        """Give up, at any moment: a group that is formed later is closed, one taken by ``result`` is not affected."""
        with self._lock:
            self._channel.revoked = True
            group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _form(self, make: Callable[[KeyValue], Group]) -> None:
        group = None
        try:
            group = make(self._channel)
        except BaseException as error:
            # Its frames hold the half-made group and with it open sockets.
            traceback.clear_frames(error.__traceback__)
            self._error = error.with_traceback(None)
        with self._lock:
            if not self._channel.revoked:
                self._group, group = group, None
        if group is not None:
            group.leave()
        self.over = True
