"""Checkpoints: a run's state on disk, or in any storage that fsspec supports.

Question  How is the state of a group written so that any number of workers can go on from it?
Holds     A checkpoint does not depend on the number of workers. Its tensors are an ordinary safetensors file. The
          manifest has that file's size and checksum, and a checksum of its own; it is written last, so without it there
          is no checkpoint. A damaged or foreign checkpoint raises ``CheckpointError``, which says what is wrong, before
          any of it is used. No pickle.
Source    ours; docs/design/0014-checkpoints.md. The format of safetensors files: its documentation.

    DIR/<job>/<name>/state.safetensors   t0, t1, … in the order of the skeleton
    DIR/<job>/<name>/manifest.json       one JSON object, the last field its CRC-32
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import fsspec
import msgspec
import torch
from torch import Tensor

from pliant.errors import CheckpointError
from pliant.tensors import allocation
from pliant.tensors.serialize import Described, blank_tensors, described, flattened, rebuilt, size_of

VERSION = 1
MANIFEST, TENSORS, FINISHED = "manifest.json", "state.safetensors", "finished"

MANIFEST_BYTES = 256 << 20
"""A manifest holds the nesting of the state and the group's ledger; anything larger than this is rejected."""

_CHUNK_BYTES = 1 << 20
_CHECKSUM = b',"crc":"%08x"}\n'
_LENGTH = struct.Struct("<Q")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Manifest(msgspec.Struct, frozen=True):
    """The description of a checkpoint. ``group`` is the replicated state, encoded by the caller."""

    job: str
    name: str
    library: str
    records: int
    """number of journal records by workers up to this checkpoint"""
    round: int
    samples: int
    group: str
    skeleton: str = ""
    tensor_bytes: int = 0
    """size of the whole tensor file"""
    tensor_crc: int = 0
    version: int = VERSION


class CheckpointStore:
    """The checkpoints of one job under an address: a directory, or any other URL that fsspec supports."""

    def __init__(self, address: str, job: str) -> None:
        self.address = address
        self.job = job
        try:
            self._system, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"cannot write checkpoints to {address}: {error}") from error
        self._root = f"{root.rstrip('/')}/{job}"

    def path(self, name: str) -> str:
        """The path of a checkpoint, for messages."""
        return f"{self.address.rstrip('/')}/{self.job}/{name}"

    def names(self) -> list[str]:
        """The names of all checkpoints that have a manifest (even a damaged one), oldest first."""
        try:
            self._system.invalidate_cache()
            entries = self._system.ls(self._root, detail=False)
            found = [entry.rstrip("/").rpartition("/")[2] for entry in entries]
            return sorted(name for name in found if self._system.exists(f"{self._root}/{name}/{MANIFEST}"))
        except FileNotFoundError:
            return []
        except Exception as error:
            # Every fsspec file system has exception types of its own.
            raise CheckpointError(f"cannot look for checkpoints in {self.address}: {error}") from error

    @property
    def finished(self) -> bool:
        """Whether a run without a journal is marked as finished here."""
        return bool(self._system.exists(f"{self._root}/{FINISHED}"))

    def mark(self, *, finished: bool) -> None:
        """Mark the run as finished, or remove the mark because the next run begins."""
        path = f"{self._root}/{FINISHED}"
        try:
            if finished:
                self._system.makedirs(self._root, exist_ok=True)
                self._system.touch(path)
            elif self.finished:
                self._system.rm(path)
        except Exception as error:
            raise CheckpointError(f"cannot write to {self.address}: {_said(error)}") from error

    def write(self, manifest: Manifest, state: Any) -> Manifest:
        """Write the state, and return the manifest as it was written."""
        skeleton, tensors = flattened(state)
        directory = f"{self._root}/{manifest.name}"
        try:
            self._system.makedirs(directory, exist_ok=True)
            with self._opened(f"{directory}/{TENSORS}") as file:
                size, crc = _write_tensors(file, tensors)
            manifest = msgspec.structs.replace(manifest, skeleton=skeleton.decode(), tensor_bytes=size, tensor_crc=crc)
            payload = msgspec.json.encode(manifest)
            with self._opened(f"{directory}/{MANIFEST}") as file:
                file.write(payload[:-1] + _CHECKSUM % zlib.crc32(payload))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot write a checkpoint to {self.path(manifest.name)}: {_said(error)}") from error
        return manifest

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[BinaryIO]:
        """A file for writing that is synced to disk before it is closed, if it is on a disk."""
        with self._system.open(path, "wb") as file:
            yield file
            file.flush()
            with contextlib.suppress(AttributeError, OSError, ValueError):
                os.fsync(file.fileno())

    def manifest(self, name: str) -> Manifest:
        """The checkpoint's manifest."""
        where = self.path(name)
        try:
            with self._system.open(f"{self._root}/{name}/{MANIFEST}", "rb") as file:
                text = file.read(MANIFEST_BYTES + 1)
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint at {where}") from None
        except Exception as error:
            raise CheckpointError(f"cannot read the checkpoint at {where}: {_said(error)}") from error
        return manifest_of(text, where)

    def read(self, name: str) -> tuple[Manifest, Any]:
        """The manifest and state of a checkpoint; all checksums are verified."""
        manifest = self.manifest(name)
        where = self.path(name)
        try:
            with self._system.open(f"{self._root}/{name}/{TENSORS}", "rb") as file:
                return manifest, state_of(manifest, file, where)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot read the checkpoint at {where}: {_said(error)}") from error

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        for file in (MANIFEST, TENSORS):
            with contextlib.suppress(FileNotFoundError):
                self._system.rm(f"{self._root}/{name}/{file}")
        # In object stores directories are only parts of names: there is nothing to remove.
        with contextlib.suppress(Exception):
            self._system.rmdir(f"{self._root}/{name}")


def manifest_of(text: bytes, where: str) -> Manifest:
    """The manifest in ``text``; raises ``CheckpointError`` if it is damaged, foreign, or of another version."""
    tail = len(_CHECKSUM % 0)
    payload = text[:-tail] + b"}"
    if len(text) > MANIFEST_BYTES or text[-tail:] != _CHECKSUM % zlib.crc32(payload):
        raise CheckpointError(f"the manifest of the checkpoint at {where} is damaged")
    try:
        version = json.loads(payload).get("version")
        if version != VERSION:
            raise CheckpointError(
                f"the checkpoint at {where} has version {version}, this Pliant reads {VERSION}; use that which wrote it"
            )
        return msgspec.json.decode(payload, type=Manifest)
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the manifest of the checkpoint at {where} makes no sense: {error}") from None


def state_of(manifest: Manifest, file: BinaryIO, where: str) -> Any:
    """The state whose tensors are in ``file``; raises ``CheckpointError`` unless every byte is as it was written."""
    skeleton = manifest.skeleton.encode()
    try:
        listed = described(skeleton)
        header = _header(listed)
        # Checked before memory is allocated for the tensors.
        if manifest.tensor_bytes != len(header) + size_of(listed) or file.read(len(header)) != header:
            raise CheckpointError(f"the checkpoint at {where} is not what its manifest describes")
        crc = zlib.crc32(header)
        tensors = blank_tensors(skeleton)
        for tensor in tensors:
            crc = _read_into(file, allocation.bytes_of(tensor), crc, where)
        if file.read(1):
            raise CheckpointError(f"the checkpoint at {where} has more bytes than its manifest says")
        if crc != manifest.tensor_crc:
            raise CheckpointError(f"the tensors of the checkpoint at {where} are damaged")
        return rebuilt(skeleton, tensors)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError, StopIteration) as error:
        raise CheckpointError(f"the checkpoint at {where} makes no sense: {type(error).__name__}: {error}") from None


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# -- tensors in a safetensors file


def _header(tensors: Sequence[Described]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for index, (dtype, shape) in enumerate(tensors):
        if dtype not in _DTYPES:
            raise CheckpointError(f"tensors of {dtype} cannot be written to a checkpoint")
        stop = start + size_of([(dtype, shape)])
        entries[f"t{index}"] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = msgspec.json.encode(entries)
    # Data begins at a multiple of eight, as the safetensors format requires.
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _write_tensors(file: BinaryIO, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes written, and their checksum."""
    header = _header([(tensor.dtype, list(tensor.shape)) for tensor in tensors])
    file.write(header)
    size, crc = len(header), zlib.crc32(header)
    for tensor in tensors:
        content = allocation.bytes_of(tensor.detach().cpu().contiguous())
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
        size += len(content)
    return size, crc


def _read_into(file: BinaryIO, content: memoryview, crc: int, where: str) -> int:
    for start in range(0, len(content), _CHUNK_BYTES):
        wanted = min(_CHUNK_BYTES, len(content) - start)
        chunk = file.read(wanted)
        if len(chunk) != wanted:
            raise CheckpointError(f"the checkpoint at {where} is cut off")
        content[start : start + wanted] = chunk
        crc = zlib.crc32(chunk, crc)
    return crc
