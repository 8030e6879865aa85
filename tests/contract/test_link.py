"""The steps of a worker's link, taken one by one, and the first frames of every connection."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK
from websockets.frames import Close

from pliant import auth
from pliant.control import agent_link, handshake
from pliant.control import messages as m
from pliant.control.connect import WORKER, converse
from pliant.control.handshake import Endpoint
from pliant.control.link import GIVE_UP_S, Link
from pliant.errors import PliantError, Refused, RunEnded, Stopped

DOOR = Endpoint("127.0.0.1:1", "secret")
WELCOME = m.Welcome("job", "w0.1", 1, 5.0, 0)
BEAT_S = WELCOME.dead_after_s / 10


class Frames:
    """A connection in memory: what was sent, and what will come."""

    def __init__(self, *coming: bytes | Exception) -> None:
        self.sent: list[bytes] = []
        self.coming: deque[bytes | Exception] = deque(coming)
        self.closed = self.aborted = False
        self.transport = self

    def abort(self) -> None:
        self.aborted = True

    def send(self, message: bytes, /) -> None:
        if self.closed:
            raise ConnectionClosedError(None, None)
        self.sent.append(message)

    def recv(self, timeout: float | None = None, *, decode: bool = False) -> bytes:
        frame = self.coming.popleft() if self.coming else ConnectionClosedOK(None, None)
        if isinstance(frame, Exception):
            raise frame
        return frame

    def close(self) -> None:
        self.closed = True

    def said(self) -> list[m.FromWorker]:
        """The messages that were sent since the last look."""
        found, self.sent = [m.decode_from_worker(frame) for frame in self.sent], []
        return found


class Slowly(Frames):
    """The same under asyncio."""

    async def send(self, message: bytes, /) -> None:  # type: ignore[override]
        super().send(message)

    async def recv(self, *, decode: bool = False) -> bytes:  # type: ignore[override]
        return super().recv()


class ByHand:
    """Takes no step by itself; counts when one is asked for."""

    def __init__(self) -> None:
        self.woken, self.stopped, self.ended = 0, False, False

    def drive(self, link: Any) -> None: ...

    def wake(self) -> None:
        self.woken += 1

    def rest(self, seconds: float) -> bool:
        return True

    def stop(self) -> None:
        self.stopped = True

    def join(self) -> None:
        self.ended = self.stopped


class Standing:
    """A link whose clock and driver are the test's."""

    def __init__(self, *coming: bytes | Exception) -> None:
        self.now_s = 100.0
        self.driver = ByHand()
        self.frames = Frames(m.encode(WELCOME), *coming)
        given: dict[str, Any] = {"local_address": "127.0.0.1", "pid": 7, "clock": lambda: self.now_s}
        self.link = Link(self.frames, DOOR, "w0", "0", self.driver, **given)
        assert self.frames.said() == [m.Hello("w0", 7, "0")]

    def flushed(self) -> bool:
        return self.link.flush_once(self.now_s)


def test_a_sign_of_life_is_sent_when_it_is_due_and_not_before() -> None:
    standing = Standing()
    link = standing.link
    assert link.flush_by_s(standing.now_s) == standing.now_s + BEAT_S
    assert standing.flushed() and standing.frames.said() == []
    standing.now_s = link.flush_by_s(standing.now_s)
    assert standing.flushed()
    assert [type(message) for message in standing.frames.said()] == [m.Beat]
    assert link.flush_by_s(standing.now_s) == standing.now_s + BEAT_S


def test_a_link_that_leaves_sends_no_sign_of_life_and_is_not_in_a_hurry() -> None:
    standing = Standing()
    standing.link.finish(left=True)
    assert standing.driver.ended and standing.frames.closed
    standing.now_s += 10 * BEAT_S
    # A driver that waits until then would not wait at all.
    assert standing.link.flush_by_s(standing.now_s) > standing.now_s


def test_what_could_not_be_sent_is_sent_later_but_for_signs_of_life() -> None:
    standing = Standing()
    link = standing.link
    link.plan(3, None)
    link.tell_position()
    link.saved("c1", 5, 4)
    assert standing.driver.woken == 3
    standing.frames.closed = True
    assert not standing.flushed()
    standing.frames.closed = False
    assert standing.flushed()
    assert standing.frames.said() == [m.Plan(3), m.Saved("c1", 5, 4)]


def test_lines_are_sent_when_the_coordinator_asks_whoever_sends_them_usually() -> None:
    standing = Standing(m.encode(m.Again(2)))
    standing.link.keep([b"{}", b"[]", b"0"], 0)
    assert standing.flushed() and standing.frames.said() == []
    woken = standing.driver.woken
    assert standing.link.receive_once() and standing.driver.woken == woken + 1
    assert standing.flushed() and standing.frames.said() == [m.Lines(2, [b"0"])]
    assert standing.flushed() and standing.frames.said() == []


def test_a_link_that_finds_the_coordinator_again_says_again_what_it_may_not_have_heard() -> None:
    standing = Standing()
    link = standing.link
    described = m.Signature("0", [], {"dead_after": "2.0"})
    link.plan(3, None)
    link.ready(described, "here", None)
    link.entered(4, 0)
    link.stopped(4, 1, active=True)
    assert standing.flushed()
    standing.frames.said()
    assert not link.receive_once() and not link.is_over and link.searches()
    another = Frames(m.encode(m.Hold()), m.encode(m.Welcome("job", "w0.1", 2, 5.0, 0)))
    answer = converse(another, DOOR, link.greet_again())
    assert another.said() == [m.Hello("w0", 7, "0", "w0.1", 0, 0, False, described, "here")]
    assert link.take_up(another, answer) and link.mailbox.term == 2
    assert standing.flushed()
    # What came of ``ready`` and of another era is known.
    assert another.said() == [m.Plan(3), m.Stopped(4, 1, True)]


def test_a_coordinator_that_reads_is_waited_for_from_when_it_was_heard() -> None:
    standing = Standing()
    link = standing.link
    assert not link.receive_once() and link.searches()
    standing.now_s += GIVE_UP_S - 1.0
    reading = Frames(m.encode(m.Hold()), ConnectionClosedError(None, None))
    with pytest.raises(RunEnded, match="while joining"):
        converse(reading, DOOR, link.greet_again())
    standing.now_s += GIVE_UP_S - 1.0
    assert link.searches()
    standing.now_s += 1.0
    assert not link.searches()
    with pytest.raises(RunEnded, match="lost the coordinator"):
        link.check()


@pytest.mark.parametrize("answer", [m.Refuse("gone", again=True), m.Refuse("unlike"), m.Stop("over")])
def test_a_link_that_is_turned_away_is_over(answer: Any) -> None:
    standing = Standing()
    link = standing.link
    assert not link.receive_once()
    assert not link.take_up(Frames(), answer) and link.is_over
    assert link.connection is standing.frames


def test_a_newcomer_is_told_why_it_is_turned_away() -> None:
    for answer, error in (
        (m.Refuse("unlike"), Refused),
        (m.Refuse("gone", again=True), Refused),
        (m.Stop("over"), Stopped),
    ):
        with pytest.raises(error):
            given: dict[str, Any] = {"local_address": "127.0.0.1", "pid": 7}
            Link(Frames(m.encode(answer)), DOOR, "w0", "0", ByHand(), **given)


# -- the first frames


def proven(role: bytes, token: str, conversation: Any) -> Any:
    """What comes of a conversation with a coordinator that has this token."""
    nonce = bytes(auth.NONCE_BYTES)
    assert next(conversation) is None, "who connects waits for the challenge"
    confirmation = auth.confirmation(token, role, nonce, conversation.send(auth.challenge(nonce)))
    return conversation.send(confirmation or bytes(auth.PROOF_BYTES))


@pytest.mark.parametrize("role", [b"worker", b"agent"])
def test_both_ends_prove_that_they_know_the_token(role: bytes) -> None:
    with pytest.raises(StopIteration):
        proven(role, DOOR.token, handshake.prove(DOOR, role))
    with pytest.raises(Refused, match="does not know the job token"):
        proven(role, "another", handshake.prove(DOOR, role))


CLOSED = [
    ConnectionClosedError(None, None),
    ConnectionClosedError(Close(handshake.WRONG_TOKEN, "wrong token"), None),
    ConnectionClosedOK(None, None),
    OSError("reset"),
]
FRAMES = st.one_of(
    st.sampled_from([auth.challenge(bytes(32)), b"", b"nonsense", bytes(auth.PROOF_BYTES), *CLOSED]),
    st.binary(max_size=80),
)


@given(st.lists(FRAMES, max_size=3))
def test_workers_and_launchers_take_the_same_frames_alike(coming: list[Any]) -> None:
    """Blocking and under asyncio; launchers only tell apart after which errors another try may succeed."""
    quick, slow = Frames(*coming), Slowly(*coming)
    with pytest.raises(PliantError) as one:
        converse(quick, DOOR, handshake.prove(DOOR, WORKER.role))
    with pytest.raises(PliantError) as other:
        asyncio.run(agent_link._converse(slow, DOOR, handshake.prove(DOOR, agent_link.LAUNCHER.role)))  # type: ignore[arg-type]
    assert isinstance(other.value, type(one.value)) and slow.aborted
    assert len(quick.sent) == len(slow.sent) <= 1
    assert (type(other.value) is agent_link.Unreachable) == ("lost the coordinator" in str(one.value))


def test_a_launcher_waits_as_long_as_it_is_told_to() -> None:
    told: list[int] = []
    over = m.Over("done", completed=True, exit_status=0)
    frames = [m.encode(each) for each in (m.Hold(), m.StatusUpdate(b"{}"), m.Hold(), over)]
    enlist = handshake.enlist(m.Enlist("a0", "0", [], 1, True), lambda: told.append(1))
    link = Slowly(*frames)
    assert asyncio.run(agent_link._converse(link, DOOR, enlist)) == over  # type: ignore[arg-type]
    assert len(told) == 2 and len(link.sent) == 1


def test_what_makes_no_sense_is_no_coordinator() -> None:
    for frame in (b"nonsense", m.encode(m.Written(3))):
        with pytest.raises(RunEnded, match="no Pliant coordinator of this version"):
            converse(Frames(frame), DOOR, handshake.greet(m.Hello("w0", 1, "0"), DOOR, lambda: None))
    with pytest.raises(ConnectionClosed):
        Frames().recv()
