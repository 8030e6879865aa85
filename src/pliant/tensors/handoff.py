"""The state stream between a donor and a newcomer.

Question  How does a newcomer get tensors as of a known exchange while the donor goes on computing?
Holds     The donor's main thread only takes copies, when it is between two exchanges: at the exchange asked for or a
          later one, and it says at which. Threads do all input and output. Both ends prove that they know the job's
          token before anything else is sent. Unauthenticated connections have one deadline for the proof, and their
          number is bounded: a further one replaces the oldest, so that they cannot shut out a newcomer. Tensors that
          never change are not copied; if one changes meanwhile, the stream is broken off. No pickle: a JSON skeleton
          and raw tensors in checksummed chunks. Damaged, short or too large data only fails the newcomer's request,
          with an error text.
Source    ours; docs/design/0007-elastic.md ("Handing the state on").

On the wire, donor D and newcomer N:

    D, N: authentication (``framing.welcome``, ``framing.introduce``)
    N: {"era": 3, "as_of": 17, "want": [names]}      D: refused (reason) | state (exchange, sizes)
    D, after "state": the skeleton, all tensors in the skeleton's order (``framing.write_chunks``), an end mark
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, BinaryIO

import msgspec
from torch import Tensor

from pliant import forking
from pliant.errors import UsageError
from pliant.tensors import framing
from pliant.tensors.allocation import bytes_of
from pliant.tensors.serialize import blank_tensors, described, flattened, rebuilt, size_of

SKELETON_BYTES = 64 << 20
"""A skeleton has about 100 bytes per tensor; anything larger than this is rejected."""

_CONNECTIONS = 64  # newcomers that one donor serves at the same time
_STRANGERS = 64  # unauthenticated connections
_GREETING_S = 10.0  # time that a peer has to authenticate
_STALLED_S = 30.0  # a stream without a byte for this long is broken
_LOOK_S = 0.2  # how soon a thread notices that its peer or its owner has gone

_WHOLE = b"whole"  # end mark: no tensor had changed when it was sent

Natural = Annotated[int, msgspec.Meta(ge=0)]
Snapshot = Callable[[Sequence[str], int], dict[str, Any]]


class _Request(msgspec.Struct):
    era: Natural
    as_of: Natural
    want: list[str]


class _Refusal(msgspec.Struct, tag="refused"):
    reason: str


class _State(msgspec.Struct, tag="state"):
    exchange: Natural
    skeleton_bytes: Natural
    tensor_bytes: Natural


_Head = _Refusal | _State


# -- the donor


def is_due(from_era: int, as_of: int, era: int, exchange: int) -> bool:
    """Whether a request for the state from an era's exchange on can be answered at this one."""
    return from_era <= era and as_of <= exchange


class _Waiting:
    """A request that the main thread has not answered yet."""

    def __init__(self, request: _Request) -> None:
        self.since = request.era, request.as_of
        self.want = request.want
        self.head: _Head | None = None
        self.state: dict[str, Any] = {}
        self.versions: dict[int, int] = {}
        """versions of the tensors in ``state``, by ``id``, at the time of the answer"""
        self.answered = threading.Event()

    def answer(self, head: _Head, state: dict[str, Any] | None = None) -> None:
        self.head, self.state = head, state or {}
        self.versions = {id(each): each._version for each in self.state.values() if isinstance(each, Tensor)}
        self.answered.set()


class Donor:
    """Gives state to newcomers that know the token."""

    def __init__(self, host: str, token: str) -> None:
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.settimeout(_LOOK_S)
        forking.close_in_children(self._listener)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.pending = False
        """whether a request waits for ``serve``"""
        self._token = token
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._strangers: dict[socket.socket, float] = {}
        """unauthenticated connections, oldest first, each with its deadline"""
        self._connections: set[socket.socket] = set()
        """authenticated ones"""
        self._closed = False
        threading.Thread(target=self._accept, name="pliant-donor", daemon=True).start()

    def serve(self, era: int, exchange: int, snapshot: Snapshot) -> None:
        """Copy what is due, between two exchanges (after ``exchange``). Called by the main thread.

        ``snapshot`` is given the names wanted and the requested exchange. It returns copies, or tensors that are not
        expected to change; they are sent while the main thread goes on.
        """
        for request in self._take_due(era, exchange):
            try:
                state = snapshot(request.want, request.since[1])
            except Exception as error:
                # A wrong request only fails the newcomer; the run goes on.
                request.answer(_Refusal(f"{type(error).__name__}: {error}"))
            else:
                request.answer(_State(exchange, 0, 0), state)

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with self._lock:
            self._closed = True
            self._waiting, self.pending = [], False
            connections = [*self._strangers, *self._connections]
        for connection in connections:
            framing.shut_down(connection)

    def _take_due(self, era: int, exchange: int) -> list[_Waiting]:
        with self._lock:
            due = [each for each in self._waiting if is_due(*each.since, era, exchange)]
            self._waiting = [each for each in self._waiting if each not in due]
            self.pending = bool(self._waiting)
        return due

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                self._expire()
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    if self._listener.fileno() < 0:
                        return
                    continue
                threading.Thread(target=self._attend, args=(connection,), name="pliant-giving", daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, framing.StreamBroken), connection:
            forking.close_in_children(connection)
            if not self._met(connection):
                return
            try:
                with connection.makefile("rb") as reader, connection.makefile("wb") as writer:
                    connection.settimeout(_GREETING_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    framing.welcome(reader, writer, self._token)
                    if self._admitted(connection):
                        self._converse(connection, reader, writer)
            finally:
                with self._lock:
                    self._strangers.pop(connection, None)
                    self._connections.discard(connection)

    def _met(self, connection: socket.socket) -> bool:
        """Note a new connection; if there are too many unauthenticated ones, cut the oldest."""
        with self._lock:
            if self._closed:
                return False
            if len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                framing.shut_down(oldest)
            self._strangers[connection] = time.monotonic() + _GREETING_S
            return True

    def _admitted(self, connection: socket.socket) -> bool:
        """The peer is authenticated: whether there is room for it."""
        with self._lock:
            known = self._strangers.pop(connection, None) is not None
            if self._closed or not known or len(self._connections) >= _CONNECTIONS:
                return False
            self._connections.add(connection)
            return True

    def _expire(self) -> None:
        """Cut connections that did not authenticate in time; a socket's own timeout restarts with every byte."""
        now_s = time.monotonic()
        with self._lock:
            for connection in [each for each, until_s in self._strangers.items() if until_s < now_s]:
                del self._strangers[connection]
                framing.shut_down(connection)

    def _converse(self, connection: socket.socket, reader: BinaryIO, writer: BinaryIO) -> None:
        while not self._closed:
            connection.settimeout(None)
            waiting = _Waiting(_read_request(reader))
            connection.settimeout(_STALLED_S)
            if not self._answered(waiting, connection):
                return
            _send_answer(writer, waiting)

    def _answered(self, waiting: _Waiting, connection: socket.socket) -> bool:
        """Wait for ``serve``; False if the newcomer or this donor closes first."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.append(waiting)
            self.pending = True
        while not waiting.answered.wait(_LOOK_S):
            if self._closed or framing.hung_up(connection):
                self._withdraw(waiting)
                return False
        return True

    def _withdraw(self, waiting: _Waiting) -> None:
        with self._lock:
            self._waiting = [each for each in self._waiting if each is not waiting]
            self.pending = bool(self._waiting)


def _read_request(reader: BinaryIO) -> _Request:
    return framing.decoded(framing.read_frame(reader), _Request)


def _send_answer(writer: BinaryIO, waiting: _Waiting) -> None:
    head, tensors, skeleton = waiting.head, list[Tensor](), b""
    if isinstance(head, _State):
        try:
            skeleton, tensors = flattened(waiting.state)
            if len(skeleton) > SKELETON_BYTES:
                raise UsageError(f"the state has a skeleton of {len(skeleton)} bytes, more than {SKELETON_BYTES}")
            head = _State(head.exchange, len(skeleton), sum(each.numel() * each.element_size() for each in tensors))
        except (UsageError, ValueError, TypeError, OverflowError) as error:
            head, tensors, skeleton = _Refusal(str(error)), [], b""
    assert head is not None
    framing.write_frame(writer, msgspec.msgpack.encode(head))
    framing.write_chunks(writer, memoryview(skeleton))
    waiting.state = {}
    tensors.reverse()
    while tensors:  # each tensor's memory is freed as soon as it is sent
        tensor = tensors.pop()
        framing.write_chunks(writer, bytes_of(tensor.detach().cpu().contiguous()))
        if tensor._version != waiting.versions.get(id(tensor), tensor._version):
            raise framing.StreamBroken("was sent a tensor that somebody changed meanwhile")
    if isinstance(head, _State):
        framing.write_frame(writer, _WHOLE)
    writer.flush()


# -- the newcomer


class Recipient:
    """Asks one donor for state, in a thread of its own; the caller polls ``arrived``."""

    def __init__(self, address: str, token: str) -> None:
        self.failed: str | None = None
        """why nothing more will arrive"""
        self._address = address
        self._token = token
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._arrived: deque[tuple[int, dict[str, Any]]] = deque()
        self._begun: tuple[int, float] | None = None
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        threading.Thread(target=self._run, name="pliant-receiving", daemon=True).start()

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None:
        """Ask for ``want`` as of exchange ``as_of`` or a later one; requests are answered one after another."""
        self._requests.put(_Request(era, as_of, list(want)))

    def arrived(self) -> tuple[int, dict[str, Any]] | None:
        """The next answer, if there is one: (exchange, state as of that exchange)."""
        return self._arrived.popleft() if self._arrived else None

    def begun(self) -> tuple[int, float] | None:
        """The answer that is arriving: (its exchange, fraction of its bytes received); None if none is."""
        return self._begun

    def close(self) -> None:
        """Stop receiving."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                framing.shut_down(self._connection)
        self._requests.put(None)

    def _run(self) -> None:
        try:
            with (
                self._connected() as connection,
                connection.makefile("rb") as reader,
                connection.makefile("wb") as writer,
            ):
                self._converse(connection, reader, writer)
        except TimeoutError:
            self._fail("sent nothing for too long")
        except OSError as error:
            self._fail(f"is out of reach: {error.strerror or error}")
        except framing.StreamBroken as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self.failed = f"the donor at {self._address} {reason}"

    def _connected(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_GREETING_S)
        except (ValueError, OverflowError):
            raise framing.StreamBroken("has no address of the form host:port") from None
        forking.close_in_children(connection)
        with self._lock:
            self._connection = connection
            if self._closed:
                framing.shut_down(connection)
        return connection

    def _converse(self, connection: socket.socket, reader: BinaryIO, writer: BinaryIO) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The donor answers only when it reaches the exchange, so there is no timeout; keepalive notices a dead machine.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        framing.introduce(reader, writer, self._token)
        while (request := self._next_request(connection)) is not None:
            framing.write_frame(writer, msgspec.msgpack.encode(request))
            writer.flush()
            connection.settimeout(None)
            frame = framing.read_frame(reader)
            connection.settimeout(_STALLED_S)
            answer = _read_answer(reader, frame, self._note)
            # In this order, so that a reader in another thread always finds one of the two.
            self._arrived.append(answer)
            self._begun = None

    def _note(self, exchange: int, part: float) -> None:
        self._begun = exchange, part

    def _next_request(self, connection: socket.socket) -> _Request | None:
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                return self._requests.get(timeout=_LOOK_S)
            if framing.hung_up(connection):
                raise framing.StreamBroken("has closed the connection")
        return None


Note = Callable[[int, float], None]
"""Called with the exchange of an answer and the fraction of it that has arrived."""


def _read_answer(
    reader: BinaryIO, frame: bytes, note: Note = lambda exchange, part: None
) -> tuple[int, dict[str, Any]]:
    head: _Head = framing.decoded(frame, _Head)
    match head:
        case _Refusal(reason):
            raise framing.StreamBroken(f"refused: {reason}")
        case _State():
            return head.exchange, _read_state(reader, head, note)


def _read_state(reader: BinaryIO, head: _State, note: Note = lambda exchange, part: None) -> dict[str, Any]:
    note(head.exchange, 0.0)
    if head.skeleton_bytes > SKELETON_BYTES:
        raise framing.StreamBroken(f"announces a skeleton of {head.skeleton_bytes} bytes, more than {SKELETON_BYTES}")
    skeleton = bytearray(head.skeleton_bytes)
    framing.read_chunks(reader, memoryview(skeleton))
    try:
        # Memory is allocated only after the described size agrees with the announced one.
        size = size_of(described(bytes(skeleton)))
        if size != head.tensor_bytes:
            raise framing.StreamBroken(f"announces {head.tensor_bytes} bytes of tensors and describes {size}")
        tensors = blank_tensors(bytes(skeleton))
        here = 0
        for tensor in tensors:
            framing.read_chunks(reader, bytes_of(tensor))
            here += tensor.nbytes
            note(head.exchange, here / max(1, size))
        if framing.read_frame(reader) != _WHOLE:
            raise framing.StreamBroken("sent a state without an end")
        state = rebuilt(bytes(skeleton), tensors)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError, StopIteration) as error:
        raise framing.StreamBroken(f"sent a state that makes no sense: {type(error).__name__}: {error}") from None
    if not isinstance(state, dict):
        raise framing.StreamBroken("sent a state that is no dict")
    return state
