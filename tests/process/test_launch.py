"""The launcher, the coordinator and the workers' link as real processes, without torch."""

from __future__ import annotations

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
from running import LIMIT_S, Launcher, gone, records

from pliant.core import journal
from pliant.launch import local

pytestmark = pytest.mark.slow

PRELUDE = """
import os, signal, subprocess, sys, threading
from importlib.metadata import version
from pliant.control.client import Link
from pliant.control.messages import Signature
from pliant.runtime.environment import QUIET_EXIT, current_job
from pliant.errors import PliantError, RunEnded
job = current_job()

def joined(shape=(10, 64), **settings):
    link = Link.connect(job.address, job.token, job.worker, version("pliant"))
    link.ready(Signature("1", [("fc.weight", list(shape), "float32")], settings))
    return link

def trained(link):
    try:
        return link.era(30)
    except RunEnded:
        link.fail("stopped", shown=True)
        sys.exit(QUIET_EXIT)

def wait_for_the_end(link):
    try:
        link.get(1, "never", 60)
    except RunEnded:
        link.fail("stopped", shown=True)
        sys.exit(QUIET_EXIT)
"""


def test_a_run_ends_well(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        era = link.era(30)
        link.put(era.attempt, job.worker, job.worker.encode() * 3)
        print(job.worker, era.roster, [link.get(era.attempt, name, 30).decode() for name in era.roster])
        print("args", sys.argv[1:], job.pace, job.size, file=sys.stderr)
        link.finish()
        """,
        "--lr", "0.1", "-n", "7",
        workers=3,
        options=("--pace", "1,0.5,0.25", "--size", "8"),
    )  # fmt: skip
    assert run.wait() == 0, run.output
    for worker in ("w0", "w1", "w2"):
        assert f"[{worker}] {worker} ['w0', 'w1', 'w2'] ['w0w0w0', 'w1w1w1', 'w2w2w2']" in run.lines
    assert "[w1] args ['--lr', '0.1', '-n', '7'] 0.5 8" in run.lines
    kinds = [type(record).__name__ for record in records(run)]
    assert kinds == ["RunRecord", "EraRecord", "EndRecord"]
    assert (run.directory / "job" / "token").stat().st_mode & 0o777 == 0o600
    assert "w2 ['w0'" in (run.directory / "job" / "logs" / "w2.log").read_text()


def test_records_are_journaled_in_order(launch: Launcher) -> None:
    run = launch(
        """
        from pliant.core import journal
        link = joined()
        era = link.era(30)
        link.plan(2, None)
        if job.worker == "w0":
            ticket = journal.TicketLine([(0, 4)], 1, 4, 4.0, 0.1, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0, 0)
            link.journal(journal.encode(journal.PhaseRecord(1, "train", 0, 16, 16, [4, 4], [1, 1], 0)))
            for number in (1, 2):
                record = journal.RoundRecord(1, number, 1, 8, 8.0, 1.0, 0.1, 0.5, True, 8 * number, [ticket, ticket])
                link.journal(journal.encode(record))
            link.journal(journal.encode(journal.PhaseEndRecord(1, [])))
        link.finish()
        """
    )
    assert run.wait() == 0, run.output
    numbers = [record.round for record in records(run) if isinstance(record, journal.RoundRecord)]
    assert numbers == [1, 2]
    assert "epoch 1/2" in run.output and "16 samples in 2 rounds" in run.output


def test_a_run_can_be_started_from_any_thread(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + "link = joined(); link.era(30); link.finish(); print('done')")
    outcomes: list[local.Outcome] = []
    spec = local.JobSpec(script=str(script), workers=2, directory=tmp_path / "job")
    thread = threading.Thread(target=lambda: outcomes.append(local.run(spec)))
    thread.start()
    thread.join(LIMIT_S)
    (outcome,) = outcomes
    assert (outcome.exit_status, outcome.completed, outcome.reason) == (0, True, "finished")
    assert [worker.state for worker in outcome.status.workers] == ["finished", "finished"]
    assert (tmp_path / "job" / "logs" / "w1.log").read_text() == "done\n"


def test_a_script_that_ends_in_the_middle_is_named(launch: Launcher) -> None:
    run = launch("link = joined(); trained(link); job.worker == 'w1' and sys.exit(0); wait_for_the_end(link)")
    assert run.wait() == 1
    assert "pliant: w1 ended in the middle of the run (exit status 0); " in run.output


def test_the_scripts_exit_status_is_returned(launch: Launcher) -> None:
    run = launch("link = joined(); link.era(30); link.finish(); sys.exit(3 if job.worker == 'w1' else 0)")
    assert run.wait() == 3, run.output


def test_a_script_that_never_joins_is_named(launch: Launcher) -> None:
    run = launch("print('nothing to do')")
    assert run.wait() == 1
    assert "pliant: train.py never called pliant.join: " in run.output


def test_a_traceback_is_shown_once(launch: Launcher) -> None:
    run = launch("raise ValueError('wrong')", workers=4)
    assert run.wait() == 1
    assert run.output.count("ValueError: wrong") == 1
    assert run.output.count("Traceback") == 1


def test_a_traceback_of_one_worker_ends_the_others_quietly(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        if job.worker == "w1":
            link.fail("ValueError: wrong", shown=True)
            raise ValueError("wrong")
        wait_for_the_end(link)
        """,
        workers=3,
    )
    assert run.wait() == 1
    assert run.output.count("Traceback") == 1
    assert "[w1] ValueError: wrong" in run.lines
    assert "pliant: w1 failed: ValueError: wrong" in run.lines


def test_models_that_differ_end_the_run(launch: Launcher) -> None:
    run = launch("link = joined((10, 32 if job.worker == 'w1' else 64)); trained(link)")
    assert run.wait() == 1
    expected = "models differ: 'fc.weight' is (10, 64) on w0 but (10, 32) on w1; give every worker the same model"
    assert f"pliant: {expected}" in run.lines


def test_a_killed_worker_is_named(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        print("pid", os.getpid())
        wait_for_the_end(link)
        """,
        workers=3,
    )
    run.until("pid", times=3)
    pid = next(int(line.split()[-1]) for line in run.lines if line.startswith("[w2] pid"))
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 137
    assert "pliant: w2 was lost (killed by signal 9): " in run.output
    last = records(run)[-1]
    assert isinstance(last, journal.EndRecord) and not last.completed


def test_a_killed_worker_is_noticed_though_its_forked_child_lives(launch: Launcher) -> None:
    run = launch(
        """
        link = joined()
        trained(link)
        if job.worker == "w1":
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
    assert run.wait() == 137
    gone(child)


def test_a_stopped_worker_is_noticed(launch: Launcher) -> None:
    run = launch(
        """
        link = joined(dead_after="0.5")
        trained(link)
        if job.worker == "w1":
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_the_end(link)
        """
    )
    assert run.wait() == 1
    assert "pliant: w1 was lost (no sign of life for 0.5 s): " in run.output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_forwarded(launch: Launcher, number: int, status: int) -> None:
    run = launch(
        """
        def leave(*_):
            print("saving")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        link = joined()
        link.era(30)
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
        link.era(30)
        forever = subprocess.Popen(["sleep", "1000"])
        print("child", forever.pid)
        forever.returncode = 0  # no warning about a child left running: that is the point
        link.finish()
        """
    )
    assert run.wait() == 0, run.output
    for line in run.lines:
        if "child" in line:
            gone(int(line.split()[-1]))


def test_no_worker_outlives_a_killed_launcher(launch: Launcher) -> None:
    run = launch("print('pid', os.getpid()); signal.pause()")
    run.until("pid", times=2)
    pids = [int(line.split()[-1]) for line in run.lines if "pid" in line]
    run.process.kill()
    for pid in pids:
        gone(pid)


def test_status_and_metrics_need_the_token(launch: Launcher) -> None:
    run = launch("link = joined(); link.era(30); print('training'); signal.pause()")
    run.until("training", times=2)
    address = (run.directory / "job" / "address").read_text().strip()
    token = (run.directory / "job" / "token").read_text().strip()
    for path in ("/status", "/metrics"):
        assert ask(address, path, {})[0] == 403
        assert ask(address, path, {"Authorization": "Bearer wrong"})[0] == 403
    status, answer = ask(address, "/status", {"Authorization": f"Bearer {token}"})
    assert status == 200
    assert [worker["state"] for worker in json.loads(answer)["workers"]] == ["training", "training"]
    status, answer = ask(address, "/metrics", {"Authorization": f"Bearer {token}"})
    assert status == 200 and b"pliant_workers 2.0" in answer and b"pliant_samples_total 0.0" in answer
    shown = launch.command("status", "--dir", "job")
    assert shown.wait() == 0 and "w1" in shown.output, shown.output
    command_lines = [path.read_bytes() for path in readable_command_lines()]
    assert not any(token.encode() in line for line in command_lines)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def readable_command_lines() -> list[Path]:
    found: list[Path] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            entry.read_bytes()
        except OSError:
            continue
        found.append(entry)
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
            Link.connect(job.address, job.token, job.worker, version("pliant"))
        except PliantError as error:
            print(f"{type(error).__name__}: {error}")
        link.era(30)
        link.finish()
        """,
        workers=1,
    )
    assert run.wait() == 0, run.output
    assert "Refused: there is already a worker named w0" in run.output


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
    run = launch("link = joined(); link.era(30); link._connection.send(b'nonsense'); wait_for_the_end(link)")
    assert run.wait() != 0
    assert "was lost" in run.output


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


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, pliant.ui.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
