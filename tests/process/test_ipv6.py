"""A run over IPv6: control channel, groups, the handing on of the state, TLS and people's commands."""

from __future__ import annotations

import socket

import pytest
from running import QUICK, Launcher, records

from pliant.core.journal.records import EndRecord, EraRecord

SCRIPT = (
    QUICK
    + """
import time, torch, pliant
from torch.utils.data import TensorDataset
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(400, 6))
with pliant.join(model, optimizer, batch=16) as run:
    print("listens at", run._membership.enrolment.link.local_address)
    full = 0
    for epoch in run.epochs(1_000_000):
        for (x,) in run.batches(dataset, size=4):
            run.backward(model(x).square().mean())
            run.step()
            time.sleep(0.002)
        # Equal on all workers, for those that were not there yet too; twice: an epoch with all three is between.
        full += run.evaluate(lambda batch: (len(run.roster) == 3, 1), dataset, size=400) == 1.0
        if full == 2:
            break
    print("trained with", len(run.roster))
"""
)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_a_run_over_ipv6_takes_in_a_joiner(launch: Launcher) -> None:
    assert launch.command("certs", "init", "certs", "--host", "::1").wait() == 0
    tls = ("--tls-cert", "certs/coordinator.pem", "--tls-key", "certs/coordinator.key", "--tls-ca", "certs/ca.pem")
    run = launch(SCRIPT, options=("--host", "::1", *tls))
    assert run.until("listens at").endswith(" ::1")
    address = (run.directory / "job" / "address").read_text().strip()
    assert address.startswith("[::1]:")
    shown = launch.command("status", "--dir", "job")
    assert shown.wait() == 0 and "w1" in shown.output, shown.output
    join = ("run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest")
    guest = launch.command(*join, "--tls-ca", "certs/ca.pem", "train.py")
    assert guest.until("listens at").endswith(" ::1")
    assert run.wait() == 0, run.output
    assert guest.wait() == 0, guest.output
    assert "trained with 3" in run.output and "trained with 3" in guest.output, run.output + guest.output
    written = records(run)
    assert any(isinstance(record, EraRecord) and len(record.roster) == 3 for record in written)
    assert isinstance(written[-1], EndRecord) and written[-1].completed
