"""Bytes between a donor and a newcomer: authentication, messages, checksummed chunks.

Question  How do two processes that share a token exchange messages and large memory over a plain connection?
Holds     Both prove that they know the token, which is never sent, before either sends anything else. Every length is
          checked before memory is allocated for it. Invalid data from the peer raises ``StreamBroken``, with a text
          that continues "the donor at …". Nothing is encrypted: use it in a network that you trust.
Source    ours; docs/design/0007-elastic.md. Challenge and response by HMAC (RFC 2104), CRC-32 as in zlib.

    donor: greeting, nonce   newcomer: nonce, HMAC(token, "newcomer", both)   donor: HMAC(token, "donor", both)
    message: length, msgpack         chunk: length, crc32, bytes
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import select
import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from pliant.auth import NONCE_BYTES, PROOF_BYTES, is_proof, proof

CHUNK_BYTES = 1 << 20
"""Small enough to be checked in a millisecond, large enough for the header not to count."""

FRAME_BYTES = 4 << 20
"""Largest message: room for the names of about 50,000 tensors."""

_GREETING = b"pliant handoff 1\n"
_CHUNK = struct.Struct("!II")
_LENGTH = struct.Struct("!I")


class StreamBroken(Exception):
    """The stream cannot be trusted or has ended; says why."""


# -- authentication


def welcome(reader: BinaryIO, writer: BinaryIO, token: str) -> None:
    """The donor's side of the authentication; raises ``StreamBroken`` if the newcomer does not know the token."""
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(_GREETING + mine)
    writer.flush()
    theirs = _read(reader, NONCE_BYTES)
    if not is_proof(_read(reader, PROOF_BYTES), token, b"newcomer", mine, theirs):
        raise StreamBroken("does not know the token of the job")
    writer.write(proof(token, b"donor", theirs, mine))
    writer.flush()


def introduce(reader: BinaryIO, writer: BinaryIO, token: str) -> None:
    """The newcomer's side of the authentication; raises ``StreamBroken`` if the donor does not know the token."""
    if _read(reader, len(_GREETING)) != _GREETING:
        raise StreamBroken("is no donor of this version of Pliant")
    theirs = _read(reader, NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(mine + proof(token, b"newcomer", theirs, mine))
    writer.flush()
    try:
        answer = _read(reader, PROOF_BYTES)
    except (StreamBroken, ConnectionError):
        raise StreamBroken("did not accept the token of the job") from None
    if not is_proof(answer, token, b"donor", mine, theirs):
        raise StreamBroken("does not know the token of the job")


# -- bytes


def decoded(frame: bytes, kind: Any) -> Any:
    """The msgpack message in ``frame``, as a value of type ``kind``."""
    try:
        return _decoder(kind).decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StreamBroken(f"sent a message that makes no sense: {error}") from None


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def read_frame(reader: BinaryIO) -> bytes:
    """One message with its length in front, of at most ``FRAME_BYTES``."""
    (length,) = _LENGTH.unpack(_read(reader, _LENGTH.size))
    if length > FRAME_BYTES:
        raise StreamBroken(f"announces a message of {length} bytes, more than {FRAME_BYTES}")
    return _read(reader, length)


def write_frame(writer: BinaryIO, payload: bytes) -> None:
    """Write one message with its length in front."""
    if len(payload) > FRAME_BYTES:
        raise StreamBroken(
            f"cannot be sent a message of {len(payload)} bytes, more than {FRAME_BYTES}: ask for less at once"
        )
    writer.write(_LENGTH.pack(len(payload)))
    writer.write(payload)


def _slices(memory: memoryview) -> Iterator[memoryview]:
    return (memory[start : start + CHUNK_BYTES] for start in range(0, len(memory), CHUNK_BYTES))


def write_chunks(writer: BinaryIO, memory: memoryview) -> None:
    """Write ``memory`` in chunks, each with its length and checksum."""
    for chunk in _slices(memory):
        writer.write(_CHUNK.pack(len(chunk), zlib.crc32(chunk)))
        writer.write(chunk)


def read_chunks(reader: BinaryIO, memory: memoryview) -> None:
    """Fill ``memory`` with chunks as ``write_chunks`` sends them."""
    for chunk in _slices(memory):
        length, checksum = _CHUNK.unpack(_read(reader, _CHUNK.size))
        if length != len(chunk):
            raise StreamBroken(f"sent a chunk of {length} bytes in place of {len(chunk)}")
        _read_into(reader, chunk)
        if zlib.crc32(chunk) != checksum:
            raise StreamBroken("sent a damaged chunk: its checksum is wrong")


def _read(reader: BinaryIO, length: int) -> bytes:
    data = bytearray(length)
    _read_into(reader, memoryview(data))
    return bytes(data)


def _read_into(reader: Any, memory: memoryview) -> None:
    while len(memory):
        count = reader.readinto(memory)
        if not count:
            raise StreamBroken("ended the stream too early")
        memory = memory[count:]


# -- sockets


def shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def hung_up(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection, or has sent something unexpected."""
    look = select.poll()  # select() refuses descriptors above 1023
    try:
        look.register(connection, select.POLLIN)
        return bool(look.poll(0))
    except (OSError, ValueError):
        return True
