"""A training script with all that makes a run hard to compute again; ``pliant replay`` runs it, too.

``python replayed.py scene.json``. Its faults are a real worker's only, each once: "who" from "round" on does "what".
It trains for some epochs, and on until all files in "until" are there; what it found is written down for the replay.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("error")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import pliant  # noqa: E402

SCENE: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
SLOT = os.environ.get("PLIANT_WORKER", "")
"""empty in a replay: nobody dies there, and nobody waits"""


class Samples(Dataset[tuple[Tensor, int]]):
    """Augmented by all three generators, in loader processes or here."""

    def __init__(self, count: int, *, augmented: bool) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        self.y = (self.x[:, :2].sum(1) > 0).long() + (self.x[:, 2] > 0.5).long()
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        if self.augmented:
            x = x * random.uniform(0.9, 1.1) + 0.1 * torch.randn(6) + 0.05 * float(np.random.randn())
        return x, int(self.y[index])


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    match SCENE.get("optimizer", "sgd"):
        case "adamw":
            return torch.optim.AdamW(parameters, lr=3e-3)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=1e-3)
        case _:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def measure(batch: Any) -> dict[str, tuple[Tensor, int]]:
    x, y = batch
    logits = model(x)
    hits = (logits.argmax(1) == y).sum()
    return {"hits": (hits, len(y)), "loss": (F.cross_entropy(logits, y, reduction="sum"), len(y))}


def outputs(batch: Any) -> Tensor:
    return model(batch[0])


def enough(batch: Any) -> tuple[float, int]:
    found = Path(f"enough-{run.round}")
    if SLOT:
        found.write_text(str(float(all(Path(name).exists() for name in SCENE.get("until", [])))))
    return float(found.read_text()), 1


def reach() -> None:
    """Meet one's fate."""
    for number, (who, at, what) in enumerate(SCENE.get("faults", [])):
        if who == SLOT and run.round >= at:
            try:
                Path(f"fault-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if what == "leave":
                run.leave()
            else:
                os.kill(os.getpid(), signal.SIGKILL)


torch.set_default_dtype(getattr(torch, SCENE.get("dtype", "float64")))
torch.manual_seed(11)
# A bias before a BatchNorm has no gradient but rounding, which Adam would make steps of.
# Synchronous rounds sum a model of this width in two parts.
wide = 1024 if SCENE.get("delay") == 0 else 16
model = nn.Sequential(
    nn.Linear(6, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(), nn.Dropout(0.2), nn.Linear(wide, 3)
)
optimizer = optimizer_of(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled="scaler" in SCENE)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
batch = pliant.Floating(24, at_most=96) if SCENE.get("floating") else 24
train_set, test_set = Samples(150, augmented=True), Samples(40, augmented=False)
with pliant.join(
    model,
    optimizer,
    batch=batch,
    delay=SCENE.get("delay", 1),
    clip_norm=1.0,
    scheduler=scheduler,
    scaler=scaler,
    state={"updates": 0},
    dead_after=2.0,
    hung_after=6.0,
    checkpoint=SCENE.get("checkpoint"),
    checkpoint_every=0.2,
) as run:
    for epoch in run.epochs(1_000_000):
        loaders = {"num_workers": 2, "prefetch_factor": 2} if SCENE.get("loaders") else {}
        for x, y in run.batches(train_set, size=4, **loaders):
            if SLOT:
                Path(f"drew-{run.worker}").touch()
                reach()
                time.sleep(SCENE.get("sleep_s", 0.005))
            model.train(len(x) > 1)
            loss = F.cross_entropy(model(x), y)
            if SCENE.get("nonfinite") and epoch == 1 and run.progress < 1.1:
                loss = loss * float("inf")
            run.backward(loss)
            if run.step():
                run.state["updates"] += 1
                if SCENE.get("evaluates") and run.state["updates"] % 4 == 0 and run.samples % len(train_set):
                    run.evaluate(measure, test_set, size=8)
                    run.evaluate(measure, test_set, size=8)
                    logits = run.evaluate(outputs, test_set, size=8, gather=True, everywhere=True)
                    # A replay has them, too: it computes what all workers computed.
                    assert len(logits) == len(test_set) if not SLOT else logits is None or len(logits) == len(test_set)
                if SCENE.get("breaks") and epoch == 1 and run.progress > 1.4:
                    break
        model.train()
        run.evaluate(measure, test_set, size=8)
        if epoch + 1 >= SCENE.get("epochs", 4) and run.evaluate(enough, [0], size=1):
            break
    print("scale", scaler.get_scale(), scaler.state_dict().get("_growth_tracker"), flush=True)
