"""Mistakes, seen from the terminal: one line says what is wrong and what to do, and no process is left."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from running import QUICK, Launcher, Running, gone, records

from pliant.core.journal.records import EndRecord, RoundRecord

pytestmark = pytest.mark.slow

PRELUDE = (
    QUICK
    + """
import os, signal, sys, time, warnings
warnings.simplefilter("error")
import torch
from torch import nn
from torch.utils.data import TensorDataset
import pliant

me = os.environ.get("PLIANT_WORKER", "alone")
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def dataset(samples=400):
    return TensorDataset(torch.randn(samples, 6))

def loop(run, samples=400, factor=1.0, before=int):
    for (x,) in run.batches(dataset(samples), size=4):
        before()
        run.backward(model(x).square().mean() * factor)
        run.step()

def forever(run, samples=400):
    print("pid", os.getpid())
    trains = False
    for epoch in run.epochs(1_000_000):
        for (x,) in run.batches(dataset(samples), size=4, num_workers=LOADERS):
            run.backward(model(x).square().mean())
            if run.step() and run.round >= 5 and not trains:
                print(run.worker, "trains")
                trains = True
            time.sleep(0.01)

LOADERS = 0
"""
)


def ends_in_one_line(run: Running, said: str, status: int = 1) -> None:
    """The run ended with ``status``; Pliant said why, once, and nobody printed a traceback."""
    assert run.wait() == status, run.output
    assert "Traceback" not in run.output, run.output
    lines = [line for line in run.lines if said in line]
    assert len(lines) == 1 and lines[0].startswith("pliant: "), run.output
    last = records(run)[-1]
    assert isinstance(last, EndRecord) and not last.completed and said in last.reason


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "model = nn.Linear(6, 4 if me == 'w1' else 3)",
            "models differ: 'weight' is (3, 6) on w0 but (4, 6) on w1; give every worker the same model",
        ),
        (
            "batch = 32 if me == 'w1' else 16",
            "settings differ: batch is 16 on w0 but 32 on w1; call pliant.join with the same arguments on every worker",
        ),
        (
            "model = nn.Linear(6, 3, device='meta')",
            "failed: the model is on 'meta', where the gradients of several workers cannot be summed: move it to the",
        ),
        (
            "torch.__version__ = '2.6.1' if me == 'w1' else '2.7.0+cpu'",
            "versions of torch differ: 2.7 on w0 but 2.6 on w1; install the same one for all workers",
        ),
        ("batch = 2.5", "failed: batch is 2.5: give a positive whole number of samples, e.g. batch=256"),
    ],
)
def test_what_join_refuses(launch: Launcher, script: str, said: str) -> None:
    run = launch(
        f"""
        batch = 16
        {script}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pliant.join(model, optimizer, batch=batch) as run:
            loop(run)
        """
    )
    ends_in_one_line(run, said)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "loop(run, 401 if me == 'w1' else 400)",
            "dataset lengths differ: 400 samples on w0 but 401 on w1; give batches the same dataset on every worker",
        ),
        (
            "loop(run, before=optimizer.zero_grad if me == 'w1' else int)",
            "w1 failed: the gradients were cleared or replaced by the script: remove optimizer.zero_grad()",
        ),
        (
            "loop(run, factor=float('nan'))",
            "20 rounds in a row had an infinite or undefined loss or gradient: lower the learning rate",
        ),
    ],
)
def test_what_the_loop_refuses(launch: Launcher, script: str, said: str) -> None:
    run = launch(f"with pliant.join(model, optimizer, batch=16) as run:\n    {script}\n", workers=2)
    ends_in_one_line(run, said)


def test_a_second_join_in_a_job_is_refused_instead_of_passed_over(launch: Launcher) -> None:
    run = launch(
        """
        for _ in range(2):
            with pliant.join(model, optimizer, batch=16) as run:
                loop(run)
        """
    )
    assert run.wait() == 1, run.output
    assert "UsageError: join was called a second time in this worker: a job is one run; train" in run.output
    assert "failed after the training had ended (exit status 1)" in run.output


def test_losses_that_are_not_finite_are_counted_and_shown(launch: Launcher) -> None:
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16, delay=0) as run:
            for (x,) in run.batches(dataset(), size=4):
                run.backward(model(x).square().mean() * (float("inf") if me == "w1" and run.round in (3, 7) else 1.0))
                run.step()
            assert all(p.isfinite().all() for p in model.parameters())
        """
    )
    assert run.wait() == 0, run.output
    assert "400 samples in 25 rounds" in run.output and " · 2 skipped · " in run.output, run.output
    skipped = [record.round for record in records(run) if isinstance(record, RoundRecord) and not record.applied]
    assert skipped == [4, 8]
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output


def test_an_exception_on_one_worker(launch: Launcher) -> None:
    """The others go on, and it is started again."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16) as run:
            for epoch in run.epochs(1_000_000):
                for (x,) in run.batches(dataset(), size=4):
                    run.backward(model(x).square().mean())
                    if run.step() and run.round >= 3 and run.worker == "w2":
                        raise KeyError("mine")
                    time.sleep(0.01)
                back = run.evaluate(lambda batch: (float("w2.2" in run.roster), 1), dataset(1), size=1)
                if back:
                    break
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert run.output.count("Traceback") == 1
    assert "[w2] KeyError: 'mine'" in run.lines
    assert "pliant: w2 failed (KeyError: 'mine'): w0, w1 go on" in run.lines
    assert "pliant: w2.2 joined" in run.lines
    assert "site-packages/pliant" not in run.output and "src/pliant" not in run.output
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output


def test_an_exception_on_all_workers(launch: Launcher) -> None:
    """Twice in a row on every slot: starting them again does not help."""
    run = launch("with pliant.join(model, optimizer, batch=16) as run:\n    raise KeyError('mine')\n")
    assert run.wait() == 1, run.output
    assert run.output.count("Traceback") == 1
    assert sum("] KeyError: 'mine'" in line for line in run.lines) == 1
    assert sum("failed twice in a row, and so did all others: KeyError: 'mine'" in line for line in run.lines) == 1


def test_the_scripts_own_exit_status_is_the_runs(launch: Launcher) -> None:
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16) as run:
            loop(run, before=lambda: run.round >= 5 and sys.exit(7))
        """
    )
    assert run.wait() == 7, run.output
    assert "SystemExit: 7" in run.output and "Traceback" not in run.output, run.output


def test_an_exception_on_all_workers_after_training(launch: Launcher) -> None:
    """With the last one that fails the state is gone: there is nothing to go on with."""
    run = launch("with pliant.join(model, optimizer, batch=16) as run:\n    loop(run); raise KeyError('mine')\n")
    assert run.wait() == 1, run.output
    assert run.output.count("Traceback") == 1
    (last,) = [line for line in run.lines if "nobody is left who holds the model's state" in line]
    assert last.startswith("pliant: w") and "failed (KeyError: 'mine')" in last, run.output


def test_a_failed_script_that_is_slow_to_go_gives_its_status(launch: Launcher) -> None:
    """It is ended by our own signal in the end; that one's status is not the script's."""
    run = launch(
        """
        import atexit, threading

        def linger():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            threading.Event().wait()

        with pliant.join(model, optimizer, batch=16) as run:
            if me == "w1":
                atexit.register(linger)
            loop(run, before=optimizer.zero_grad if me == "w1" else int)
        """
    )
    assert run.wait() == 1, run.output
    assert "w1 failed: the gradients were cleared or replaced" in run.output


def test_all_workers_are_lost(launch: Launcher) -> None:
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16) as run:
            loop(run, 4000, before=lambda: run.round < 5 or os.kill(os.getpid(), signal.SIGKILL))
        """
    )
    assert run.wait() == 137, run.output
    assert "Traceback" not in run.output
    (last,) = [line for line in run.lines if "nobody is left who holds the model's state, so the run ends" in line]
    assert last.startswith("pliant: w") and " was lost (" in last, run.output


def test_ctrl_c_after_a_worker_was_killed(launch: Launcher) -> None:
    """Its loader processes would hide its death, did they keep its sockets."""
    run = launch("LOADERS = 2\nwith pliant.join(model, optimizer, batch=16) as run: forever(run)\n")
    run.until("trains", times=2)
    os.kill(next(int(line.split()[-1]) for line in run.lines if line.startswith("[w1] pid")), signal.SIGKILL)
    lost = run.until("pliant: w1 was lost (")
    assert lost.endswith("): w0 goes on"), lost
    run.until("w1.2 trains")
    ends_by(run, signal.SIGINT, 130)


def ends_by(run: Running, number: int, status: int) -> None:
    run.process.send_signal(number)
    assert run.wait() == status, run.output
    assert "Traceback" not in run.output
    for line in run.lines:
        if "] pid" in line:
            gone(int(line.split()[-1]))


JOINERS = {
    "model": "models differ: 'weight' is (3, 6) on the run but (4, 6) on ",
    "length": "dataset lengths differ: 400 samples on the run but 401 on ",
    "settings": "settings differ: batch is 16 on the run but 32 on ",
    "usage": "batch is 0: give a positive whole number of samples",
}


def test_who_does_not_fit_is_turned_away_and_the_run_goes_on(launch: Launcher) -> None:
    """Joiners with another model, dataset or settings, or with the wrong token; a second job on the same port."""
    run = launch(
        """
        wrong = sys.argv[1] if len(sys.argv) > 1 else ""
        model = nn.Linear(6, 4 if wrong == "model" else 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pliant.join(model, optimizer, batch={"settings": 32, "usage": 0}.get(wrong, 16)) as run:
            forever(run, 401 if wrong == "length" else 400)
        """,
        workers=1,
    )
    run.until("w0 trains")
    address = (run.directory / "job" / "address").read_text().strip()
    second = launch.command("run", "--port", address.rpartition(":")[2], "--dir", "second", "train.py")
    assert second.wait() == 1 and len(second.lines) == 1 and " is in use; " in second.output, second.output
    join = ("run", "--join", address, "-n", "1")
    guests = {
        wrong: launch.command(*join, "--token-file", "job/token", "--dir", wrong, "train.py", wrong)
        for wrong in JOINERS
    }
    for wrong, said in JOINERS.items():
        guest = guests[wrong]
        assert guest.wait() == 1, guest.output
        assert "Traceback" not in guest.output
        assert any(line.startswith("pliant: ") and said in line for line in guest.lines), guest.output
    # They come in any order.
    for said in JOINERS.values():
        line = next((line for line in run.lines if said in line), None) or run.until(said)
        assert line.startswith("pliant: ") and "the run goes on" in line, line
    a_stranger_is_refused(launch, run)
    before = len([record for record in records(run) if isinstance(record, RoundRecord)])
    fits = launch.command(*join, "--token-file", "job/token", "--dir", "fits", "train.py")
    fits.until("trains")
    assert before < len([record for record in records(run) if isinstance(record, RoundRecord)])
    ends_by(run, signal.SIGTERM, 143)
    assert fits.wait() == 143, fits.output
    assert "w0 was lost" not in run.output


def a_stranger_is_refused(launch: Launcher, run: Running) -> None:
    """A worker started by hand with a wrong token: one line, and the run does not notice."""
    address = (run.directory / "job" / "address").read_text().strip()
    named = {"PLIANT_ADDRESS": address, "PLIANT_WORKER": "w0", "PLIANT_TOKEN": "wrong"}
    stranger = launch.python("train.py", **named)
    assert stranger.wait() == 1
    assert stranger.lines == [
        f"pliant: the coordinator at {address} refused the job token; use the one in the file `token` of its run "
        "directory, or let `pliant run` start the workers"
    ]
    assert run.process.poll() is None


def test_before_any_worker_starts(launch: Launcher) -> None:
    missing = launch.command("run", "-n", "2", "missing.py")
    assert missing.wait() == 2
    assert missing.lines == ["pliant: no script at missing.py; give the path of the training script"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = launch("", options=("--port", port))
        assert run.wait() == 1
    assert run.lines == [f"pliant: port {port} is in use; give another --port, or none to take a free one"]


def test_a_script_that_never_joins(launch: Launcher) -> None:
    launch.prelude = ""
    ends_in_one_line(launch("print('nothing to do')"), "train.py never called pliant.join: ")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("run = pliant.join(model, optimizer, batch=0)", "batch is 0: give a positive whole number of samples"),
        (
            "with pliant.join(model, optimizer, batch=16) as run:\n    loop(run); optimizer.step()",
            "optimizer.step() was called by the script: remove it from the loop",
        ),
    ],
)
def test_without_a_launcher(launch: Launcher, script: str, said: str) -> None:
    (launch.directory / "train.py").write_text(PRELUDE + script)
    run = launch.python("train.py")
    assert run.wait() == 1
    assert run.lines[-1].startswith(f"pliant.errors.UsageError: {said}"), run.output
    assert sum("/pliant/" in line for line in run.lines) <= 2, run.output


def test_a_group_left_in_the_middle_of_a_sum_keeps_no_process(launch: Launcher) -> None:
    """gloo's destructor waits for a sum that nobody completes any more."""
    script = """
import threading
from pliant.tensors.process_group.gloo import Gloo

class Channel:
    def __init__(self):
        self.values, self.changed = {}, threading.Condition()
    def put(self, attempt, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()
    def get(self, attempt, key, timeout_s):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values[key]

def form(place):
    members[place] = Gloo(channel, attempt=1, place=place, members=2, address="127.0.0.1")

channel, members = Channel(), {}
threads = [threading.Thread(target=form, args=(place,)) for place in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
members[0].exchange(b"ticket", [torch.ones(1000)])
members[0].leave()
del members[0]
print("left")
"""
    (launch.directory / "train.py").write_text(PRELUDE + script)
    run = launch.python("-u", "train.py")
    assert run.wait() == 0, run.output
    assert run.lines == ["left"]
