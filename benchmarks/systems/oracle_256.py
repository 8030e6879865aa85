"""The oracle with a batch of 256: fewer, larger rounds, as one would choose where summing is dear."""

from benchmarks.systems import oracle
from benchmarks.worker import Worker

BATCH = 256


def train(worker: Worker) -> None:
    oracle.train(worker, BATCH)
