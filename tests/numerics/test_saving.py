"""What ``run.save`` writes over what."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from pliant.tensors import weights


def saved(model: nn.Module, path: Path, value: float, round_: int, run: str) -> bool:
    with torch.no_grad():
        model.weight.fill_(value)
    return weights.save(model, path, round_=round_, run=run)


def test_an_older_round_is_not_put_over_a_newer_one_of_the_same_run(tmp_path: Path) -> None:
    model, path = nn.Linear(1, 1, bias=False), tmp_path / "model.safetensors"
    assert saved(model, path, 5.0, 5, "a")
    assert not saved(model, path, 4.0, 4, "a")
    assert load_file(path)["weight"].item() == 5.0
    # The same round again, a later one, another run, and one that is alone.
    for value, round_, run in ((5.5, 5, "a"), (6.0, 6, "a"), (1.0, 1, "b"), (0.5, 0, "")):
        assert saved(model, path, value, round_, run)
        assert load_file(path)["weight"].item() == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_is_no_such_file_is_written_over(tmp_path: Path) -> None:
    model, path = nn.Linear(1, 1, bias=False), tmp_path / "model.safetensors"
    path.write_bytes(b"something else")
    assert saved(model, path, 2.0, 1, "a")
    assert load_file(path)["weight"].item() == 2.0
