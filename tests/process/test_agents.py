"""Launchers as agents: the channel, the processes, and what happens when the coordinator is away.

The first part drives a launcher with a coordinator made of canned answers, so that every moment can be chosen. The
second part runs the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from running import LIMIT_S, Launcher, Running, coordinator_of, gone, heard_here, processes_in
from test_launch import PRELUDE as PRELUDE_OF_MEMBERS
from websockets.asyncio.server import Server, ServerConnection, serve

from pliant import auth
from pliant.control import messages
from pliant.control.agent_link import Unreachable
from pliant.control.handshake import WRONG_TOKEN
from pliant.coordinator.status import Status
from pliant.errors import PliantError, Refused
from pliant.launch import launcher, local
from pliant.launch.preemption import noticed

pytestmark = pytest.mark.slow

TOKEN = "secret"
Message = TypeVar("Message")


class Said:
    """A screen that keeps what it was shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.statuses: list[Status] = []

    def started(self, directory: Path, address: str) -> None: ...
    def ended(self, outcome: local.JobOutcome) -> None: ...

    def output(self, worker: str, text: str, stream: local.Stream) -> None:
        self.lines.append(f"{worker} {text}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, status: Status) -> None:
        self.statuses.append(status)


class Canned:
    """A coordinator that says what the test wants, one connection after the other."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.connection: ServerConnection | None = None
        self._server: Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await serve(self._keep, "127.0.0.1", self.port, ping_interval=None, compression=None)
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def enlisted(self, *slots: str, name: str = "a0") -> messages.Enlist:
        """Take the next connection and answer it."""
        self.connection = await asyncio.wait_for(self.connections.get(), LIMIT_S)
        enlist = await self.heard(messages.Enlist)
        await self.say(messages.Enlisted("job", name, 1, list(slots)))
        return enlist

    async def heard(self, kind: type[Message]) -> Message:
        assert self.connection is not None
        message = messages.decode_from_agent(await asyncio.wait_for(self.connection.recv(decode=False), LIMIT_S))
        assert isinstance(message, kind), message
        return message

    async def say(self, message: messages.ToAgent) -> None:
        assert self.connection is not None
        await self.connection.send(messages.encode(message))

    async def hang_up(self) -> None:
        assert self.connection is not None
        self.connection.transport.abort()

    async def _keep(self, connection: ServerConnection) -> None:
        nonce = bytes(auth.NONCE_BYTES)
        await connection.send(auth.challenge(nonce))
        shown = auth.confirmation(TOKEN, b"agent", nonce, await connection.recv(decode=False))
        if shown is None:
            await connection.close(WRONG_TOKEN)
            return
        await connection.send(shown)
        await self.connections.put(connection)
        await connection.wait_closed()


Scene = Callable[[Canned, Said, "asyncio.Task[local.JobOutcome]"], Awaitable[None]]


def play(tmp_path: Path, script: str, scene: Scene, **settings: object) -> local.JobOutcome:
    """Let a launcher join the canned coordinator, and a scene happen."""
    (tmp_path / "train.py").write_text("import os, signal, sys, time\n" + textwrap.dedent(script))
    spec = local.JobSpec(str(tmp_path / "train.py"), directory=tmp_path / "job")
    spec = replace(spec, **settings)  # pyright: ignore[reportArgumentType]

    async def whole() -> local.JobOutcome:
        canned, said = Canned(), Said()
        await canned.open()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(canned.close)
            access = local.Access(f"127.0.0.1:{canned.port}", TOKEN)
            launching = asyncio.create_task(local.join_job(spec, access, ui=said))
            await stack.enter_async_context(_ended(launching))
            await scene(canned, said, launching)
            return await asyncio.wait_for(launching, LIMIT_S)

    with heard_here():
        return asyncio.run(whole())


@contextlib.asynccontextmanager
async def _ended(task: asyncio.Task[local.JobOutcome]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(happens: Callable[[], bool]) -> None:
    """Wait for what the launcher does in this very loop."""
    async with asyncio.timeout(LIMIT_S):
        while not happens():
            await asyncio.sleep(0.01)


def test_a_launcher_carries_out_what_it_is_told(tmp_path: Path) -> None:
    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        enlist = await canned.enlisted("w3", "w4")
        assert (enlist.agent, enlist.slots, enlist.wanted, enlist.owner) == ("", [], 2, False)
        ends = {end.slot: end for end in [await canned.heard(messages.Exited) for _ in range(2)]}
        assert (ends["w3"].status, ends["w3"].error) == (0, "")
        assert (ends["w4"].status, ends["w4"].error) == (1, "ValueError: boom")
        assert ends["w3"].pid != ends["w4"].pid > 0
        await canned.say(messages.Start("w4"))
        again = await canned.heard(messages.Exited)
        assert again.slot == "w4" and again.pid != ends["w4"].pid
        await canned.say(messages.Start("w9"))
        assert (await canned.heard(messages.Exited)).slot == "w9"
        await canned.say(messages.Note("something happened"))
        await canned.say(messages.StatusUpdate(msgspec.json.encode(Status(job="job", era=7))))
        await canned.say(messages.Over("finished", completed=True, exit_status=5))
        outcome = await launching
        assert (outcome.exit_status, outcome.completed, outcome.status.era) == (5, True, 7)
        assert "something happened" in said.notes
        assert sum(line == "w4 ValueError: boom" for line in said.lines) == 1
        assert {"w3 1.0 8", "w4 0.5 8", "w9 1.0 8"} <= set(said.lines)

    script = """
    worker = os.environ["PLIANT_WORKER"]
    print(os.environ["PLIANT_PACE"], os.environ["PLIANT_SIZE"])
    if worker == "w4":
        raise ValueError("boom")
    """
    play(tmp_path, script, scene, workers=2, paces=(1.0, 0.5), sizes=(8,))
    assert (tmp_path / "job" / "logs" / "w4.log").read_text().count("ValueError: boom") == 2


def test_what_a_new_coordinator_may_not_know_is_said_again(tmp_path: Path) -> None:
    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0", "w1")
        await until(lambda: len(said.lines) == 2)
        await canned.close()
        (tmp_path / "go").touch()
        await until(lambda: "w1 gone" in said.lines)
        await canned.open()
        enlist = await canned.enlisted("w0", "w1")
        assert (enlist.agent, sorted(enlist.slots), enlist.wanted) == ("a0", ["w0", "w1"], 0)
        end = await canned.heard(messages.Exited)
        assert (end.slot, end.status) == ("w1", 4)
        # Told once more, as long as the process was not started again.
        await canned.hang_up()
        await canned.enlisted("w0", "w1")
        assert await canned.heard(messages.Exited) == end
        await canned.say(messages.Kill("w0"))
        assert (await canned.heard(messages.Exited)).status == -signal.SIGKILL
        await canned.say(messages.Over("over", completed=False, exit_status=1))

    script = f"""
    print("here")
    while os.environ["PLIANT_WORKER"] == "w0" or not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.01)
    print("gone")
    sys.exit(4)
    """
    assert play(tmp_path, script, scene, workers=2).exit_status == 1


def test_who_does_not_go_within_the_grace_is_killed(tmp_path: Path) -> None:
    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0", "w1")
        await until(lambda: len(said.lines) == 2)
        await canned.say(messages.Terminate("w0"))
        await canned.say(messages.Terminate("w1"))
        ends = {end.slot: end.status for end in [await canned.heard(messages.Exited) for _ in range(2)]}
        assert ends == {"w0": 0, "w1": -signal.SIGKILL}
        await canned.say(messages.Over("over", completed=True, exit_status=0))

    script = """
    stubborn = os.environ["PLIANT_WORKER"] == "w1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: sys.exit(0))
    print("here")
    while True:
        time.sleep(0.01)
    """
    play(tmp_path, script, scene, workers=2, grace_s=0.5)


FOREVER = """
print("pid", os.getpid())
while True:
    time.sleep(0.01)
"""


def test_a_coordinator_gone_for_good_ends_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "RECONNECT_S", 0.5)

    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0")
        await until(lambda: len(said.lines) == 1)
        await canned.close()
        outcome = await launching
        assert (outcome.exit_status, outcome.completed) == (1, False)
        assert "lost the coordinator for 0.5 s: nobody listens at 127.0.0.1:" in outcome.reason
        gone(int(said.lines[0].split()[-1]))
        await canned.open()

    play(tmp_path, FOREVER, scene)


def test_workers_that_ended_well_need_no_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "IDLE_RECONNECT_S", 0.3)

    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0")
        await canned.heard(messages.Exited)
        await canned.close()
        outcome = await launching
        assert (outcome.exit_status, outcome.completed, outcome.reason) == (0, True, "finished")
        await canned.open()

    play(tmp_path, "", scene)


def test_signals_are_told_and_end_everything_without_a_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ALONE_S", 0.3)

    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0")
        await until(lambda: len(said.lines) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await canned.heard(messages.Interrupted)).signal == signal.SIGTERM
        # Whoever takes this one's place has to know of it.
        await canned.hang_up()
        await canned.enlisted("w0")
        assert (await canned.heard(messages.Interrupted)).signal == signal.SIGTERM
        await canned.close()
        outcome = await launching
        assert (outcome.exit_status, outcome.reason) == (143, "ended by signal 15")
        gone(int(said.lines[0].split()[-1]))
        await canned.open()

    play(tmp_path, FOREVER, scene)


def test_the_third_signal_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "ALONE_S", 10 * LIMIT_S)

    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0")
        await until(lambda: len(said.lines) == 1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await canned.heard(messages.Interrupted)
        os.kill(os.getpid(), signal.SIGINT)
        assert (await launching).exit_status == 130
        gone(int(said.lines[0].split()[-1]))

    play(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER, scene)


def test_a_notice_is_told_once(tmp_path: Path) -> None:
    async def scene(canned: Canned, said: Said, launching: asyncio.Task[local.JobOutcome]) -> None:
        await canned.enlisted("w0")
        await until(lambda: len(said.lines) == 1)
        (tmp_path / "leaving").touch()
        await canned.heard(messages.Noticed)
        assert any("about to be taken away" in note for note in said.notes)
        await canned.hang_up()
        await canned.enlisted("w0")
        await canned.heard(messages.Noticed)
        await canned.say(messages.Terminate("w0"))
        await canned.heard(messages.Exited)
        await canned.say(messages.Over("its workers left", completed=True, exit_status=0))

    command = f"test -e {tmp_path / 'leaving'}"
    assert play(tmp_path, FOREVER, scene, notice_command=command, notice_every_s=0.1).exit_status == 0


def test_a_notice_command_that_hangs_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.launch.preemption.COMMAND_S", 0.3)
    monkeypatch.chdir(tmp_path)
    warnings: list[str] = []

    async def ask(command: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await noticed(command, 0.1, warnings.append)
                raise AssertionError("that was no notice")

    asyncio.run(ask("sleep 1000 & wait"))
    # Killed with the command; the system may take a moment.
    for process in set(processes_in(tmp_path)) - {os.getpid()}:
        gone(process)
    assert not warnings
    asyncio.run(ask("no-such-command"))
    assert warnings == ["the notice command does not work (it is not found): no-such-command"]


@pytest.mark.parametrize(
    ("token", "kind", "said"),
    [("wrong", Refused, "refused the job token"), (None, Unreachable, "nobody listens at 127.0.0.1:")],
)
def test_who_is_not_let_in_is_told_why(tmp_path: Path, token: str | None, kind: type[PliantError], said: str) -> None:
    (tmp_path / "train.py").write_text("")

    async def whole() -> None:
        canned = Canned()
        await canned.open()
        if token is None:
            await canned.close()
        access = local.Access(f"127.0.0.1:{canned.port}", token or TOKEN)
        spec = local.JobSpec(str(tmp_path / "train.py"), directory=tmp_path / "job")
        try:
            with pytest.raises(kind, match=said):
                await local.join_job(spec, access, ui=Said())
        finally:
            if token is not None:
                await canned.close()

    asyncio.run(whole())
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--join", "127.0.0.1:1", "--token-file", "secret", "train.py"), "nobody listens at 127.0.0.1:1: "),
        (("run", "--join", "127.0.0.1:1", "train.py"), "the run asks for its token; "),
        (("run", "--join", "nonsense", "--token-file", "secret", "train.py"), "'nonsense' is no address; "),
        (("run", "--join", "127.0.0.1:1", "--token-file", "none", "train.py"), "cannot read a token from none: "),
        (("run", "-n", "3", "--max-workers", "2", "train.py"), "--max-workers is 2 but 3 are wanted; "),
        (("run", "--min-workers", "0", "train.py"), "--min-workers is 0; "),
        (("run", "--host", "0.0.0.0", "train.py"), "--host 0.0.0.0 is no address that others can reach; "),
        (("run", "--notice-every", "0", "train.py"), "--notice-every is 0; "),
        (("scale", "0"), "a run cannot go on with 0 workers; "),
        (("scale", "2"), "no run in ./runs; "),
        (("drain", "w0", "--dir", "nowhere"), "no run in nowhere; "),
        (("events", "--address", "127.0.0.1:1", "--token-file", "secret"), "the run is over: nobody listens at "),
        (("coordinator", "--dir", "nowhere", "--resume"), "no run in nowhere; "),
        (("coordinator", "--dir", "nowhere"), "`pliant run` starts a run with its coordinator; "),
    ],
)
def test_bad_input_costs_one_line(launch: Launcher, words: tuple[str, ...], said: str) -> None:
    (launch.directory / "train.py").write_text("")
    (launch.directory / "secret").write_text("secret\n")
    run = launch.command(*words)
    assert run.wait() == 1, run.output
    assert len(run.lines) == 1 and run.lines[0].startswith(f"pliant: {said}"), run.output


# with the real coordinator

TRAINS = PRELUDE_OF_MEMBERS + "link = joined(); trained(link); print('trains', os.getpid()); wait_for_the_end(link)\n"


def started(launch: Launcher, workers: int = 2) -> Running:
    run = launch(TRAINS, workers=workers)
    run.until("trains", times=workers)
    return run


def journaled(run: Running, text: str) -> None:
    """Wait until it is on disk."""
    until_s = time.monotonic() + LIMIT_S
    while text not in (run.directory / "job" / "journal.jsonl").read_text():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def end(run: Running) -> None:
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output


def test_the_coordinator_dies_and_the_run_goes_on(launch: Launcher) -> None:
    run = started(launch)
    journaled(run, '"kind":"era"')
    os.kill(coordinator_of(run), signal.SIGKILL)
    run.until("pliant: the coordinator died; restarted")
    shown = launch.command("status", "--dir", "job")
    assert shown.wait() == 0, shown.output
    worker = next(int(line.split()[-1]) for line in run.lines if line.startswith("[w1] trains"))
    os.kill(worker, signal.SIGKILL)
    run.until("[w1] trains")
    assert "w0 was lost" not in run.output, run.output
    end(run)


def test_a_coordinator_that_dies_again_and_again_is_given_up(launch: Launcher) -> None:
    run = started(launch)
    # The next ones find a journal they cannot trust, as they would after a disk failure.
    (run.directory / "job" / "term").write_text("nonsense")
    os.kill(coordinator_of(run), signal.SIGKILL)
    assert run.wait() == 1
    assert "is damaged: it must hold a whole number" in run.output


def test_signals_end_a_run_whose_coordinator_does_not_answer(launch: Launcher) -> None:
    run = started(launch)
    os.kill(coordinator_of(run), signal.SIGSTOP)
    for _ in range(3):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert run.wait() == 130, run.output


def test_more_workers_join_and_leave(launch: Launcher) -> None:
    run = started(launch)
    address = (run.directory / "job" / "address").read_text().strip()
    words = ("run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest", "train.py")
    guest = launch.command(*words)
    guest.until("[w2] trains")
    run.until("['w0', 'w1', 'w2']")
    guest.process.send_signal(signal.SIGTERM)
    assert guest.wait() == 0, guest.output
    assert "Traceback" not in guest.output
    run.until("pliant: w2 left")
    stranger = launch.command("run", "--join", address, "-n", "1", "--token-file", "train.py", "train.py")
    assert stranger.wait() == 1
    assert len(stranger.lines) == 1, stranger.output
    end(run)


def test_scale_drain_events_and_status(launch: Launcher) -> None:
    run = started(launch)
    assert said(launch, "scale", "3") == ["3 workers are wanted"]
    run.until("[w2] trains")
    assert said(launch, "drain", "w1") == ["w1 leaves after its round"]
    run.until("pliant: w1 left")
    assert said(launch, "drain", "w7", status=1)[0].startswith("pliant: there is no worker w7; ")
    assert said(launch, "scale", "1") == ["1 workers are wanted"]
    run.until("left", times=2)
    shown = said(launch, "events")
    assert any("left" in line and "w1" in line for line in shown), shown
    assert any(line.split()[:2] == ["w0", "training"] for line in said(launch, "status"))
    end(run)


def said(launch: Launcher, *words: str, status: int = 0) -> list[str]:
    command = launch.command(*words, "--dir", "job")
    assert command.wait() == status, command.output
    return command.lines


def test_a_second_coordinator_is_refused(launch: Launcher) -> None:
    run = started(launch, workers=1)
    refused = said(launch, "coordinator", "--resume", status=1)
    assert len(refused) == 1 and "is in use: the coordinator of the run in job is alive; " in refused[0]
    refused = said(launch, "coordinator", "--resume", "--port", str(free_port()), status=1)
    assert len(refused) == 1 and "the coordinator of the run in " in refused[0] and "is alive" in refused[0]
    end(run)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def test_a_coordinator_by_hand_takes_a_lost_ones_place(launch: Launcher) -> None:
    run = started(launch)
    address = (run.directory / "job" / "address").read_text().strip()
    words = ("run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest", "train.py")
    guest = launch.command(*words)
    guest.until("[w2] trains")
    run.until("['w0', 'w1', 'w2']")
    journaled(run, '"w2"')
    run.process.kill()
    by_hand = launch.command("coordinator", "--dir", "job", "--resume")
    by_hand.until("coordinating the run at")
    guest.until("['w2']")
    guest.process.send_signal(signal.SIGTERM)
    # The last worker has left an unfinished run.
    assert guest.wait() == 1, guest.output + by_hand.output
    assert "pliant: no worker is left" in guest.lines
    assert by_hand.wait() == 0, by_hand.output
