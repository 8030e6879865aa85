"""torchft over gloo: its DistributedDataParallel, each worker a replica group of its own.

Question  What does fault tolerance by quorum cost and gain among unequal workers?
Holds     Equal shares, as its data parallel has them; the lighthouse runs in a process beside the
          workers and writes its address into the set's directory.
"""

import importlib
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.waiting import wait_for
from benchmarks.worker import Worker, equal_share

TIMEOUT = timedelta(seconds=60)
ADDRESS = "lighthouse"


def serve_lighthouse(directory: Path, workers: int) -> None:
    """Run the lighthouse until this process is ended."""
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=workers, join_timeout_ms=30_000)
    # The server names the host in its address; the workers reach it on loopback alone.
    port = server.address().rsplit(":", 1)[1]
    partial = directory / f"{ADDRESS}.partial"
    partial.write_text(f"http://127.0.0.1:{port}")
    partial.rename(directory / ADDRESS)
    wait_for(lambda: False, timeout_s=float("inf"))


def train(worker: Worker) -> None:
    # By name: torchft is installed for the benchmarks only, and the type check does without it.
    torchft = importlib.import_module("torchft")
    address = worker.directory / ADDRESS
    wait_for(address.exists, timeout_s=30.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    control = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=worker.model.load_state_dict,
        state_dict=worker.model.state_dict,
        min_replica_size=worker.plan.workers,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address.read_text(),
        replica_id=f"worker_{worker.index}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    model = torchft.DistributedDataParallel(control, worker.model)
    optimizer = torchft.Optimizer(control, worker.optimizer)
    for x, y in worker.batches(lambda: equal_share(worker.plan)):
        optimizer.zero_grad()
        worker.loss(model, x, y).backward()
        committed = control.current_step()
        optimizer.step()
        updated = control.current_step() > committed
        worker.finished(len(x) if updated else 0, updated=updated)
