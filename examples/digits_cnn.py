"""A convolutional network with BatchNorm on scikit-learn's handwritten digits, batch 128, cosine schedule.

python examples/digits_cnn.py [--epochs 8]
pliant run -n 4 --pace 1,1,0.5,0.25 examples/digits_cnn.py

Every update is made of exactly 128 samples however many workers share them, so the learning rate and its schedule
mean the same with one worker as with four. BatchNorm's statistics are merged over the workers.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import pliant

BATCH = 128


def digits() -> list[Subset[tuple[Tensor, ...]]]:
    """1500 images to train on and 297 to test with, 8 × 8 pixels each."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    whole = TensorDataset(pixels, torch.as_tensor(labels, dtype=torch.int64))
    return random_split(whole, [1500, 297], torch.Generator().manual_seed(0))


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 4 * 4, 10)),
    )


def train(epochs: int, train_set: Dataset[tuple[Tensor, ...]], test_set: Dataset[tuple[Tensor, ...]]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
    # One scheduler step per 128 samples, however many rounds they take; nobody calls scheduler.step().
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * 1500 // BATCH)

    def correct(batch: list[Tensor]) -> tuple[Tensor, int]:
        images, labels = batch
        return (model(images).argmax(1) == labels).sum(), len(labels)

    with pliant.join(model, optimizer, batch=BATCH, scheduler=scheduler) as run:
        for epoch in run.epochs(epochs):
            for images, labels in run.batches(train_set, size=16):
                run.backward(F.cross_entropy(model(images), labels))
                run.step()
            accuracy = run.evaluate(correct, test_set, size=50)
            if run.is_leader:
                print(f"epoch {epoch + 1}: loss {run.loss:.3f}, accuracy {accuracy:.3f}, rate {run.rate:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    torch.manual_seed(0)
    # More threads gain nothing at this size, and lose much where the cores are shared.
    torch.set_num_threads(1)
    train(parser.parse_args().epochs, *digits())
