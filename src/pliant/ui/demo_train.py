"""The demo's training script: any script for Pliant looks like this one.

Question  What does Pliant make of unequal workers?
Holds     Leaves, per worker, the seconds its loops over ``batches`` took; all other figures are in the journal.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch.nn.functional as F

import pliant
from pliant.ui.demo_model import correct, digits, network, options


def main() -> None:
    """Train as one worker of the group."""
    wanted = options().parse_args()
    results = Path(wanted.results)
    train_set, test_set = digits(results)
    model, optimizer = network()
    trained_s, accuracy = 0.0, 0.0
    with pliant.join(model, optimizer, batch=wanted.batch) as run:
        for _ in run.epochs(wanted.epochs):
            start_s = time.perf_counter()
            for images, labels in run.batches(train_set, size=wanted.size):
                run.backward(F.cross_entropy(model(images), labels))
                run.step()
            trained_s += time.perf_counter() - start_s
            accuracy = run.evaluate(lambda batch: correct(model, batch), test_set, size=wanted.size)
        figures = {"trained_s": trained_s, "accuracy": accuracy}
        (results / f"{run.worker}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
