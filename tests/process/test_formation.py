"""A newcomer whose data ports cannot be reached: the others go on, it is named, and it comes in when they can.

Two machines are two network namespaces. The wall between them lets through what belongs to the coordinator's port only.
Needs root and ``ip``; elsewhere it is passed over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from running import QUICK, Launcher, Running, records

from pliant.core.journal import records as journal

pytestmark = pytest.mark.slow

HERE, THERE = f"pliant-h{os.getpid()}", f"pliant-t{os.getpid()}"
ADDRESSES = {HERE: "10.78.0.1", THERE: "10.78.0.2"}

TRAINING = """
import time
from pathlib import Path

import torch
import pliant

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(100_000, 4), torch.randn(100_000, 1))
with pliant.join(model, optimizer, batch=12, dead_after=3.0, delay=0) as run:
    for epoch in run.epochs(1):
        for x, y in run.batches(data, size=4):
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            if run.step() and run.round == 1:
                print("trains", flush=True)
            time.sleep(0.01)
            if run.is_leader and Path("enough").exists():
                break
"""


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def two_machines() -> Iterator[None]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and ip")
    cable = {HERE: f"fh{os.getpid()}", THERE: f"ft{os.getpid()}"}
    try:
        done = ip("netns", "add", HERE) and ip("netns", "add", THERE)
        done = done and ip("link", "add", cable[HERE], "type", "veth", "peer", "name", cable[THERE])
        for name in (HERE, THERE):
            done = done and ip("-n", name, "link", "set", "lo", "up")
            done = done and ip("link", "set", cable[name], "netns", name)
            done = done and ip("-n", name, "address", "add", f"{ADDRESSES[name]}/24", "dev", cable[name])
            done = done and ip("-n", name, "link", "set", cable[name], "up")
        if not done:
            pytest.skip("network namespaces cannot be made here")
        yield
    finally:
        for name in (HERE, THERE):
            ip("netns", "delete", name)


def build_wall(port: str) -> None:
    """What leaves the newcomer's machine goes to the coordinator's port, or nowhere: it answers no other call."""
    rule = ("-n", THERE, "rule", "add", "to", ADDRESSES[HERE])
    if not ip(*rule, "ipproto", "tcp", "dport", port, "priority", "10", "lookup", "main"):
        pytest.skip("this ip knows no rules by port")
    assert ip(*rule, "priority", "20", "blackhole")


def tear_down_wall() -> None:
    assert ip("-n", THERE, "rule", "delete", "priority", "20")


def inside(launch: Launcher, name: str, *words: str) -> Running:
    main = "from pliant.ui.cli import main; main()"
    started = Running(["ip", "netns", "exec", name, sys.executable, "-c", main, *words], launch.directory, {})
    launch.runs.append(started)
    return started


def rounds(run: Running) -> int:
    return (run.directory / "job" / "journal.jsonl").read_bytes().count(b'"kind":"round"')


def test_the_others_go_on_and_it_comes_in_when_it_can_be_reached(launch: Launcher) -> None:
    with two_machines():
        (launch.directory / "train.py").write_text(QUICK + textwrap.dedent(TRAINING))
        host = ("--host", ADDRESSES[HERE], "--insecure")
        owner = inside(launch, HERE, "run", "-n", "2", *host, "--dir", "job", "train.py")
        owner.until("trains")
        address = (launch.directory / "job" / "address").read_text().strip()
        build_wall(address.rpartition(":")[2])
        before = rounds(owner)
        join = ("run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest", "train.py")
        guest = inside(launch, THERE, *join)
        told = owner.until("data port")
        assert "w2 on 10.78.0.2 cannot be reached on its data port by w0, w1: it is left out and tried again" in told
        assert "open all TCP ports between the hosts, or let it go with `pliant drain w2`" in told
        guest.until("cannot be reached on its data port by w0, w1")
        # Nobody has waited for it: a connection is tried for more than three seconds.
        assert rounds(owner) - before > 20
        assert [each.era for each in records(owner) if isinstance(each, journal.EraRecord)] == [1]
        status = inside(launch, HERE, "status", "--dir", "job")
        assert status.wait() == 0 and "unreachable" in status.output, status.output
        tear_down_wall()
        owner.until("w2 joined")
        (launch.directory / "enough").touch()
        assert owner.wait() == 0, owner.output
        assert guest.wait() == 0, guest.output
        audit = launch.command("audit", "job/journal.jsonl")
        assert audit.wait() == 0, audit.output
    written = records(owner)
    eras = [each for each in written if isinstance(each, journal.EraRecord)]
    assert [each.roster for each in eras] == [["w0", "w1"], ["w0", "w1", "w2"]]
    assert all(each.entries is None for each in eras), "an era was broken"
