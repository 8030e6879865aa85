"""Checkpoints: what is read is what was written, to the last bit, or it is refused by name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from pliant.errors import CheckpointError
from pliant.tensors import checkpoint
from pliant.tensors.checkpoint import MANIFEST, TENSORS, CheckpointStore, Manifest

STATE: dict[str, Any] = {
    "meta": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "best": float("inf"), "none": None},
    "p0": {"value": torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4), "state": {"step": torch.tensor(3)}},
    "p1": {"value": torch.ones(5, dtype=torch.bfloat16), "state": {}},
    "empty": torch.empty(0),
    "flags": torch.tensor([True, False]),
}


def manifest(name: str = "0001") -> Manifest:
    return Manifest("job", name, "0.1", records=7, round=3, samples=96, group="{}")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path), "job")


@pytest.mark.parametrize("address", ["{}", "file://{}", "memory://checkpoints{}"])
def test_what_is_read_is_what_was_written(address: str, tmp_path: Path) -> None:
    store = CheckpointStore(address.format(tmp_path), "job")
    assert store.names() == []
    written = store.write(manifest(), STATE)
    assert store.names() == ["0001"]
    read, state = store.read("0001")
    assert read == written and same(state, STATE)
    store.remove("0001")
    assert store.names() == []


def test_the_tensors_load_without_pliant(store: CheckpointStore, tmp_path: Path) -> None:
    store.write(manifest(), STATE)
    tensors = load_file(tmp_path / "job" / "0001" / TENSORS)
    assert torch.equal(tensors["t0"], STATE["p0"]["value"]) and tensors["t4"].tolist() == [True, False]


def test_without_a_manifest_there_is_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    store.write(manifest(), STATE)
    (tmp_path / "job" / "0001" / MANIFEST).unlink()
    assert store.names() == []
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        store.read("0001")


@pytest.mark.parametrize("file", [MANIFEST, TENSORS])
@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content + b"x",
        lambda content: content[:20] + bytes([content[20] ^ 4]) + content[21:],
        lambda content: b"PK\x03\x04 something else",
    ],
    ids=["a byte short", "half", "empty", "longer", "flipped", "foreign"],
)
def test_a_damaged_one_is_refused(
    store: CheckpointStore, tmp_path: Path, file: str, harm: Callable[[bytes], bytes]
) -> None:
    store.write(manifest(), STATE)
    path = tmp_path / "job" / "0001" / file
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(CheckpointError, match="0001"):
        store.read("0001")


def rewritten(text: bytes, **changes: Any) -> bytes:
    """A manifest with other fields, and the checksum that belongs to them."""
    content = {**json.loads(text), **changes}
    content.pop("crc")
    payload = json.dumps(content).encode()
    return payload[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(payload)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "has version 2, this Pliant reads 1"),
        ({"records": "many"}, "makes no sense"),
        ({"tensor_bytes": 1 << 60}, "not what its manifest describes"),
        ({"skeleton": '{"t":["float64",[99999999,99999999]]}'}, "not what its manifest describes"),
        ({"skeleton": '{"t":["os",[1]]}'}, "makes no sense"),
        ({"skeleton": '{"q":1}'}, "makes no sense"),
        ({"skeleton": "["}, "makes no sense"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    store: CheckpointStore, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    store.write(manifest(), STATE)
    path = tmp_path / "job" / "0001" / MANIFEST
    path.write_bytes(rewritten(path.read_bytes(), **changes))
    with pytest.raises(CheckpointError, match=said):
        store.read("0001")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.manifest_of(text, "somewhere")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint to"):
        CheckpointStore(str(tmp_path), "job").write(manifest(), STATE)
    with pytest.raises(CheckpointError, match="cannot write checkpoints to"):
        CheckpointStore("nosuchsystem://bucket", "job")
