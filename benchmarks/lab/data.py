"""What the lab's models learn from.

Question  Which samples are trained on, and which judge the result?
Holds     Nothing is downloaded. Images are Fashion-MNIST where Debian's package is installed, else scikit-learn's
          digits; text is the documentation strings of Python's standard library, read without importing it. What
          judges was never trained on. All are the same on every call.
"""

import ast
import functools
import gzip
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FASHION = Path("/usr/share/datasets/fashion-mnist")
# Of the 60,000 training images 20,000 are trained on; 20,000 others judge beside the 10,000 of the test set, because
# the scatter of an accuracy comes for a good part from how few images it is measured on.
TRAINED, JUDGING = 20_000, 20_000
SIDE = 14  # pixels after halving: a run takes a second or two of one core
WINDOW = 32  # characters a sample of text predicts
LETTERS = 64  # the most frequent characters; the rest share one code
HELD_OUT = 10  # every tenth window of text judges
WINDOWS = 24_000


@dataclass(frozen=True, slots=True)
class Data:
    """Samples with what is to be predicted from each."""

    name: str
    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    classes: int


def _idx(name: str, header: int) -> Tensor:
    with gzip.open(FASHION / name) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header).copy())


def _fashion() -> Data:
    parts: list[Tensor] = []
    labels: list[Tensor] = []
    for part in ("train", "t10k"):
        pixels = _idx(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).float()
        parts.append(F.avg_pool2d(pixels, 2))
        labels.append(_idx(f"{part}-labels-idx1-ubyte.gz", 8).long())
    images, known = torch.cat(parts), torch.cat(labels)
    images = (images - images[:TRAINED].mean()) / images[:TRAINED].std()
    judging = torch.cat([torch.arange(TRAINED, TRAINED + JUDGING), torch.arange(60_000, 70_000)])
    return Data("Fashion-MNIST", images[:TRAINED], known[:TRAINED], images[judging], known[judging], 10)


def _digits() -> Data:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = F.interpolate(torch.as_tensor(pixels).float().view(-1, 1, 8, 8), size=SIDE, mode="bilinear")
    images = (images - images.mean()) / images.std()
    labels = torch.as_tensor(classes).long()
    return Data("digits", images[:1297], labels[:1297], images[1297:], labels[1297:], 10)


@functools.cache
def images() -> Data:
    """Images of 14 × 14 with ten classes."""
    return _fashion() if FASHION.exists() else _digits()


def _documentation() -> str:
    """The documentation strings of the standard library's top-level modules, in order of name."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node) or "")
    return "\n".join(text for text in found if text)


@functools.cache
def text() -> Data:
    """Windows of characters; each character's target is the one after it."""
    written = _documentation()
    letters = sorted(set(written), key=lambda letter: (-written.count(letter), letter))[: LETTERS - 1]
    codes = {letter: code for code, letter in enumerate(letters, start=1)}
    stream = torch.tensor([codes.get(letter, 0) for letter in written])
    count = min(WINDOWS, (len(stream) - 1) // WINDOW)
    inputs = stream[: count * WINDOW].view(count, WINDOW)
    targets = stream[1 : count * WINDOW + 1].view(count, WINDOW)
    judges = torch.arange(count) % HELD_OUT == 0
    return Data("documentation strings", inputs[~judges], targets[~judges], inputs[judges], targets[judges], LETTERS)
