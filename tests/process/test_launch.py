"""The launcher, the coordinator and the workers' link as real processes, without torch."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from running import LIMIT_S, Launcher, coordinator_of, gone, processes_in, records, remove

from pliant.core.journal import records as journal
from pliant.launch import local, requests, run_directory

pytestmark = pytest.mark.slow

PRELUDE = """
import os, signal, subprocess, sys, threading, time
from importlib.metadata import version
from pliant.control.link import Link, Position
from pliant.control.messages import Signature
from pliant.core.journal import records as journal
from pliant.core.membership.shutdown import QUIET_EXIT
from pliant.environment import current_job
from pliant.errors import PliantError, RunEnded, Stopped
job = current_job()

def connected():
    return Link.connect(job.address, job.token, job.worker, version("pliant"))

def wait_for(box, ask, timeout_s):
    until_s = time.monotonic() + timeout_s
    with box.changed:
        while (answer := ask()) is None:
            box.check()
            if not box.changed.wait(until_s - time.monotonic()):
                return None
        return answer

def joined(shape=(10, 64), **settings):
    link = connected()
    link.ready(Signature("1", [("fc.weight", list(shape), "float32")], settings), link.local_address + ":1", None)
    return link

def quietly(error, link):
    link.close()
    sys.exit(0 if getattr(error, "completed", False) else QUIET_EXIT)

def enter(link, era):
    link.position = Position(era=era.era, exchange=getattr(era, "exchange", 0), active=True, waiting=True)
    link.entered(era.era, link.position.exchange)
    if link.worker == era.roster[0]:
        # A coordinator that takes another's place finds the era in the journal.
        link.keep([journal.encode(journal.EraRecord(era.era, era.roster))], link.mailbox.written)
        link.send_lines_again()
    return era

def trained(link):
    box = link.mailbox
    try:
        return enter(link, wait_for(box, lambda: box.start or box.plan, 30))
    except RunEnded as error:
        quietly(error, link)

def wait_for_the_end(link):
    # A member without a training loop: it stops and enters when told to, and leaves when asked.
    box = link.mailbox
    stopped = [0]
    def news():
        if box.leave is not None:
            return "leave"
        for era in (box.start, box.plan):
            if era is not None and era.era > max(link.position.era, box.broken_era):
                return era
        return "stop" if box.broken_era > stopped[0] else None
    try:
        while True:
            what = wait_for(box, news, 60)
            if what is None:
                sys.exit("nothing happened")
            if what == "leave":
                link.finish(left=True)
                print("left")
                sys.exit(0)
            if what == "stop":
                stopped[0] = box.broken_era
                link.stopped(stopped[0], 0, active=True)
            else:
                enter(link, what)
                print("entered", what.era, what.roster)
    except RunEnded as error:
        quietly(error, link)
"""


def test_a_run_ends_well(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        era = trained(link)
        link.put(era.attempt, job.worker, job.worker.encode() * 3)
        print(link.worker, era.roster, [link.get(era.attempt, name, 30).decode() for name in era.roster])
        print("args", sys.argv[1:], job.pace, job.size, file=sys.stderr)
        link.finish(left=False)
        """,
        "--lr", "0.1", "-n", "7",
        workers=3,
        options=("--pace", "1,0.5,0.25", "--size", "8"),
    )  # fmt: skip
    assert run.wait() == 0, run.output
    for worker in ("w0", "w1", "w2"):
        assert f"[{worker}] {worker} ['w0', 'w1', 'w2'] ['w0w0w0', 'w1w1w1', 'w2w2w2']" in run.lines
    assert "[w1] args ['--lr', '0.1', '-n', '7'] 0.5 8" in run.lines
    first, *_, last = records(run)
    assert isinstance(first, journal.RunRecord)
    assert isinstance(last, journal.EndRecord) and last.completed
    assert (run.directory / "job").stat().st_mode & 0o777 == 0o700
    for name in ("token", "journal.jsonl", "logs/w2.log", "logs/coordinator.log"):
        assert (run.directory / "job" / name).stat().st_mode & 0o777 == 0o600, name
    assert "w2 ['w0'" in (run.directory / "job" / "logs" / "w2.log").read_text()


def test_a_run_can_be_started_from_any_thread(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + "link = joined(); trained(link); link.finish(left=False); print('done')")
    outcomes: list[local.JobOutcome] = []
    spec = local.JobSpec(script=str(script), workers=2, directory=tmp_path / "job")
    thread = threading.Thread(target=lambda: outcomes.append(local.run(spec)))
    thread.start()
    thread.join(LIMIT_S)
    (outcome,) = outcomes
    assert (outcome.exit_status, outcome.completed, outcome.reason) == (0, True, "finished")
    assert [worker.state for worker in outcome.status.workers] == ["finished", "finished"]
    assert (tmp_path / "job" / "logs" / "w1.log").read_text() == "done\n"


def test_a_script_that_ends_in_the_middle_is_named_and_started_again(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        if link.worker == "w1":
            os._exit(0)
        if link.worker == "w1.2":
            print("again")
        wait_for_the_end(link)
        """
    )
    run.until("pliant: w1 ended in the middle of the run (exit status 0): w0 goes on")
    run.until("[w1] again")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_the_scripts_exit_status_is_returned(launch: Launcher) -> None:
    run = launch("link = joined(); trained(link); link.finish(left=False); sys.exit(3 if job.worker == 'w1' else 0)")
    assert run.wait() == 3, run.output


def test_a_script_that_never_joins_is_named(launch: Launcher) -> None:
    run = launch("print('nothing to do')")
    assert run.wait() == 1
    assert "pliant: train.py never called pliant.join: " in run.output


def test_what_fails_on_all_workers_before_join_ends_the_run_at_once(launch: Launcher) -> None:
    run = launch(
        """
        import traceback
        try:
            raise ValueError("no data")
        except ValueError:
            traceback.print_exc()
            sys.exit(7)
        """,
        workers=3,
    )
    assert run.wait() == 7, run.output
    assert run.output.count("Traceback") == 1, run.output
    said = "ended before it called pliant.join (exit status 7), and so did all others: ValueError: no data"
    assert [line for line in run.lines if line.endswith(said)], run.output


def test_the_transports_own_lines_are_in_the_log_alone(launch: Launcher) -> None:
    run = launch(
        """
        gloo = "[E1118 11:24:11.640973595 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed"
        text = f"{gloo}\\n[epoch 1] mine\\nTraceback (most recent call last):\\n{gloo}\\nValueError: x\\n"
        os.write(2, text.encode())
        sys.exit(3)
        """,
        workers=1,
    )
    assert run.wait() == 3, run.output
    assert "Gloo" not in run.output and "[w0] [epoch 1] mine" in run.lines, run.output
    assert run.output.endswith("pliant: the run is in job") and "(exit status 3): ValueError: x" in run.output
    assert (run.directory / "job" / "logs" / "w0.log").read_text().count("Gloo connectFullMesh failed") == 2


def test_a_traceback_is_shown_once(launch: Launcher) -> None:
    run = launch("raise ValueError('wrong')", workers=4)
    assert run.wait() == 1
    assert sum(line.endswith("] ValueError: wrong") for line in run.lines) == 1
    assert run.output.count("Traceback") == 1


def test_a_worker_that_fails_is_started_again(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        if link.worker == "w1":
            link.fail("ValueError: wrong", shown=True)
            raise ValueError("wrong")
        if link.worker == "w1.2":
            print("again")
        wait_for_the_end(link)
        """,
        workers=3,
    )
    run.until("pliant: w1 failed (ValueError: wrong): w0, w2 go on")
    run.until("[w1] again")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.output.count("Traceback") == 1
    assert "[w1] ValueError: wrong" in run.lines
    log = (run.directory / "job" / "logs" / "w1.log").read_text()
    assert "ValueError: wrong" in log and "again" in log


def test_what_all_workers_fail_of_ends_the_run(launch: Launcher) -> None:
    run = launch(
        """
        link = joined(dead_after="60")
        trained(link)
        link.fail("ValueError: wrong", shown=True)
        raise ValueError("wrong")
        """
    )
    assert run.wait() == 1
    assert run.output.count("Traceback") == 1
    # Both may fail before either is back: then nobody is left who holds the weights.
    hopeless = "failed twice in a row, and so did all others: ValueError: wrong"
    assert hopeless in run.output or "ValueError: wrong): nobody is left" in run.output


def test_models_that_differ_end_the_run(launch: Launcher) -> None:
    run = launch("link = joined((10, 32 if job.worker == 'w1' else 64)); trained(link)")
    assert run.wait() == 1
    expected = "models differ: 'fc.weight' is (10, 64) on w0 but (10, 32) on w1; give every worker the same model"
    assert f"pliant: {expected}" in run.lines


def test_a_killed_worker_is_named_and_replaced(launch: Launcher) -> None:
    run = launch("link = joined(); trained(link); print('pid', os.getpid()); wait_for_the_end(link)", workers=3)
    run.until("pid", times=3)
    pid = next(int(line.split()[-1]) for line in run.lines if line.startswith("[w2] pid"))
    os.kill(pid, signal.SIGKILL)
    run.until("pliant: w2 was lost (killed by signal 9): w0, w1 go on")
    run.until("['w0', 'w1', 'w2.2']")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    last = records(run)[-1]
    assert isinstance(last, journal.EndRecord) and not last.completed


def test_a_killed_worker_is_noticed_though_its_forked_child_lives(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        if link.worker == "w1":
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            print("pids", os.getpid(), child)
        wait_for_the_end(link)
        """
    )
    parent, child = (int(word) for word in run.until("pids").split()[-2:])
    os.kill(parent, signal.SIGKILL)
    gone(child)
    run.until("pliant: w1 was lost (killed by signal 9): w0 goes on")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_a_stopped_worker_is_noticed(launch: Launcher) -> None:
    run = launch(
        """
        link = joined(dead_after="2")
        trained(link)
        if link.worker == "w1":
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_the_end(link)
        """
    )
    run.until("pliant: w1 was lost (no sign of life for 2 s): w0 goes on")
    run.printed("['w0']")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_forwarded(launch: Launcher, number: int, status: int) -> None:
    run = launch(
        """
        def leave(*_):
            print("saving")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        link = joined()
        trained(link)
        print("training")
        signal.pause()
        """
    )
    run.until("training", times=2)
    run.process.send_signal(number)
    assert run.wait() == status, run.output
    assert "[w0] saving" in run.lines and "[w1] saving" in run.lines


def test_children_of_workers_end_with_them(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        forever = subprocess.Popen(["sleep", "1000"])
        print("child", forever.pid)
        forever.returncode = 0  # no warning about a child left running: that is the point
        link.finish(left=False)
        """
    )
    assert run.wait() == 0, run.output
    for line in run.lines:
        if "child" in line:
            gone(int(line.split()[-1]))


def test_nobody_outlives_a_killed_launcher(launch: Launcher) -> None:
    run = launch("print('pid', os.getpid()); signal.pause()")
    run.until("pid", times=2)
    pids = [pid for pid in processes_in(launch.directory) if pid != run.process.pid]
    assert len(pids) == 3, "two workers and the coordinator"
    run.process.kill()
    for pid in pids:
        gone(pid)


def test_status_and_metrics_need_the_token(launch: Launcher) -> None:
    run = launch("link = joined(); trained(link); print('training'); signal.pause()")
    run.until("training", times=2)
    address = (run.directory / "job" / "address").read_text().strip()
    token = (run.directory / "job" / "token").read_text().strip()
    for path in ("/status", "/metrics"):
        assert ask(address, path, {})[0] == 403
        # The token itself opens nothing: whoever sends it has given it away.
        for wrong in ("wrong", token):
            assert ask(address, path, {"Authorization": f"Bearer {wrong}"})[0] == 403
    answer = requests.get(run_directory.access(run.directory / "job"), "/status")
    assert [worker["state"] for worker in json.loads(answer)["workers"]] == ["training", "training"]
    # What Prometheus sends opens the numbers and nothing else.
    numbers = (run.directory / "job" / "metrics-token").read_text().strip()
    assert ask(address, "/status", {"Authorization": f"Bearer {numbers}"})[0] == 403
    status, answer = ask(address, "/metrics", {"Authorization": f"Bearer {numbers}"})
    assert status == 200 and b"pliant_workers 2.0" in answer and b"pliant_samples_total 0.0" in answer
    shown = launch.command("status", "--dir", "job")
    assert shown.wait() == 0 and "w1" in shown.output, shown.output
    assert not any(token.encode() in line for line in command_lines())
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def command_lines() -> list[bytes]:
    """Of all processes that this one may look at and that have not ended meanwhile."""
    found: list[bytes] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(entry.read_bytes())
    return found


def ask(address: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_wrong_token_is_refused(launch: Launcher) -> None:
    run = launch(
        """
        try:
            Link.connect(job.address, "wrong", job.worker, version("pliant"))
        except PliantError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        """,
        workers=1,
    )
    assert run.wait() == 1
    assert "[w0] Refused: the coordinator at 127.0.0.1:" in run.output
    assert "refused the job token" in run.output


def test_a_second_connection_of_a_worker_is_refused(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        try:
            connected()
        except PliantError as error:
            print(f"{type(error).__name__}: {error}")
        trained(link)
        link.finish(left=False)
        """,
        workers=1,
    )
    assert run.wait() == 0, run.output
    assert "Refused: there is already a worker in slot w0" in run.output


def test_nobody_listens(launch: Launcher) -> None:
    run = launch(
        """
        try:
            Link.connect("127.0.0.1:1", "token", job.worker, version("pliant"))
        except RunEnded as error:
            print(error)
        """,
        workers=1,
    )
    assert run.wait() == 1
    assert "nobody listens at 127.0.0.1:1" in run.output


def test_a_frame_that_is_no_message_closes_the_connection(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        first = link.connection
        first.send(b"nonsense")
        while link.connection is first:
            time.sleep(0.01)
        print("connected again as", link.worker)
        link.finish(left=False)
        """,
        workers=1,
    )
    assert run.wait() == 0, run.output
    assert "[w0] connected again as w0" in run.lines


def test_port_in_use(launch: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = launch("", options=("--port", port))
        assert run.wait() == 1
    assert run.lines == [f"pliant: port {port} is in use; give another --port, or none to take a free one"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("run", "nothing.py"), 2, "pliant: no script at nothing.py; "),
        (("run", "-n", "2", "--pace", "1,1,1", "train.py"), 1, "pliant: --pace has 3 values for 2 workers; "),
        (("run", "-n", "2", "--pace", "1,x", "train.py"), 1, "pliant: --pace is '1,x'; "),
        (("run", "--dir", "old", "train.py"), 1, "already holds the journal of a run; "),
        (("status",), 1, "pliant: no run in ./runs; "),
        (("status", "--dir", "nowhere"), 1, "pliant: no run in nowhere; "),
        (("--version",), 0, "pliant 0."),
    ],
)
def test_bad_input_costs_one_line(launch: Launcher, words: tuple[str, ...], status: int, said: str) -> None:
    (launch.directory / "train.py").write_text("")
    (launch.directory / "old").mkdir()
    (launch.directory / "old" / "journal.jsonl").write_text("")
    run = launch.command(*words)
    assert run.wait() == status, run.output
    assert len(run.lines) == 1 and said in run.output


@pytest.mark.parametrize("module", ["ui.cli", "launch.launcher_loop", "launch.coordinator_process"])
def test_neither_launcher_nor_coordinator_imports_torch(module: str) -> None:
    code = f"import sys, pliant.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STEADY = """
link = joined()
era = trained(link)
print("in era", era.era, flush=True)
while not os.path.exists("go on"):
    time.sleep(0.05)
link.finish(left=False)
"""


def test_the_end_of_a_journal_is_proved_and_told_after_the_run(launch: Launcher) -> None:
    run = launch(STEADY)
    run.until("in era", 2)
    (run.directory / "go on").touch()
    assert run.wait() == 0, run.output
    path = run.directory / "job" / "journal.jsonl"
    whole = path.read_bytes()
    audit = launch.command("audit", "job", "--json")
    assert audit.wait() == 0, audit.output
    assert json.loads(audit.lines[-1])["proved"] == "to the end"
    status = launch.command("status", "--dir", "job")
    assert status.wait() == 0 and "finished" in status.output
    events = launch.command("events", "--dir", "job")
    assert events.wait() == 0 and "era 1: w0, w1" in events.output
    # Its end is cut off: the state file knows better. Without that file nobody does, and it is said how far it goes.
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    cut = launch.command("audit", "job")
    assert cut.wait() == 1 and "its end was cut off" in cut.output
    records_left = [journal.decode(line) for line in lines[:-2]]
    end = journal.decode(lines[-1])
    assert isinstance(end, journal.EndRecord)
    file = path.with_name("forged.jsonl")
    place = journal.BEGINNING
    with file.open("wb") as forged:
        for record in [*records_left, end]:
            record = journal.closing(record, place) if isinstance(record, journal.EndRecord) else record
            text, _ = journal.line(journal.encode(record), place.chain)
            place = place.after(text)
            forged.write(text)
    file.replace(path)
    anew = launch.command("audit", "job")
    assert anew.wait() == 1, anew.output
    (run.directory / "job" / "state.json").unlink()
    path.write_bytes(b"".join(lines[:-1]))
    openly = launch.command("audit", "job", "--json")
    assert openly.wait() == 3 and not json.loads(openly.lines[-1])["end_proved"]


def test_a_removed_run_directory_is_made_again(launch: Launcher) -> None:
    run = launch(STEADY)
    run.until("in era", 2)
    remove(run.directory / "job")
    run.until("the run directory was lost; it is made again, and nothing is missing")
    (run.directory / "go on").touch()
    assert run.wait() == 0, run.output
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output
    assert (run.directory / "job" / "token").stat().st_mode & 0o777 == 0o600


def test_a_run_directory_lost_with_its_coordinator_is_told_by_the_exit_status(launch: Launcher) -> None:
    run = launch(STEADY)
    run.until("in era", 2)
    coordinator = coordinator_of(run)
    os.kill(coordinator, signal.SIGSTOP)
    remove(run.directory / "job")
    os.kill(coordinator, signal.SIGKILL)
    run.until("the coordinator died; restarted")
    (run.directory / "go on").touch()
    assert run.wait() == 4, run.output
    assert "the journal is incomplete" in run.output
    audit = launch.command("audit", "job")
    assert audit.wait() == 3, audit.output
