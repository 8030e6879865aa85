"""A worker process: ``SYSTEM DIRECTORY [INDEX]``, or the service beside the workers (INDEX ``service``)."""

import importlib
import sys
from pathlib import Path

import msgspec
import torch

from benchmarks.clusters import Plan
from benchmarks.worker import Worker


def main() -> None:
    system, directory = sys.argv[1], Path(sys.argv[2])
    index = sys.argv[3] if len(sys.argv) > 3 else "0"
    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.systems.{system}")
    if index == "service":
        plan = msgspec.json.decode((directory / "plan.json").read_bytes(), type=Plan)
        module.serve_lighthouse(directory, plan.workers)
    else:
        module.train(Worker(directory, int(index)))


if __name__ == "__main__":
    main()
