"""Who is let in at the control port, and what strangers get: proofs, TLS, limits. In one process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.client
import ipaddress
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from pliant import auth
from pliant.control import app, limits, tls
from pliant.control import messages as m
from pliant.control import server as port
from pliant.control.agent_link import AgentLink
from pliant.control.handshake import WRONG_TOKEN, Endpoint, address_of, check_brackets, host_in
from pliant.control.limits import ConnectionLimits
from pliant.control.link import Link
from pliant.coordinator import service
from pliant.coordinator.run_spec import RunSpec
from pliant.environment import Job, environment_of, job_from
from pliant.errors import PliantError, Refused, RunEnded, UsageError
from pliant.launch import certificate_check, certificates, requests, run_directory
from pliant.launch.logs import opened
from pliant.launch.run_directory import Access, Trust
from pliant.tensors import weights

CHARTER = RunSpec("job", "train.py", "0.1.0", workers=3)
TOKEN = "the token of the job"
WAIT_S = 30.0

pytestmark = pytest.mark.timeout(120)


# -- a coordinator to knock at


@dataclass
class House:
    """A coordinator in a thread, and what it has logged."""

    address: str
    log: list[str]
    authority: Path | None = None

    @property
    def place(self) -> tuple[str, int]:
        host, _, number = self.address.rpartition(":")
        return host, int(number)

    def access(self, token: str = TOKEN) -> Access:
        return Access(self.address, token, self.authority)


@contextlib.contextmanager
def open_house(directory: Path, monkeypatch: pytest.MonkeyPatch, given: Trust | None = None) -> Iterator[House]:
    log: list[str] = []
    monkeypatch.setattr(service, "_logged", log.append)
    directory.mkdir()
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    context = None
    if given is not None:
        context = tls.server_context(Path(given.certificate), Path(given.key))
    ready, loop = threading.Event(), asyncio.new_event_loop()
    tasks: list[asyncio.Task[object]] = []

    async def serving() -> None:
        served = service.serve(CHARTER, directory, listener, TOKEN, False, on_ready=ready.set, tls=context)
        tasks.append(asyncio.create_task(served))
        # One launcher, so that the run has an owner and does not end by itself.
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]

    thread = threading.Thread(target=lambda: loop.run_until_complete(serving()))
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield House(f"127.0.0.1:{number}", log, Path(given.authority) if given else None)
    finally:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())
        thread.join(WAIT_S)
        loop.close()
        listener.close()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    with open_house(tmp_path / "job", monkeypatch) as found:
        yield found


def files(directory: Path, *hosts: str, now: datetime.datetime | None = None) -> Trust:
    certificates.made(directory, hosts, 30, now)
    return Trust(*(str(directory / name) for name in ("coordinator.pem", "coordinator.key", "ca.pem")))


@pytest.fixture
def secure_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    with open_house(tmp_path / "job", monkeypatch, files(tmp_path / "certs")) as found:
        yield found


def knock(house: House, role: str = "worker", **options: object) -> ClientConnection:
    options = {"proxy": None, "compression": None, "ping_interval": None, **options}
    return open_websocket(f"ws://{house.address}/{role}", **options)  # pyright: ignore[reportArgumentType]


def closed_with(connection: ClientConnection) -> int | None:
    """The code; None if the connection was reset."""
    with pytest.raises(ConnectionClosed) as caught:
        while True:
            connection.recv(timeout=WAIT_S)
    return caught.value.rcvd.code if caught.value.rcvd is not None else None


def as_worker(access: Access) -> None:
    """Ends with what the coordinator says to a worker of an unknown slot, which is more than a stranger hears."""
    context = certificate_check.asked(access)
    try:
        Link.connect(access.address, access.token, "w7", "0.1.0", context)
    except Refused as refusal:
        if "w7" not in str(refusal):
            raise
    else:
        raise AssertionError("an unknown slot was let in")


def as_launcher(access: Access) -> None:
    async def enlist() -> None:
        wish = m.Enlist("", "0.1.0", [], 1, owner=False)
        link, answer = await AgentLink.connect(
            access.address, access.token, wish, WAIT_S, certificate_check.asked(access)
        )
        assert isinstance(answer, m.Enlisted)
        await link.close()

    asyncio.run(enlist())


def as_person(access: Access) -> None:
    assert b'"job":"job"' in requests.get(access, "/status")


WAYS = pytest.mark.parametrize("way", [as_worker, as_launcher, as_person])
Way = Callable[[Access], None]


# -- proofs


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.sampled_from([b"worker", b"agent"]))
def test_a_proof_fits_one_conversation_in_one_direction(nonce: bytes, own: bytes, role: bytes) -> None:
    other = b"agent" if role == b"worker" else b"worker"
    answer = auth.answer(TOKEN, role, nonce, own)
    shown = auth.confirmation(TOKEN, role, nonce, answer)
    assert shown is not None and auth.is_confirmed(shown, TOKEN, role, nonce, own)
    assert auth.confirmation(TOKEN, other, nonce, answer) is None
    assert auth.confirmation(TOKEN + "x", role, nonce, answer) is None
    assert auth.confirmation(TOKEN, role, bytes(31) + b"\1" if nonce == bytes(32) else bytes(32), answer) is None
    assert not auth.is_confirmed(shown, TOKEN, other, nonce, own)
    # Its own words come back to nobody.
    assert not auth.is_confirmed(answer[32:], TOKEN, role, nonce, own)
    assert TOKEN.encode() not in answer + shown


@given(st.binary(max_size=200))
def test_any_other_bytes_prove_nothing(frame: bytes) -> None:
    assert auth.confirmation(TOKEN, b"worker", bytes(32), frame) is None
    assert auth.challenged(frame) is None
    assert auth.authorized(frame.decode("latin-1")) is None


def test_no_role_is_the_beginning_of_another() -> None:
    source = Path(auth.__file__).parent
    text = "".join((source / name).read_text() for name in ("auth.py", "tensors/framing.py", "control/connect.py"))
    text += (source / "control" / "agent_link.py").read_text() + (source / "control" / "app.py").read_text()
    roles = set(re.findall(r'(?:proof|answer|confirmed|confirmation|Caller)\([^)]*?\bb"(\w+)"', text))
    assert {"worker", "agent", "coordinator", "newcomer", "donor", "request", "reply", "metrics"} <= roles
    for one in roles:
        assert not any(other != one and other.startswith(one) for other in roles), one


def test_a_nonce_is_good_once_and_not_for_long() -> None:
    now = [100.0]
    nonces = app.Nonces(lambda: now[0])
    first, second = nonces.issued(), nonces.issued()
    assert nonces.spent(first) and not nonces.spent(first)
    now[0] += app.NONCE_S + 0.1
    assert not nonces.spent(second) and not nonces.spent(first)
    assert not app.Nonces(lambda: now[0]).spent(nonces.issued()), "another coordinator's"
    altered = bytearray(nonces.issued())
    altered[3] ^= 1
    assert not nonces.spent(bytes(altered))
    # What was spent is forgotten when it is too old anyway.
    for _ in range(100):
        now[0] += 1.0
        assert nonces.spent(nonces.issued())
    assert len(nonces._spent) < 40


# -- who is let in


@WAYS
def test_who_knows_the_token_is_let_in(house: House, way: Way) -> None:
    way(house.access())
    assert not house.log


@WAYS
def test_who_does_not_is_refused_and_logged_with_its_address(house: House, way: Way) -> None:
    with pytest.raises(Refused, match=r"the coordinator at 127.0.0.1:\d+ refused the (job )?token"):
        way(house.access("wrong"))
    what = {as_worker: "a worker", as_launcher: "a launcher", as_person: "GET /status"}[way]
    assert house.log == [f"refused {what} from 127.0.0.1: it does not know the job token"]


@WAYS
def test_the_token_is_never_sent(house: House, way: Way) -> None:
    with Eavesdropper(house.place) as between:
        way(replace(house.access(), address=between.address))
    heard = b"".join(between.heard)
    assert len(heard) > 300
    for form in (TOKEN.encode(), TOKEN.encode().hex().encode(), auth.metrics_token(TOKEN).encode()):
        assert form not in heard


class Eavesdropper:
    """A man in the middle that hands everything on and keeps it."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        self.from_server: list[bytes] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Eavesdropper:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._place)
                self._sockets += [client, server]
                for source, target, is_client in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pump, args=(source, target, is_client))
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard.append(data)
                if not is_client:
                    self.from_server.append(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def test_an_overheard_handshake_cannot_be_played_again(house: House) -> None:
    with knock(house) as friend:
        nonce = auth.challenged(friend.recv(timeout=WAIT_S, decode=False))
        assert nonce is not None
        overheard = auth.answer(TOKEN, b"worker", nonce, os.urandom(32))
        friend.send(overheard)
        confirmed = friend.recv(timeout=WAIT_S, decode=False)
        assert len(confirmed) == auth.PROOF_BYTES
        # To the same coordinator, while the first connection lives, and as the other role.
        for role in ("worker", "agent"):
            with knock(house, role) as thief:
                thief.recv(timeout=WAIT_S)
                thief.send(overheard)
                assert closed_with(thief) == WRONG_TOKEN


def test_an_overheard_confirmation_convinces_nobody(house: House) -> None:
    """A false coordinator that has heard a whole handshake, bytes for bytes, plays its part to a worker."""
    with Eavesdropper(house.place) as between:
        as_worker(replace(house.access(), address=between.address))
        head, _, frames = b"".join(between.from_server).partition(b"\r\n\r\n")
        # Two bytes are before the content of each frame.
        opening, rest = frames[: 2 + auth.CHALLENGE_BYTES], frames[2 + auth.CHALLENGE_BYTES :]
    with socket.create_server(("127.0.0.1", 0)) as false:
        address = f"127.0.0.1:{false.getsockname()[1]}"

        def play() -> None:
            connection, _ = false.accept()
            with connection, contextlib.suppress(OSError):
                request = connection.recv(65536).decode()
                key = re.search(r"Sec-WebSocket-Key: (\S+)", request, re.IGNORECASE)
                assert key is not None
                from websockets.utils import accept_key

                mended = re.sub(rb"(?i)(sec-websocket-accept: )\S+", rb"\g<1>" + accept_key(key[1]).encode(), head)
                connection.sendall(mended + b"\r\n\r\n" + opening)
                connection.recv(65536)
                connection.sendall(rest)
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(PliantError, match="does not know the job token") as caught:
            Link.connect(address, TOKEN, "w7", "0.1.0")
        thread.join(WAIT_S)
        assert isinstance(caught.value, Refused)


def asked(house: House, method: str, path: str, body: bytes = b"", header: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(house.address, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request(method, path, body=body, headers={"Authorization": header} if header else {})
        response = connection.getresponse()
        return response.status, response.read()


def signed(house: House, method: str, path: str, body: bytes = b"") -> str:
    nonce = bytes.fromhex(asked(house, "GET", "/nonce")[1].decode())
    return auth.authorization(TOKEN, nonce, os.urandom(32), method, path, body)


def test_a_request_is_taken_once_and_only_as_it_was_made(house: House) -> None:
    wish = b'{"workers": 2}'
    header = signed(house, "POST", "/scale", wish)
    assert asked(house, "POST", "/scale", b'{"workers": 9}', header)[0] == 403
    assert asked(house, "POST", "/drain", wish, header)[0] == 403
    assert asked(house, "POST", "/scale?x=1", wish, header)[0] == 403
    assert asked(house, "GET", "/status", wish, header)[0] == 403
    first, _ = asked(house, "POST", "/scale", wish, header)
    assert first not in (401, 403)
    assert asked(house, "POST", "/scale", wish, header)[0] == 401, "a replay"
    for path in ("/status", "/events", "/metrics"):
        assert asked(house, "GET", path)[0] == 403


def test_an_answer_of_somebody_else_does_not_count() -> None:
    """A false coordinator that answers every request with what people would like to hear."""
    with socket.create_server(("127.0.0.1", 0)) as false:
        address = f"127.0.0.1:{false.getsockname()[1]}"

        def play() -> None:
            connection, _ = false.accept()
            with connection:
                for body in (b"00" * 32, b"4 workers are wanted"):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(Refused, match="does not know the token"):
            requests.get(Access(address, TOKEN), "/status")
        thread.join(WAIT_S)


def test_prometheus_gets_the_numbers_with_a_token_of_their_own(house: House) -> None:
    bearer = f"Bearer {auth.metrics_token(TOKEN)}"
    status, text = asked(house, "GET", "/metrics", header=bearer)
    assert status == 200 and b"pliant_term 1.0" in text
    for path in ("/status", "/events"):
        assert asked(house, "GET", path, header=bearer)[0] == 403
    assert asked(house, "GET", "/metrics", header=f"Bearer {TOKEN}")[0] == 403


# -- limits


def test_frames_are_small_until_the_proof_and_bounded_after_it(house: House) -> None:
    with knock(house) as stranger:
        stranger.recv(timeout=WAIT_S)
        stranger.send(bytes(port.UNPROVEN_FRAME_BYTES + 1))
        assert closed_with(stranger) == 1009
    for role, limit in (("worker", app.WORKER_FRAME_BYTES), ("agent", app.AGENT_FRAME_BYTES)):
        for size, codes in ((limit + 1, {1009, None}), (limit, {1000})):
            with knock(house, role, max_size=None) as friend:
                nonce = auth.challenged(friend.recv(timeout=WAIT_S, decode=False))
                assert nonce is not None
                friend.send(auth.answer(TOKEN, role.encode(), nonce, bytes(32)))
                friend.recv(timeout=WAIT_S)
                # One within the limit is read, and closes the connection in good order because it is no message.
                with contextlib.suppress(ConnectionClosed):
                    friend.send(bytes(size))
                assert closed_with(friend) in codes, (role, size)
    as_person(house.access())


def test_a_stranger_cannot_say_that_it_comes_from_elsewhere(house: House) -> None:
    connection = http.client.HTTPConnection(*house.place, timeout=WAIT_S)
    for number in range(3):
        headers = {"Authorization": "none", "X-Forwarded-For": f"192.0.2.{number}"}
        connection.request("GET", "/status", headers=headers)
        assert connection.getresponse().read() is not None
    connection.close()
    refused = [line for line in house.log if "refused" in line]
    assert refused and all("from 127.0.0.1" in line for line in refused), house.log


def test_bodies_and_headers_are_bounded(house: House) -> None:
    assert asked(house, "POST", "/scale", bytes(app.BODY_BYTES + 1))[0] == 413
    with contextlib.suppress(ConnectionError):
        assert asked(house, "GET", "/status", header="x" * (1 << 20))[0] == 400
    as_person(house.access())


def test_text_and_silence_are_no_proof(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with knock(house) as talker:
        talker.recv(timeout=WAIT_S)
        talker.send("let me in")
        assert closed_with(talker) == WRONG_TOKEN
    monkeypatch.setattr(port, "PROOF_S", 0.2)
    with socket.create_connection(house.place) as silent:
        silent.settimeout(WAIT_S)
        # Reset, or at its end.
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""


@dataclass(eq=False)
class Wire:
    """A connection that knows whether it was cut."""

    aborted: bool = field(default=False)

    def close(self) -> None:
        self.aborted = True

    abort = close


def test_the_oldest_stranger_makes_room_and_friends_stay() -> None:
    gatekeeper = ConnectionLimits(lambda text: None)
    friend = Wire()
    gatekeeper.opened(friend, "10.0.0.1")
    gatekeeper.proven(friend)
    strangers = [Wire() for _ in range(limits.UNPROVEN_OF_ONE + 1)]
    assert all(gatekeeper.opened(each, "10.0.0.1") for each in strangers)
    assert [each.aborted for each in strangers] == [True] + [False] * limits.UNPROVEN_OF_ONE
    # Others, from everywhere.
    more = [Wire() for _ in range(limits.UNPROVEN)]
    assert all(gatekeeper.opened(each, f"10.1.{place // 250}.{place % 250}") for place, each in enumerate(more))
    assert all(each.aborted for each in strangers) and not any(each.aborted for each in more)
    assert not friend.aborted
    # One subnet of IPv6 is one place.
    sixes = [Wire() for _ in range(limits.UNPROVEN_OF_ONE + 1)]
    for number, each in enumerate(sixes):
        gatekeeper.opened(each, str(ipaddress.ip_address("2001:db8::") + number))
    assert sixes[0].aborted and not sixes[1].aborted
    for each in (*strangers, *more, *sixes, friend):
        gatekeeper.closed(each)
    friends = [Wire() for _ in range(limits.CONNECTIONS)]
    taken = [gatekeeper.opened(each, "10.0.0.1") for each in friends if not gatekeeper.proven(each)]
    assert len(taken) == limits.CONNECTIONS


def test_there_is_an_end_to_all_connections() -> None:
    gatekeeper = ConnectionLimits(lambda text: None)
    taken = 0
    for _ in range(limits.CONNECTIONS):
        wire = Wire()
        if not gatekeeper.opened(wire, "10.0.0.1"):
            assert wire.aborted
            break
        gatekeeper.proven(wire)
        taken += 1
    assert taken == limits.CONNECTIONS - limits.UNPROVEN


def test_wrong_proofs_are_answered_late_and_logged_within_bounds() -> None:
    now, log = [0.0], list[str]()
    gatekeeper = ConnectionLimits(log.append, lambda: now[0])
    delays = [gatekeeper.failed("10.0.0.1", "a worker") for _ in range(30)]
    assert delays == [0.0] * int(limits.TRIES) + [limits.LATE_S] * (30 - int(limits.TRIES))
    assert len(log) == limits.TRIES
    assert gatekeeper.failed("10.0.0.2", "a worker") == 0.0, "another address has its own"
    now[0] += limits.TRY_EVERY_S
    assert gatekeeper.failed("10.0.0.1", "a worker") == 0.0
    assert log[-1].endswith("(and 20 more from there before)")
    # Memory is bounded, whoever comes.
    for number in range(5000):
        gatekeeper.failed(str(ipaddress.ip_address("10.2.0.0") + number), "a worker")
    assert len(gatekeeper._buckets) <= limits.ADDRESSES


def test_a_friend_is_let_in_after_many_wrong_tries_from_its_address(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LATE_S", 0.01)
    monkeypatch.setattr(limits, "TRY_EVERY_S", 1e9)
    for _ in range(int(limits.TRIES) + 10):
        with pytest.raises(Refused):
            requests.get(house.access("wrong"), "/status")
    assert len(house.log) == limits.TRIES
    for way in (as_worker, as_launcher, as_person):
        way(house.access())


# -- TLS


@WAYS
def test_everybody_speaks_tls_when_there_is_a_certificate(secure_house: House, way: Way) -> None:
    with Eavesdropper(secure_house.place) as between:
        way(replace(secure_house.access(), address=between.address))
    heard = b"".join(between.heard)
    assert heard and b"HTTP" not in heard and auth.GREETING not in heard


@WAYS
def test_a_wrong_token_is_refused_under_tls_too(secure_house: House, way: Way) -> None:
    with pytest.raises(Refused, match=r"refused the (job )?token"):
        way(secure_house.access("wrong"))
    assert len(secure_house.log) == 1


@WAYS
def test_a_plain_client_is_told_to_speak_tls(secure_house: House, way: Way) -> None:
    with pytest.raises(Refused, match=r"speaks TLS only; give the ca.pem of its run with --tls-ca"):
        way(replace(secure_house.access(), authority=None))


@WAYS
def test_a_tls_client_is_told_that_the_port_is_plain(house: House, way: Way, tmp_path: Path) -> None:
    authority = Path(files(tmp_path / "certs").authority)
    with pytest.raises(Refused, match="speaks no TLS; leave out --tls-ca"):
        way(replace(house.access(), authority=authority))
    assert house.log == ["a TLS client came from 127.0.0.1, but this port speaks no TLS"]


PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
FUTURE = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


@WAYS
def test_a_self_made_certificate_is_refused(secure_house: House, way: Way, tmp_path: Path) -> None:
    other = Path(files(tmp_path / "other").authority)
    with pytest.raises(Refused, match=r"is not of the authority in --tls-ca; give the ca.pem of this very run"):
        way(replace(secure_house.access(), authority=other))
    as_person(secure_house.access())


@WAYS
def test_a_certificate_for_another_name_is_refused(secure_house: House, way: Way) -> None:
    elsewhere = socket.gethostbyname("127.0.0.2")
    with socket.create_server((elsewhere, 0)) as listener:
        number = listener.getsockname()[1]
        said = "is for another name; use the one it was made for"
        with Relay(listener, secure_house.place), pytest.raises(Refused, match=said):
            way(replace(secure_house.access(), address=f"{elsewhere}:{number}"))


class Relay(Eavesdropper):
    """The same at a listener that is there already."""

    def __init__(self, listener: socket.socket, place: tuple[str, int]) -> None:
        self._place, self._listener = place, listener
        self.heard, self.from_server, self._sockets = [], [], []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()


@WAYS
def test_an_expired_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    expired = files(tmp_path / "certs", now=PAST)
    said = "has expired; make new ones with `pliant certs init`"
    with open_house(tmp_path / "job", monkeypatch, expired) as found, pytest.raises(Refused, match=said):
        way(found.access())


@pytest.mark.parametrize(
    ("host", "now", "said"),
    [
        ("127.0.0.1", PAST, "has expired; "),
        ("127.0.0.1", FUTURE, "is not valid yet; "),
        ("10.1.2.3", None, "is for another name; "),
    ],
)
def test_a_run_is_not_started_with_a_certificate_that_clients_would_refuse(
    tmp_path: Path, host: str, now: datetime.datetime | None, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        certificate_check.served(files(tmp_path / "certs", now=now), host)


def test_files_that_are_no_certificates_cost_one_line(tmp_path: Path) -> None:
    good, other = files(tmp_path / "good", "trainer.example", "10.1.2.3"), files(tmp_path / "other")
    for host in ("127.0.0.1", "localhost", "trainer.example", "10.1.2.3"):
        assert certificate_check.served(good, host) is not None
    (tmp_path / "nonsense").write_text("nonsense")
    nonsense, missing = str(tmp_path / "nonsense"), str(tmp_path / "missing")
    for wrong, said in (
        (replace(good, key=other.key), "is not the key of the certificate in"),
        (replace(good, certificate=nonsense), "are no certificate and key in PEM form"),
        (replace(good, authority=nonsense), "holds no certificate in PEM form"),
        (replace(good, key=missing), "cannot read .*missing: No such file or directory; give another --tls-key"),
        (replace(good, authority=other.authority), "is not of the authority in --tls-ca"),
    ):
        with pytest.raises(PliantError, match=said) as caught:
            certificate_check.served(wrong, "127.0.0.1")
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="go together"):
        certificate_check.given(tmp_path / "nonsense", None, None, insecure=False)


def test_the_files_of_certs_init(tmp_path: Path) -> None:
    said = certificates.made(tmp_path / "certs", ["trainer.example"], 30)
    assert "for trainer.example, localhost, 127.0.0.1" in said[0]
    names = sorted(path.name for path in (tmp_path / "certs").iterdir())
    assert names == ["ca.pem", "coordinator.key", "coordinator.pem"], "the authority's key is not kept"
    assert stat.S_IMODE((tmp_path / "certs" / "coordinator.key").stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="is there already"):
        certificates.made(tmp_path / "certs", [], 30)
    for wrong in ("https://trainer", "trainer:1234", "", "two words"):
        with pytest.raises(UsageError, match="is no name or address"):
            certificates.made(tmp_path / "wrong", [wrong], 30)


def test_a_secured_socket_is_read_and_written_at_once(tmp_path: Path) -> None:
    """Two threads, much data in both directions: nothing is lost, mixed up or stuck."""
    given = files(tmp_path / "certs")
    context = tls.server_context(Path(given.certificate), Path(given.key))
    size = 8 << 20
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            raw, _ = listener.accept()
            with context.wrap_socket(raw, server_side=True) as peer:
                left = size
                while left:
                    data = peer.recv(65536)
                    left -= len(data)
                    peer.sendall(data)

        thread = threading.Thread(target=echo)
        thread.start()
        raw = socket.create_connection(listener.getsockname(), WAIT_S)
        secured = tls.SecureSocket(raw, tls.client_context(Path(given.authority)), "127.0.0.1")
        secured.shake_hands()
        content = os.urandom(size)

        def send() -> None:
            for start in range(0, size, 100_000):
                secured.sendall(content[start : start + 100_000])

        writing = threading.Thread(target=send)
        writing.start()
        back = bytearray()
        while len(back) < size and (part := secured.recv(65536)):
            back += part
        writing.join(WAIT_S)
        thread.join(WAIT_S)
        assert secured.recv(65536) == b""
        secured.close()
    assert bytes(back) == content


# -- where it listens


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_runs_directory_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in (None, tmp_path / "deep" / "job"):
        made = run_directory.made(directory, "train.py")
        assert mode(made) == mode(made / run_directory.LOGS) == 0o700
    # One that was there is the user's own, and stays as it is; what is private in it is so by itself.
    given = tmp_path / "given"
    given.mkdir(0o755)
    assert mode(run_directory.made(given, "train.py")) == 0o755
    assert mode(given / run_directory.LOGS) == 0o700
    opened(given / "w0.log").close()
    weights.save(nn.Linear(2, 1), given / weights.FINAL, round_=1, private=True)
    for name in ("w0.log", weights.FINAL):
        assert mode(given / name) == 0o600, name


NO_SLOT = ["", "w", "0", "w-1", "w0/../x", "../w0", "/tmp/w0", "w0.log", "w0\n", "w٣"]


@pytest.mark.parametrize("name", NO_SLOT)
def test_a_name_that_leads_elsewhere_is_no_message(name: str) -> None:
    for message in (m.Start(name), m.Enlisted("job", "a0", 1, ["w0", name])):
        with pytest.raises(msgspec.DecodeError):
            m.decode_to_agent(m.encode(message))
    assert m.decode_to_agent(m.encode(m.Start("w17"))) == m.Start("w17")


@pytest.mark.parametrize("name", [".", "..", "a/b", "../up", "/etc", "x\0"])
def test_a_worker_is_led_nowhere_else_either(name: str) -> None:
    era = m.EraStart(1, 1, 1, ["w0"], "w0", 0, {}, checkpoints=[name])
    for message in (m.Welcome(name, "w0", 1, 5.0, 0), m.Named([name]), era):
        with pytest.raises(msgspec.DecodeError):
            m.decode_from_coordinator(m.encode(message))
    welcome = m.Welcome("train-2026.1 (b)", "w0", 1, 5.0, 0)
    assert m.decode_from_coordinator(m.encode(welcome)) == welcome


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_name_that_is_loopback_here_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    places = [(family, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    for own in (Trust(), Trust(insecure=True), Trust("cert", "key", "ca")):
        with pytest.raises(UsageError, match=f"--host debian is {address} on this machine, where no other one can"):
            run_directory.check_exposure("debian", own)
    with pytest.raises(UsageError, match="--host debian is"):
        run_directory.bound("debian", 0)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "*", "0", "fe80::1", "fe80::1%lo"])
def test_what_is_no_address_for_others_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=r"no address that others can reach|link-local"):
        run_directory.check_exposure(host, Trust("cert", "key", "ca"))


def test_addresses_of_both_families() -> None:
    for host, address in (("::1", "[::1]:80"), ("127.0.0.1", "127.0.0.1:80"), ("a.example", "a.example:80")):
        assert address_of(host, 80) == address and host_in(address) == host
        assert Endpoint(address, TOKEN).place == (host, 80)
        check_brackets(address)
    with pytest.raises(UsageError, match=r"'::1:80' is no address; put an IPv6 one in brackets, e\.g\. \[::1\]:80"):
        requests.found(None, "::1:80", None)
    if socket.has_dualstack_ipv6():
        with pytest.raises(UsageError, match="2001:db8::1 is no address of this machine"):
            run_directory.bound("2001:db8::1", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_certificate(host: str) -> None:
    run_directory.check_exposure(host, Trust())


def test_beyond_loopback_it_takes_tls_or_a_word() -> None:
    host = "192.0.2.1"
    with pytest.raises(UsageError, match=r"can be reached from other machines: give --tls-cert, .* or --insecure"):
        run_directory.check_exposure(host, Trust())
    run_directory.check_exposure(host, Trust(insecure=True))
    run_directory.check_exposure(host, Trust("cert", "key", "ca"))


def test_the_authority_reaches_workers_and_commands(tmp_path: Path) -> None:
    job = Job("127.0.0.1:1", TOKEN, "w0", authority="/some/ca.pem")
    assert job_from(environment_of(job)) == job
    plain = Job("127.0.0.1:1", TOKEN, "w0")
    assert job_from(environment_of(plain)) == plain and "PLIANT_TLS_CA" not in environment_of(plain)
    (tmp_path / "ca.pem").write_text("certificate")
    directory = tmp_path / "job"
    directory.mkdir()
    run_directory.publish(directory, Access("127.0.0.1:1", TOKEN, tmp_path / "ca.pem"))
    found = requests.found(directory, "", None)
    assert found.authority is not None and found.authority.read_text() == "certificate"
    for name in ("token", "metrics-token"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    run_directory.publish(directory, Access("127.0.0.1:1", TOKEN))
    assert requests.found(directory, "", None).authority is None
    kept = Trust("cert", "key", "ca", insecure=True)
    run_directory.write_trust(directory, kept)
    assert run_directory.trust_in(directory) == kept
    (directory / "trust.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        run_directory.trust_in(directory)


def test_nobody_listens_is_still_said(tmp_path: Path) -> None:
    authority = Path(files(tmp_path / "certs").authority)
    for way in (as_worker, as_launcher, as_person):
        with pytest.raises(RunEnded, match=r"nobody listens at 127\.0\.0\.1:1"):
            way(Access("127.0.0.1:1", TOKEN, authority))


# -- gloo


def listening() -> set[tuple[str, int]]:
    """Addresses of this process's listening sockets."""
    own: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(entry.readlink()))
    found: set[tuple[str, int]] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                digits, number = words[1].split(":")
                packed = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
                found.add((str(ipaddress.ip_address(packed)), int(number, 16)))
    return found


class Keys:
    """A store in memory, over which a group is formed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[tuple[int, str], bytes] = {}

    def put(self, attempt: int, key: str, value: bytes) -> None:
        with self._changed:
            self._values[attempt, key] = value
            self._changed.notify_all()

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: (attempt, key) in self._values, timeout_s):
                raise TimeoutError(key)
            return self._values[attempt, key]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc")
def test_a_groups_sockets_are_bound_to_the_address_of_the_control_connection() -> None:
    import torch

    from pliant.tensors.process_group.gloo import Gloo

    keys, groups, before = Keys(), list[Gloo](), listening()
    address = "127.0.0.3"

    def form(place: int) -> None:
        groups.append(Gloo(keys, attempt=1, place=place, members=2, address=address))

    threads = [threading.Thread(target=form, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    try:
        sums = [torch.ones(3), torch.ones(3)]
        exchanges = [group.exchange(b"x", [each]) for group, each in zip(groups, sums, strict=True)]
        assert all(exchange.wait(WAIT_S) for exchange in exchanges)
        assert sums[0].tolist() == [2.0] * 3
        new = listening() - before
        assert len(new) == 2 and {host for host, _ in new} == {address}, new
    finally:
        for group in groups:
            group.leave()


def test_the_state_is_handed_on_at_that_address_only() -> None:
    from pliant.tensors.handoff import Donor

    before = listening()
    donor = Donor("127.0.0.3", TOKEN)
    try:
        assert {host for host, _ in listening() - before} == {"127.0.0.3"}
    finally:
        donor.close()
