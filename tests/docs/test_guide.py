"""What the guide shows runs: each Python block, on a small model and its data where it leans on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pages import GUIDE, README, ROOT, Block, blocks
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import pliant

PAGES = (README, ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md"))
SHOWN = [page for page in GUIDE if blocks(page, "python")]

SHORTER = (
    (r"\bsteps=[\d_]+", "steps=12"),
    (r" % [\d_]+ == 0", " % 2 == 0"),
    # Of autocast and GradScaler, which do the same on a CPU.
    (r'"cuda"', '"cpu"'),
)
"""What would take a script long, or another machine, and what the test has in its place."""


class Model(nn.Module):
    """Has the parts that the pages speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.backbone = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.embedding(x)).relu())


def scene(page: Path) -> dict[str, Any]:
    """The names that a page takes for granted."""
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    samples = TensorDataset(x, (x.sum(1) > 0).long())
    model = Model()
    trained = [*model.backbone.parameters(), *model.head.parameters()]
    if page.stem == "freezing":
        model.backbone.requires_grad_(False)

    def correct(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        return (model(x).argmax(1) == y).sum(), len(y)

    return {
        "F": F,
        "correct": correct,
        "log": lambda *values, **named: None,
        "model": model,
        "nn": nn,
        "optimizer": torch.optim.SGD(trained, lr=0.05, momentum=0.9),
        "pliant": pliant,
        "roc_auc_score": lambda labels, scores: float((labels == (scores > 0.5)).float().mean()),
        "test_set": Subset(samples, range(64, 96)),
        "texts": ["a" * (7 * index % 20) for index in range(64)],
        "time_is_up": lambda: True,
        "torch": torch,
        "train_part": Subset(samples, range(32)),
        "train_set": Subset(samples, range(64)),
        "upload": lambda path: path,
    }


def shortened(block: Block) -> str:
    text = block.text
    for long, short in SHORTER:
        text = re.sub(long, short, text)
    return text


@contextmanager
def noting_runs(patch: pytest.MonkeyPatch) -> Iterator[list[pliant.Run]]:
    """The runs that ``join`` makes meanwhile; those that a block leaves open are closed."""
    join, found = pliant.join, list[pliant.Run]()

    def noted(*arguments: Any, **named: Any) -> pliant.Run:
        found.append(join(*arguments, **named))
        return found[-1]

    with patch.context() as patched:
        patched.setattr(pliant, "join", noted)
        yield found
        for run in found:
            run.close()


def show(block: Block, names: dict[str, Any]) -> None:
    """Execute it; with a run that is open where it does not make one, and an epoch for what it has registered."""
    text = shortened(block)
    code = compile("\n" * int(block.place.rpartition(":")[2]) + text, block.place, "exec")
    if "pliant.join(" in text:
        exec(code, names)
        return
    with pliant.join(names["model"], names["optimizer"], batch=32) as run:
        names["run"] = run
        exec(code, names)
        if "@run.on_" in text:
            for x, y in run.batches(names["train_set"], size=16):
                run.backward(F.cross_entropy(names["model"](x), y))
                run.step()


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order: a block may use what one before it has defined."""
    monkeypatch.chdir(tmp_path)
    names = scene(page)
    for block in blocks(page, "python"):
        with noting_runs(monkeypatch) as runs:
            show(block, names)
        assert runs, block.place
        if "run.step()" in block.text:
            assert runs[-1].updates > 1, f"{block.place} has trained nothing"


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page, "python")], ids=lambda block: block.place)
def test_a_block_compiles(block: Block) -> None:
    compile(block.text, block.place, "exec")
