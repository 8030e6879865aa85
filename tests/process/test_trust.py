"""Trust between real processes: TLS from the launcher to the last worker, one line for what is refused, no pickle."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from running import QUICK, Launcher, plain_environment, records
from test_launch import PRELUDE as PRELUDE_OF_MEMBERS

from pliant.errors import Refused
from pliant.launch import certificates, requests
from pliant.launch.run_directory import access

pytestmark = pytest.mark.slow

PRELUDE = (
    PRELUDE_OF_MEMBERS
    + """
from pathlib import Path
from pliant.control.tls import client_context

def connected():
    context = client_context(Path(job.authority)) if job.authority else None
    return Link.connect(job.address, job.token, job.worker, version("pliant"), context)
"""
)

MEMBER = """
link = joined()
trained(link)
print("trains", link.connection.socket.__class__.__name__)
wait_for_the_end(link)
"""


def test_a_run_under_tls(launch: Launcher) -> None:
    """Launcher, worker, joiner and people's commands all speak TLS; who does not is told in one line."""
    made = launch.command("certs", "init", "certs", "--host", "trainer.example")
    assert made.wait() == 0 and "for trainer.example, localhost, 127.0.0.1" in made.output, made.output
    tls = ("--tls-cert", "certs/coordinator.pem", "--tls-key", "certs/coordinator.key", "--tls-ca", "certs/ca.pem")
    run = launch(MEMBER, workers=1, options=tls)
    assert run.until("trains").endswith("trains SecureSocket")
    address = (run.directory / "job" / "address").read_text().strip()
    shown = launch.command("status", "--dir", "job")
    assert shown.wait() == 0 and "w0" in shown.output, shown.output
    certificates.made(launch.directory / "other", [], 1)
    there = access(run.directory / "job")
    # Not as commands of their own: a member of this script waits for a minute, not for ever.
    for wrong, said in (
        (replace(there, authority=None), f"the coordinator at {address} speaks TLS only; "),
        (replace(there, authority=launch.directory / "other" / "ca.pem"), "is not of the authority in --tls-ca; "),
        (replace(there, token="wrong"), "refused the token"),
    ):
        with pytest.raises(Refused, match=said):
            requests.get(wrong, "/events")
    log = (run.directory / "job" / "logs" / "coordinator.log").read_text()
    assert "refused GET /events from 127.0.0.1: it does not know the job token" in log
    join = ("run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest")
    guest = launch.command(*join, "--tls-ca", "certs/ca.pem", "train.py")
    assert guest.until("trains").endswith("trains SecureSocket")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert guest.wait() == 143, guest.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--host", "HERE"),
            "--host HERE can be reached from other machines: give --tls-cert, --tls-key ",
        ),
        (("--tls-cert", "certs/coordinator.pem"), "--tls-cert, --tls-key and --tls-ca go together; "),
        (
            ("--join", "127.0.0.1:1", "--tls-key", "certs/coordinator.key"),
            "--tls-cert and --tls-key are the ",
        ),
    ],
)
def test_what_is_not_started(launch: Launcher, options: tuple[str, ...], said: str) -> None:
    here = _own_address()
    options = tuple(option.replace("HERE", here) for option in options)
    (launch.directory / "train.py").write_text("")
    run = launch.command("run", *options, "train.py")
    assert run.wait() == 1, run.output
    assert len(run.lines) == 1 and run.lines[0].startswith(f"pliant: {said.replace('HERE', here)}"), run.output
    assert not (launch.directory / "runs").exists()


def test_insecure_is_a_word(launch: Launcher) -> None:
    run = launch(MEMBER, workers=1, options=("--host", _own_address(), "--insecure"))
    assert run.until("trains").endswith("trains socket")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output


def _own_address() -> str:
    """One of this machine that is not loopback."""
    if not shutil.which("hostname"):
        pytest.skip("no hostname command to ask for an address beyond loopback")
    listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    for found in listed:
        try:
            with socket.create_server((found, 0)):
                return found
        except OSError:
            continue
    pytest.skip("this machine has no IPv4 address beyond loopback")


AUDIT = r'''
"""Loaded by every Python process of the run: notes every use of pickle under a frame of Pliant's."""
import os, pickle, sys

def note(what):
    frame, files = sys._getframe(2), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    if any("/pliant/" in name for name in files):
        with open(os.environ["AUDIT_FILE"], "a") as file:
            file.write(f"{what}: {files[:6]}\n")

def watched(name):
    whole = getattr(pickle, name)
    def call(*arguments, **named):
        note(name)
        return whole(*arguments, **named)
    setattr(pickle, name, call)

for name in ("load", "loads", "dump", "dumps"):
    watched(name)
sys.addaudithook(lambda event, arguments: note(event) if event == "pickle.find_class" else None)
with open(os.environ["AUDIT_FILE"] + ".processes", "a") as file:
    file.write(f"{os.getpid()}\n")
'''

TRAINING = """
import sys
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import pliant

data = TensorDataset(torch.randn(4000, 6), torch.randint(0, 3, (4000,)))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with pliant.join(model, optimizer, batch=16, state={"best": 0.0}) as run:
    said, together = False, 0
    for epoch in run.epochs(200):
        for x, y in run.batches(data, size=4):
            run.backward(F.cross_entropy(model(x), y))
            run.step()
            if not said:
                said = True
                print("trains", flush=True)
            together += len(run.roster) == 3
            if together >= 8:
                break
        run.evaluate(lambda batch: ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])), data, size=500)
        # The same answer for everybody, newcomers included: who passes over an epoch has its own idea of the roster.
        if run.evaluate(lambda batch: (float(together >= 8), 1), [0], size=1):
            break
"""


def test_no_pickle_on_any_path(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher, coordinator, workers, a newcomer that takes the state over, evaluate, commands: nobody unpickles."""
    spied = launch.directory / "spied"
    spied.mkdir()
    (spied / "sitecustomize.py").write_text(AUDIT)
    found = launch.directory / "found"
    monkeypatch.setenv("AUDIT_FILE", str(found))
    monkeypatch.setenv("PYTHONPATH", str(spied))
    # That it would be noticed.
    deed = r"import pickle; pickle.loads(pickle.dumps({1: 2})); pickle.loads(b'cos\nsystem\n.')"
    script = f"exec(compile({deed!r}, '/anywhere/pliant/fake.py', 'exec'))"
    subprocess.run([sys.executable, "-c", script], check=True, env=plain_environment())
    noticed = found.read_text()
    assert "dumps: " in noticed and "loads: " in noticed and "pickle.find_class: " in noticed
    found.unlink()
    (launch.directory / "train.py").write_text(QUICK + textwrap.dedent(TRAINING))
    run = launch.command("run", "-n", "2", "--dir", "job", "train.py")
    run.until("trains", times=2)
    scaled = launch.command("scale", "3", "--dir", "job")
    assert scaled.wait() == 0, scaled.output
    assert run.wait() == 0, run.output
    assert any("w2" in getattr(record, "roster", []) for record in records(run))
    processes = Path(f"{found}.processes").read_text().split()
    assert len(processes) >= 7, "two commands, the coordinator, three workers, and the one that proved the hook"
    assert not found.exists(), found.read_text()
    assert access(run.directory / "job").authority is None
