"""torchft over gloo: its DistributedDataParallel, each worker a replica group of its own.

Question  What does fault tolerance by quorum cost and gain among unequal workers?
Holds     Equal shares, as its data parallel has them; the lighthouse runs in a process beside the
          workers and writes its address into the set's directory.
"""

import importlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.waiting import wait_for
from benchmarks.worker import Worker, equal_share

TIMEOUT = timedelta(seconds=60)
ADDRESS = "lighthouse"
HERE = "127.0.0.1"


def serve_lighthouse(directory: Path, workers: int, host: str = HERE) -> None:
    """Run the lighthouse until this process is ended."""
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(bind=f"{host}:0", min_replicas=workers, join_timeout_ms=30_000)
    # The server names the machine in its address; the workers reach it on the one it is bound to.
    port = server.address().rsplit(":", 1)[1]
    partial = directory / f"{ADDRESS}.partial"
    partial.write_text(f"http://{host}:{port}")
    partial.rename(directory / ADDRESS)
    wait_for(lambda: False, timeout_s=float("inf"))


def library() -> Any:
    """By name: torchft is installed for the benchmarks only, and the type check does without it."""
    return importlib.import_module("torchft")


def own_store(host: str = HERE) -> dist.TCPStore:
    """Each replica group has one, and it must live as long as the group."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def control(directory: Path, model: nn.Module, index: int, workers: int, store: dist.TCPStore) -> Any:
    """This worker's part of torchft, reached by the others where its store is."""
    torchft, address = library(), directory / ADDRESS
    wait_for(address.exists, timeout_s=30.0)
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=workers,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=store.host,
        store_port=store.port,
        lighthouse_addr=address.read_text(),
        replica_id=f"worker_{index}",
        hostname=store.host,
        init_sync=False,
    )


def train(worker: Worker) -> None:
    torchft, store = library(), own_store()
    manager = control(worker.directory, worker.model, worker.index, worker.plan.workers, store)
    model = torchft.DistributedDataParallel(manager, worker.model)
    optimizer = torchft.Optimizer(manager, worker.optimizer)
    for x, y in worker.batches(lambda: equal_share(worker.plan)):
        optimizer.zero_grad()
        worker.loss(model, x, y).backward()
        committed = manager.current_step()
        optimizer.step()
        updated = manager.current_step() > committed
        worker.finished(len(x) if updated else 0, updated=updated)
