"""The coordinator's port over real sockets, under strangers and under peers that know the token.

Question  Does the real server stay up, whatever comes through its port?
Holds     A real uvicorn server in a thread with a coordinator, its journal on disk and its launcher. After every volley
          it answers ``/status``; an honest worker trains all the time, and is still a member after the last one.
Source    ours; docs/reliability.md.
"""

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from benchmarks.fuzz.control import SIGNATURE, VERSION, hostile_frame, speaks_for_all
from benchmarks.fuzz.mutation import TEXTS, bent
from benchmarks.fuzz.surface import Volley
from pliant import auth
from pliant.control import limits
from pliant.control import messages as m
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.service import serve
from pliant.coordinator.status import Status

TOKEN = "fuzz"
TROUBLES = (WebSocketException, OSError, EOFError, TimeoutError)
"""What a client may see of a server that refuses it."""

FRAMES = 24
"""Per connection, unless it is closed before."""

SLOTS = ("w1", "w2", "w3")
"""Of a second launcher, whose workers are hostile."""

OVERSIZED = 17 << 20
"""uvicorn closes a connection on a message above 16 MiB."""


class SocketSurface:
    """Bytes against the coordinator's port."""

    name = "socket"

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="pliant-fuzz-")
        self._lines = contextlib.ExitStack()
        listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = listener.getsockname()[1]
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._thread.start()
        if not self._ready.wait(30):
            raise AssertionError("the server does not start")
        self._owner = self._launched(1, owner=True)
        self._worker = self._kept("worker")
        self._worker.send(m.encode(m.Hello("w0", 7, VERSION)))
        self._worker.send(m.encode(m.Ready(SIGNATURE, "127.0.0.1:1")))
        self._trained = threading.Event()
        threading.Thread(target=self._train, daemon=True).start()
        if not self._trained.wait(30):
            raise AssertionError("the first era does not start")
        self._theirs = self._launched(len(SLOTS), owner=False)

    def _serve(self, listener: socket.socket) -> None:
        # Strangers would only slow it down.
        limits.LATE_S = 0.0
        charter = RunSpec("fuzz", "train.py", VERSION, 1)
        served = serve(charter, Path(self._directory.name), listener, TOKEN, resume=False, on_ready=self._ready.set)
        try:
            asyncio.run(served)
        except BaseException as error:
            self._failure = error

    def _launched(self, workers: int, *, owner: bool) -> ClientConnection:
        """A launcher that reads what it is told; processes that are to start again have started at once."""
        line = self._kept("agent")
        line.send(m.encode(m.Enlist("", VERSION, [], workers, owner)))

        def read_on() -> None:
            with contextlib.suppress(*TROUBLES):
                while True:
                    line.recv(decode=False)

        threading.Thread(target=read_on, daemon=True).start()
        return line

    def _train(self) -> None:
        """The honest worker does what it is told."""
        era = 0
        with contextlib.suppress(*TROUBLES):
            while True:
                try:
                    message = m.decode_from_coordinator(self._worker.recv(timeout=0.2, decode=False))
                except TimeoutError:
                    message = None
                match message:
                    case m.EraStart(era=era) | m.EraPlan(era=era):
                        self._worker.send(m.encode(m.Entered(era, 0)))
                        self._trained.set()
                    case m.Broken():
                        self._worker.send(m.encode(m.Stopped(era, 0, True)))
                    case _:
                        self._worker.send(m.encode(m.Beat(era, 0, 0, True, 0.1, True)))

    @contextlib.contextmanager
    def _connected(self, path: str, token: str = TOKEN) -> Iterator[ClientConnection]:
        """A connection past the proofs; with a wrong token it is closed there."""
        with connect(f"ws://127.0.0.1:{self._port}/{path}", max_size=None, open_timeout=20) as line:
            theirs = auth.challenged(line.recv(timeout=20, decode=False))
            assert theirs is not None
            line.send(auth.answer(token, path.encode(), theirs, bytes(auth.NONCE_BYTES)))
            line.recv(timeout=20)
            yield line

    def _kept(self, path: str) -> ClientConnection:
        """A connection that lasts as long as this surface."""
        return self._lines.enter_context(self._connected(path))

    def close(self) -> None:
        """Ends the run as its user would."""
        try:
            if self._thread.is_alive():
                status = msgspec.json.decode(self._ask("GET", "/status", b"", TOKEN)[1], type=Status)
                states = {row.name: row.state for row in status.workers}
                self._owner.send(m.encode(m.Interrupted(2)))
                self._owner.send(m.encode(m.Exited("w0", 1, -2)))
                for slot in SLOTS:
                    self._theirs.send(m.encode(m.Exited(slot, 1, -2)))
                if states.get("w0") != "training":
                    raise AssertionError(f"the honest worker does not train any more: {status}")
                self._thread.join(20)
                if self._thread.is_alive():
                    raise AssertionError("the server does not end")
        finally:
            with contextlib.suppress(*TROUBLES):
                self._lines.close()
            self._directory.cleanup()

    def fire(self, chance: Random) -> Volley:
        """One connection, and whether the server is still there."""
        volley = Volley()
        match chance.randrange(12):
            case 0:
                self._strange(chance, volley)
            case 1:
                self._asking(chance, volley)
            case 2:
                self._raw(chance, volley)
            case _:
                self._talking(chance, volley)
        self._check()
        return volley

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        status, body = self._ask("GET", "/status", b"", TOKEN)
        if status != 200:
            raise AssertionError(f"/status answers {status}")
        msgspec.json.decode(body, type=Status)

    def _ask(self, method: str, path: str, body: bytes, token: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request("GET", "/nonce")
            nonce = bytes.fromhex(connection.getresponse().read().decode())
            signed = auth.authorization(token, nonce, bytes(auth.NONCE_BYTES), method, path, body)
            connection.request(method, path, body, {"Authorization": signed})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _talking(self, chance: Random, volley: Volley) -> None:
        """A worker or a launcher that knows the token."""
        is_agent = chance.random() < 0.3
        try:
            with self._connected("agent" if is_agent else "worker") as line:
                if chance.random() < 0.8:
                    hello = (
                        m.Enlist("", VERSION, [], 1, False) if is_agent else m.Hello(chance.choice(SLOTS), 7, VERSION)
                    )
                    line.send(m.encode(hello))
                for _ in range(FRAMES):
                    frame = hostile_frame(chance, is_agent)
                    message = _message(frame, is_agent)
                    if message is not None and speaks_for_all(message):
                        continue
                    line.send(frame if chance.random() < 0.99 else chance.choice(TEXTS))
                    volley.count(message is not None)
                if chance.random() < 0.002:
                    line.send(bytes(OVERSIZED))
                    volley.count(accepted=False)
        except TROUBLES:
            volley.count(accepted=False)

    def _strange(self, chance: Random, volley: Volley) -> None:
        """Somebody without the token."""
        path, token = chance.choice(("worker", "agent", "", "x")), chance.choice(("", "x", "fuz", "fuzzz", "\t"))
        try:
            with self._connected(path, token) as line:
                line.send(hostile_frame(chance, is_agent=False))
                line.recv(timeout=5)
        except TROUBLES:
            volley.count(accepted=False)
        else:
            raise AssertionError("a stranger was let in")

    def _asking(self, chance: Random, volley: Volley) -> None:
        """A person's request, or something like it."""
        bodies = (b'{"workers": 6}', b'{"worker": "w9"}', b"[" * 100_000, b'{"workers": 1e999}', b'{"worker": "\xff"}')
        body = chance.choice(bodies)
        body = bent(chance, body, bodies) if chance.random() < 0.5 else body
        if b"[" * 9 not in body and b"workers" in body and b"6" not in body:
            # Fewer workers may be asked for by whoever knows the token: then there are fewer.
            body = b'{"workers": 99999999999}'
        path = chance.choice(("/scale", "/drain", "/status", "/events", "/metrics", "/worker", "/x"))
        token = TOKEN if chance.random() < 0.7 else "no"
        path = "/drain" if path == "/scale" and token == TOKEN and b"6" in body else path
        status, _ = self._ask(chance.choice(("POST", "GET", "PUT")), path, body, token)
        if status >= 500:
            raise AssertionError(f"{path} answers {status} to {body[:80]!r}")
        volley.count(status == 200)

    def _raw(self, chance: Random, volley: Volley) -> None:
        """Bytes that may be no HTTP at all."""
        request = (
            f"GET /worker HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: Pliant {'00' * 32}.{'00' * 32}.{'00' * 32}\r\n\r\n"
        ).encode()
        frame = b"\x82\x05" + b"\x00" * 4 + chance.randbytes(5)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=20) as line:
            line.sendall(bent(chance, request, [request, frame]))
            line.sendall(bent(chance, frame, [request, frame]))
        volley.count(accepted=False)


def _message(frame: bytes, is_agent: bool) -> Any:
    try:
        return m.decode_from_agent(frame) if is_agent else m.decode_from_worker(frame)
    except msgspec.DecodeError:
        return None
