"""A character-level transformer on the docstrings of Python's standard library: AdamW, open batch, token weights.

python examples/characters.py [--epochs 3]
pliant run -n 4 --pace 1,1,0.5,0.25 examples/characters.py

Lines of text differ in length, so a micro-batch's mean is over its characters and ``weight`` says how many there were:
the group's gradient is the mean over all characters of the round. The batch is open: each worker adds what it
manages while the last sum is in flight, and the learning rate follows the batch.
"""

import argparse
import importlib
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, random_split

import pliant

MODULES = (
    *("argparse", "collections", "datetime", "decimal", "difflib", "functools", "inspect", "random", "re"),
    *("statistics", "string", "subprocess", "tempfile", "textwrap", "threading"),
)
CONTEXT = 64
"""characters the model sees at most"""
PAD = -1
"""a target that does not count"""


class Lines(Dataset[Tensor]):
    """The lines of many docstrings, each character a number."""

    def __init__(self) -> None:
        lines = {line[: CONTEXT + 1] for name in MODULES for line in _documentation(name) if len(line) > 20}
        self.alphabet = sorted(set("".join(lines)))
        number = {character: index for index, character in enumerate(self.alphabet)}
        self._lines = [torch.tensor([number[character] for character in line]) for line in sorted(lines)]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Tensor:
        return self._lines[index]


def _documentation(name: str) -> list[str]:
    """The docstring lines of a module and its public classes and functions."""
    module = importlib.import_module(name)
    public = [value for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
    return [line.strip() for thing in (module, *public) for line in (inspect.getdoc(thing) or "").splitlines()]


def shifted(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What the model sees, and the next character at each place."""
    seen = pad_sequence([line[:-1] for line in lines], batch_first=True)
    return seen, pad_sequence([line[1:] for line in lines], batch_first=True, padding_value=PAD)


class Transformer(nn.Module):
    """Two layers of causal attention."""

    def __init__(self, characters: int, width: int = 48) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.next = nn.Linear(width, characters)

    def forward(self, seen: Tensor) -> Tensor:
        length = seen.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.character(seen) + self.place(torch.arange(length))
        return self.next(self.layers(hidden, mask=later, is_causal=True))


def train(epochs: int) -> None:
    lines = Lines()
    train_set, test_set = random_split(lines, [0.9, 0.1], torch.Generator().manual_seed(0))
    model = Transformer(len(lines.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def cost(batch: tuple[Tensor, Tensor], reduction: str) -> tuple[Tensor, int]:
        seen, following = batch
        loss = F.cross_entropy(model(seen).flatten(0, 1), following.flatten(), ignore_index=PAD, reduction=reduction)
        return loss, int((following != PAD).sum())

    floating = pliant.Floating(reference=32, at_most=128)
    with pliant.join(model, optimizer, batch=floating, clip_norm=1.0) as run:
        for epoch in run.epochs(epochs):
            for batch in run.batches(train_set, size=8, collate_fn=shifted):
                loss, tokens = cost(batch, "mean")
                run.backward(loss, weight=tokens)
                run.step()
            nats = run.evaluate(lambda batch: cost(batch, "sum"), test_set, size=16, collate_fn=shifted)
            if run.is_leader:
                print(f"epoch {epoch + 1}: {nats:.3f} nats per character, rate {run.rate:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    torch.manual_seed(0)
    # More threads gain nothing at this size, and lose much where the cores are shared.
    torch.set_num_threads(1)
    train(parser.parse_args().epochs)
