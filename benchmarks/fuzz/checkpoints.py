"""The checkpoint reader on checkpoints that were damaged, or written by somebody who means harm.

Question  Is a checkpoint read whole, as it was written, or not at all?
Holds     Damaged bytes are refused with ``CheckpointError``, or the state is the one written. With right checksums
          and wrong contents it is refused, or every tensor holds the bytes of the file.
Source    ours; docs/reliability.md.
"""

import io
import zlib
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.fuzz.handoffs import STATES, raw_bytes
from benchmarks.fuzz.mutation import DEEP, bent, deformed
from benchmarks.fuzz.surface import Volley
from pliant.errors import CheckpointError
from pliant.tensors.checkpoint import MANIFEST, TENSORS, CheckpointStore, Manifest, manifest_of, state_of
from pliant.tensors.serialize import flattened

JOB, NAME = "job", "c1"


class CheckpointSurface:
    """Manifests and tensor files against their reader."""

    name = "checkpoint"

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="pliant-fuzz-")
        self._store = CheckpointStore(self._directory.name, JOB)
        self._place = Path(self._directory.name) / JOB / NAME
        self._files: list[tuple[bytes, bytes]] = []
        for state in STATES:
            self._store.write(Manifest(JOB, NAME, "0.1.0", 7, 3, 96, "{}"), state)
            self._files.append(((self._place / MANIFEST).read_bytes(), (self._place / TENSORS).read_bytes()))
        self._raw = [raw_bytes(flattened(state)[1]) for state in STATES]

    def close(self) -> None:
        self._directory.cleanup()

    def fire(self, chance: Random) -> Volley:
        """A few checkpoints."""
        volley = Volley()
        for _ in range(8):
            volley.count(self._damaged(chance) if chance.random() < 0.5 else self._forged(chance))
        return volley

    def _damaged(self, chance: Random) -> bool:
        """One of the two files, or both, by accident."""
        manifest, tensors = chance.choice(self._files)
        where = chance.randrange(3)
        if where != 0:
            manifest = bent(chance, manifest, [pair[0] for pair in self._files])
        if where != 1:
            tensors = bent(chance, tensors, [pair[1] for pair in self._files])
        state = self._read(chance, manifest, tensors)
        if state is not None and raw_bytes(flattened(state)[1]) not in self._raw:
            raise AssertionError(f"a damaged checkpoint was read: {manifest[:300]!r}")
        return state is not None

    def _forged(self, chance: Random) -> bool:
        """Wrong contents with right checksums."""
        text, tensors = chance.choice(self._files)
        value = msgspec.json.decode(text)
        del value["crc"]
        skeleton = msgspec.json.decode(value["skeleton"])
        for _ in range(chance.choice((0, 1, 1, 2))):
            skeleton = deformed(chance, skeleton)
        value["skeleton"] = _text(skeleton)
        if chance.random() < 0.4:
            value = deformed(chance, value)
        if isinstance(value, dict) and chance.random() < 0.3:
            tensors = bent(chance, tensors, [pair[1] for pair in self._files])
            value = {**value, "tensor_bytes": len(tensors), "tensor_crc": zlib.crc32(tensors)}
        payload = _text(value).encode()
        manifest = payload[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(payload)
        state = self._read(chance, manifest, tensors)
        if state is not None and not tensors.endswith(raw_bytes(flattened(state)[1])):
            raise AssertionError(f"a state was read that is not the one in the file: {payload[:300]!r}")
        return state is not None

    def _read(self, chance: Random, manifest: bytes, tensors: bytes) -> Any:
        """The state; None: it is refused."""
        try:
            if chance.random() < 0.95:
                return state_of(manifest_of(manifest, "here"), io.BytesIO(tensors), "here")
            (self._place / MANIFEST).write_bytes(manifest)
            (self._place / TENSORS).write_bytes(tensors)
            if chance.random() < 0.2:
                (self._place / chance.choice((MANIFEST, TENSORS))).unlink()
            return self._store.read(NAME)[1]
        except CheckpointError:
            return None


def _text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
        return '{"u":[' * DEEP + "]}" * DEEP
