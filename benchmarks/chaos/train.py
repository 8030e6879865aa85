"""``train.py DIGITS SEED [CHECKPOINTS]``: the script that chaos is let loose on.

Question  When was each update applied, and do all workers end with the same weights?
Holds     Only the public interface is used. Double precision, dropout and noisy inputs: a replay has to draw the same
          numbers. The run ends after the epoch that the file ``last-epoch`` names, which is written some epochs ahead:
          the same on all workers, and in a replay. Files are written to the working directory: ``stamps-PID`` (when the
          process saw how many samples), ``final-PID.json``, ``weights.safetensors``.
          ``CHAOS_DEVICE_MS`` emulates slow, unequal devices: what there is to compute would be over at once.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import pliant

BATCH, SIZE = 96, 8
EPOCHS = 1_000_000
DEAD_AFTER_S = 2.0
HUNG_AFTER_S = 10 * DEAD_AFTER_S
CHECKPOINT_EVERY_S = 5.0
NOISE = 0.3
UNEQUAL = (1.0, 1.5, 0.7)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Every sample a little different in every epoch."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = self.pixels[index]
        return pixels + NOISE * torch.randn(pixels.shape, dtype=pixels.dtype), self.labels[index]


class Stamps:
    """One line whenever the group is seen to have got further."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._samples = -1

    def see(self, era: int, samples: int, epoch: int) -> None:
        if samples != self._samples:
            self._samples = samples
            os.write(self._file, f"{time.monotonic():.4f} {era} {samples} {epoch}\n".encode())


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def device_s() -> float:
    """How long this worker's device takes for a sample, beside what is really computed."""
    slot = os.environ.get("PLIANT_WORKER", "w0")
    return float(os.environ.get("CHAOS_DEVICE_MS", "0")) / 1000 / SIZE * UNEQUAL[int(slot[1:]) % len(UNEQUAL)]


def is_last(epoch: int) -> bool:
    try:
        return epoch >= int(Path("last-epoch").read_text())
    except FileNotFoundError:
        return False


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # where does it hang?
    digits, seed = load_file(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    trained = Noisy(digits["pixels"], digits["labels"])
    tested = TensorDataset(digits["test_pixels"], digits["test_labels"])
    sample_s = device_s()
    stamps = Stamps(Path(f"stamps-{os.getpid()}"))

    def correct(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])

    kept: dict[str, Any] = {}
    if len(sys.argv) > 3:
        kept = {"checkpoint": sys.argv[3], "checkpoint_every": CHECKPOINT_EVERY_S}
    limits = {"dead_after": DEAD_AFTER_S, "hung_after": HUNG_AFTER_S}
    with pliant.join(model, optimizer, batch=BATCH, delay=1, seed=seed, **limits, **kept) as run:
        for epoch in run.epochs(EPOCHS):
            for pixels, labels in run.batches(trained, size=SIZE):
                stamps.see(run.era, run.samples, epoch)
                time.sleep(len(labels) * sample_s)
                run.backward(F.cross_entropy(model(pixels), labels))
                run.step()
                stamps.see(run.era, run.samples, epoch)
            run.evaluate(correct, tested, size=60)
            if is_last(epoch):
                break
        run.save("weights.safetensors")
    model.eval()
    with torch.no_grad():
        right = (model(tested.tensors[0]).argmax(1) == tested.tensors[1]).double().mean()
    final = {"worker": run.worker, "weights": digest(model), "accuracy": float(right), "samples": run.samples}
    Path(f"final-{os.getpid()}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
