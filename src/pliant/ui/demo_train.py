"""The demo's training script, an ordinary script for Pliant.

Question  How fast does Pliant train with unequal workers, and how does it recover from the death of one?
Holds     Each worker writes the seconds its loops over ``batches`` took; all other figures are in the journal. After
          the measured epochs one worker kills itself; the leader writes the time of each update.
"""

from __future__ import annotations

import json
import os
import signal
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
    updates: list[tuple[float, int]] = []
    with pliant.join(model, optimizer, batch=wanted.batch, state={"complete": 0}) as run:
        for epoch in run.epochs(wanted.epochs + wanted.more):
            start_s = time.perf_counter()
            for images, labels in run.batches(train_set, size=wanted.size):
                run.backward(F.cross_entropy(model(images), labels))
                if run.step():
                    updates.append((time.monotonic(), run.era))
                if epoch == wanted.epochs and run.worker == wanted.victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            trained_s += time.perf_counter() - start_s
            accuracy = run.evaluate(lambda batch: correct(model, batch), test_set, size=wanted.size)
            # Equal on all workers at an epoch's end. A newcomer that skips past epochs is not in the group yet.
            if epoch > wanted.epochs and len(run.roster) == wanted.workers:
                # One whole epoch more, with updates after the return; a newcomer is given this number.
                run.state["complete"] += 1
                if run.state["complete"] == 2:
                    break
            if epoch == wanted.epochs - 1:
                figures = {"trained_s": trained_s, "accuracy": accuracy}
                (results / f"{run.worker}.json").write_text(json.dumps(figures))
        if run.is_leader:
            (results / "updates.json").write_text(json.dumps(updates))


if __name__ == "__main__":
    main()
