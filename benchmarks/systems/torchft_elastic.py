"""torchft over gloo with members that come and go; each worker a replica group of its own.

Question  When does each replica commit a step, while others die and come?
Holds     Its own data parallel and its own way to hand the state on. ``tight``: the timeouts below instead of its
          defaults. Collectives of those that are no neighbours of a dead one end only by timeout, so that one decides.
"""

import importlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.clusters import MICRO_BATCH
from benchmarks.recovery import options as recovery_options
from benchmarks.recovery.stamps import Stamps, Step, View
from benchmarks.systems.torchft import ADDRESS
from benchmarks.waiting import wait_for
from benchmarks.worker import Worker

MIN_REPLICAS = 2
# Ten usual steps: shorter ones end steps that were only slow, as four workers on two cores now and then are.
TIGHT_S = 0.5
TIGHT_LIGHTHOUSE = {"join_timeout_ms": 100, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 300}
TIGHT_HEARTBEAT = timedelta(milliseconds=20)
SLOW = timedelta(seconds=10)  # quorum and connections: too short a limit here ends processes instead of steps


def serve_lighthouse(directory: Path, workers: int) -> None:
    """Run the lighthouse until this process is ended."""
    coordination = importlib.import_module("torchft.coordination")
    chosen: dict[str, int] = TIGHT_LIGHTHOUSE if recovery_options.read(directory).tight else {}
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=MIN_REPLICAS, **chosen)
    port = server.address().rsplit(":", 1)[1]
    partial = directory / f"{ADDRESS}.partial"
    partial.write_text(f"http://127.0.0.1:{port}")
    partial.rename(directory / ADDRESS)
    wait_for(lambda: False, timeout_s=float("inf"))


def train(worker: Worker) -> None:
    torchft = importlib.import_module("torchft")
    address = worker.directory / ADDRESS
    wait_for(address.exists, timeout_s=60.0)
    stamps = Stamps(worker.directory)
    stamps.ready()
    control = _control(torchft, worker, address.read_text())
    model = torchft.DistributedDataParallel(control, worker.model)
    optimizer = torchft.Optimizer(control, worker.optimizer)
    for x, y in worker.batches(lambda: MICRO_BATCH):
        begins, before = time.monotonic(), _view(control)
        optimizer.zero_grad()
        worker.loss(model, x, y).backward()
        computed = time.monotonic()
        optimizer.step()
        name = f"replica_{worker.index}"
        stamps.step(Step(name, False, begins, computed, time.monotonic(), before, _view(control), len(x)))


def _view(control: Any) -> View:
    # Which quorum a step was committed in is not public; the number of its members is, but does not only grow.
    return View(control._quorum_id, control.current_step())


def _control(torchft: Any, worker: Worker, lighthouse: str) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tight = recovery_options.read(worker.directory).tight
    limit = timedelta(seconds=TIGHT_S)
    chosen: dict[str, Any] = {}
    if tight:
        chosen = {
            "timeout": limit,
            "quorum_timeout": SLOW,
            "connect_timeout": SLOW,
            "heartbeat_interval": TIGHT_HEARTBEAT,
        }

    def state() -> dict[str, Any]:
        return {"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict()}

    def take(given: dict[str, Any]) -> None:
        worker.model.load_state_dict(given["model"])
        worker.optimizer.load_state_dict(given["optimizer"])

    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(**({"timeout": limit} if tight else {})),
        load_state_dict=take,
        state_dict=state,
        min_replica_size=MIN_REPLICAS,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{worker.index}",
        hostname="127.0.0.1",
        init_sync=False,
        **chosen,
    )
