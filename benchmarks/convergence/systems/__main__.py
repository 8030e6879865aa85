"""A worker process: ``SYSTEM DIRECTORY [INDEX]``, or the service beside the workers (INDEX ``service``)."""

import importlib
import sys
from pathlib import Path

import torch

from benchmarks.convergence.systems.names import SYSTEMS
from benchmarks.convergence.trainee import Trainee


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    index = sys.argv[3] if len(sys.argv) > 3 else "0"
    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.convergence.systems.{SYSTEMS[name].module}")
    if index == "service":
        module.serve(directory)
    else:
        module.train(Trainee(directory, int(index)), name)


if __name__ == "__main__":
    main()
