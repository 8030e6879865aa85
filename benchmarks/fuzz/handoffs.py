"""Both ends of the handoff stream, each under a hostile peer that knows the job's token, or does not.

Question  Does a newcomer get a whole state or none, and does a donor survive whoever comes?
Holds     In this process, over streams in memory: the very functions that the threads run. Whatever a donor sends, the
          newcomer gets a dict in which every tensor holds the bytes that were sent for it, or ``stream.Broken``.
          Whatever a newcomer sends, the donor reads a request or ``stream.Broken``. Without the token nobody gets
          past the greeting.
Source    ours; docs/reliability.md.
"""

import io
from random import Random
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.fuzz.mutation import DEEP, INTEGERS, bent, deformed
from benchmarks.fuzz.surface import Volley
from pliant.tensors import allocation, framing, handoff
from pliant.tensors.serialize import described, flattened, size_of

TOKEN = "a token of the job"
STATES: list[dict[str, Any]] = [
    {"p0": torch.arange(6, dtype=torch.float32).reshape(2, 3), "meta": {"round": 3, "rates": (0.1, float("inf"))}},
    {"p0": torch.zeros(0), "p1": torch.ones(3, dtype=torch.float64), "c0": torch.tensor(True), "s": {1: [None, "x"]}},
    {"p0": torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16), "b0": torch.tensor(7)},
    {"state": {"ema": {"w": torch.ones(2, 2)}, "best": 0.5, "names": ["a", "b"], "nan": float("nan")}},
]


class _Line(io.BytesIO):
    """What the peer sends; what it is sent is thrown away."""

    def write(self, data: Any) -> int:
        return len(data)


def answered(state: dict[str, Any], exchange: int = 7) -> bytes:
    """What an honest donor sends."""
    waiting = handoff._Waiting(handoff._Request(1, 0, list(state)))
    waiting.answer(handoff._State(exchange, 0, 0), dict(state))
    sent = io.BytesIO()
    handoff._send_answer(sent, waiting)
    return sent.getvalue()


def _tensors(state: Any) -> list[Tensor]:
    return flattened(state)[1]


def raw_bytes(tensors: list[Tensor]) -> bytes:
    """The memory of all of them, one behind the other."""
    return b"".join(bytes(allocation.bytes_of(each.contiguous())) for each in tensors)


class HandoffSurface:
    """Streams against the newcomer's and the donor's end."""

    name = "handoff"

    def __init__(self) -> None:
        self._answers = [answered(state) for state in STATES]
        self._requests = [
            msgspec.msgpack.encode(handoff._Request(era, as_of, want))
            for era, as_of, want in ((1, 0, ["p0", "meta"]), (3, 17, []), (0, 0, [f"p{i}" for i in range(50)]))
        ]

    def close(self) -> None: ...

    def fire(self, chance: Random) -> Volley:
        """A few streams."""
        volley = Volley()
        for _ in range(8):
            match chance.randrange(10):
                case 0 | 1 | 2:
                    accepted = self._damaged(chance)
                case 3 | 4 | 5 | 6:
                    accepted = self._forged(chance)
                case 7:
                    accepted = self._greeted(chance)
                case _:
                    accepted = self._asked(chance)
            volley.count(accepted)
        return volley

    def _damaged(self, chance: Random) -> bool:
        """An honest answer, damaged on the way: the checksums see it, or it is the answer."""
        at = chance.randrange(len(STATES))
        sent = bent(chance, self._answers[at], self._answers)
        found = _received(sent)
        if found is None:
            return False
        whole = any(raw_bytes(_tensors(found)) == raw_bytes(_tensors(state)) for state in STATES)
        if not whole:
            raise AssertionError(f"a damaged state was taken over: {sent[:200]!r}")
        return True

    def _forged(self, chance: Random) -> bool:
        """Wrong contents with right checksums."""
        skeleton, tensors = flattened(chance.choice(STATES))
        raw = raw_bytes(tensors)
        value = msgspec.json.decode(skeleton)
        for _ in range(chance.choice((0, 1, 1, 2))):
            value = deformed(chance, value)
        try:
            skeleton = msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
            skeleton = b"[" * DEEP + b"]" * DEEP
        if chance.random() < 0.02:
            skeleton = b'{"d":[["x",' + b'{"u":[' * DEEP + b"]}" * DEEP + b"]]}"
        sizes = [7, len(skeleton), len(raw)]
        if chance.random() < 0.4:
            sizes[chance.randrange(3)] = chance.choice((*INTEGERS, len(raw) + 1, len(skeleton) - 1, 2**30, 2**40))
        if chance.random() < 0.5:
            # It may agree with what it describes, whatever that is.
            sizes[2] = min(_described(skeleton, sizes[2]), INTEGERS[-1])
        sent = io.BytesIO()
        head = {"type": chance.choice(("state", "state", "state", "refused")), "exchange": sizes[0]}
        head |= {"skeleton_bytes": sizes[1], "tensor_bytes": sizes[2], "reason": "no"}
        framing.write_frame(sent, msgspec.msgpack.encode(head))  # type: ignore[arg-type]
        framing.write_chunks(sent, memoryview(skeleton))
        for tensor in tensors:
            framing.write_chunks(sent, allocation.bytes_of(tensor.contiguous()))
        if chance.random() < 0.8:
            framing.write_frame(sent, b"whole")
        found = _received(sent.getvalue())
        if found is not None and raw_bytes(_tensors(found)) != raw:
            raise AssertionError(f"a state was taken over that is not the one sent: {skeleton!r}")
        return found is not None

    def _greeted(self, chance: Random) -> bool:
        """Somebody who does not know the token, from either side."""
        theirs = chance.randbytes(chance.choice((0, 1, 32, 64, 96, 200)))
        try:
            if chance.random() < 0.5:
                framing.welcome(_Line(theirs), _Line(), TOKEN)  # type: ignore[arg-type]
            else:
                greeting = b"pliant handoff 1\n"
                greeting = bent(chance, greeting, [greeting]) if chance.random() < 0.5 else greeting
                framing.introduce(_Line(greeting + theirs), _Line(), TOKEN)  # type: ignore[arg-type]
        except framing.StreamBroken:
            return False
        raise AssertionError("a stranger was let in")

    def _asked(self, chance: Random) -> bool:
        """A newcomer's request."""
        frame = chance.choice(self._requests)
        if chance.random() < 0.6:
            value = deformed(chance, msgspec.msgpack.decode(frame))
            try:
                frame = msgspec.msgpack.encode(value)
            except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
                frame = b"\x91" * DEEP
        sent = len(frame).to_bytes(4, "big") + frame
        if chance.random() < 0.5:
            sent = bent(chance, sent, self._requests)
        try:
            request = handoff._read_request(io.BytesIO(sent))
        except framing.StreamBroken:
            return False
        waiting = handoff._Waiting(request)
        handoff.is_due(*waiting.since, 3, 17)
        return True


def _described(skeleton: bytes, otherwise: int) -> int:
    try:
        return size_of(described(skeleton))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, StopIteration):
        return otherwise


def _received(sent: bytes) -> dict[str, Any] | None:
    """What the newcomer's thread makes of it; None: it is refused."""
    reader = io.BytesIO(sent)
    try:
        _, state = handoff._read_answer(reader, framing.read_frame(reader))
    except framing.StreamBroken:
        return None
    return state
