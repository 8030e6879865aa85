"""A forked child holds nothing of its parent that would hide the parent's death."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from pliant import auth, forking
from pliant.control.link import Link
from pliant.control.messages import Welcome, encode
from pliant.tensors.handoff import Donor, Recipient
from pliant.tensors.process_group import teardown
from pliant.tensors.process_group.gloo_sockets import GlooSockets

TOKEN = "secret"
LIMIT_S = 30.0


def in_child(ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    while part := os.read(reader, 65536):
        text += part
    os.close(reader)
    os.waitpid(child, 0)
    return json.loads(text)


def sockets() -> list[str]:
    """The sockets that this process has open, by inode."""
    found: list[str] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(descriptor.readlink()))
    return [each for each in found if each.startswith("socket:")]


@contextmanager
def link() -> Iterator[set[str]]:
    def answer(connection: ServerConnection) -> None:
        nonce = bytes(auth.NONCE_BYTES)
        connection.send(auth.challenge(nonce))
        confirmation = auth.confirmation(TOKEN, b"worker", nonce, connection.recv(decode=False))
        assert confirmation is not None
        connection.send(confirmation)
        connection.recv()
        connection.send(encode(Welcome("job", "w0.1", 1, 5.0, 0)))
        for _ in connection:
            pass

    with serve(answer, "127.0.0.1", 0, compression=None) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        made = Link.connect(f"127.0.0.1:{server.socket.getsockname()[1]}", TOKEN, "w0", "0")
        connection: Any = made.connection
        yield {str(Path(f"/proc/self/fd/{connection.socket.fileno()}").readlink())}
        made.close()
        server.shutdown()
        serving.join()


@contextmanager
def handoff() -> Iterator[set[str]]:
    before = set(sockets())
    donor = Donor("127.0.0.1", TOKEN)
    newcomer = Recipient(donor.address, TOKEN)
    newcomer.request(1, 0, [])
    deadline_s = time.monotonic() + LIMIT_S
    while not donor.pending:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    yield set(sockets()) - before
    newcomer.close()
    donor.close()


@contextmanager
def gloo() -> Iterator[set[str]]:
    before = set(sockets())
    made = GlooSockets("127.0.0.1")
    yield set(sockets()) - before
    made.release()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("kind", [link, handoff, gloo])
def test_a_forked_child_holds_none_of_its_parents_sockets(kind: Callable[[], Any]) -> None:
    with kind() as own:
        assert own and own <= set(sockets())
        assert not own & set(in_child(sockets))
        assert own <= set(sockets()), "the parent's stay as they are"


class Group:
    """Stands for one of gloo: its destructor would wait for threads that a child does not have."""

    destroyed = 0

    def leave(self) -> None: ...

    def __del__(self) -> None:
        Group.destroyed += 1


def test_a_forked_child_never_destroys_its_parents_groups() -> None:
    groups = [Group(), Group()]
    for group in groups:
        teardown.leave_at_exit(group)

    def end() -> list[int]:
        known = len(teardown._groups)
        groups.clear()
        gc.collect()
        return [known, Group.destroyed, len(teardown._running)]

    assert in_child(end) == [0, 0, 0]
    assert set(groups) <= set(teardown._groups)
    groups.clear()
    del group
    gc.collect()
    assert Group.destroyed == 2


def test_the_registry_keeps_nothing_alive_and_does_not_grow() -> None:
    gc.collect()
    before = len(forking._registered)
    for _ in range(100):
        own = socket.socket()
        forking.close_in_children(own)
        own.close()
    del own
    gc.collect()
    assert len(forking._registered) == before


def test_one_that_cannot_be_dropped_keeps_no_other_from_it() -> None:
    class Thing: ...

    def fail(thing: Thing) -> None:
        raise RuntimeError("cannot be dropped")

    things, dropped = [Thing(), Thing(), Thing()], []
    for thing, drop in zip(things, (dropped.append, fail, dropped.append), strict=True):
        forking.drop_in_children(thing, drop)
    assert in_child(lambda: len(dropped)) == 2
    assert not dropped, "only in the child"
