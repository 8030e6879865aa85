"""Authentication by the job's token, which is never sent.

Question  How do the two ends of a connection prove to each other that they know the job's token?
Holds     A proof is an HMAC over a role and parts of fixed length, including fresh nonces of both ends. It reveals
          nothing about the token, is valid for one role in one conversation, and cannot be replayed later or to its
          sender. No role is a prefix of another, so the same bytes never mean two things. Comparisons take constant
          time. Pure: nonces are passed in.
Source    Challenge and response by HMAC-SHA-256 (RFC 2104); docs/protocol.md, docs/design/0011-trust.md.
"""

from __future__ import annotations

import hashlib
import hmac

NONCE_BYTES = 32
"""Random bytes of each end: so many that no value is drawn twice."""

PROOF_BYTES = 32


def proof(token: str, role: bytes, *parts: bytes) -> bytes:
    """The HMAC that proves knowledge of the token, for this ``role`` and these parts, each of fixed length."""
    return hmac.digest(token.encode(), role + b"".join(parts), hashlib.sha256)


def is_proof(given: bytes, token: str, role: bytes, *parts: bytes) -> bool:
    """Whether ``given`` is that proof, in constant time."""
    return hmac.compare_digest(given, proof(token, role, *parts))


def same(digits: str, expected: bytes) -> bool:
    """Whether these hexadecimal digits are that proof, in constant time."""
    return hmac.compare_digest(digits.encode("utf-8", "replace"), expected.hex().encode())


def digest(content: bytes) -> bytes:
    """Content of any length as a part of fixed length."""
    return hashlib.sha256(content).digest()


# -- over a control connection: three frames, before anything else is sent

GREETING = b"pliant control 1\n"
CHALLENGE_BYTES = len(GREETING) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES


def challenge(nonce: bytes) -> bytes:
    """The coordinator's first frame."""
    return GREETING + nonce


def challenged(frame: bytes) -> bytes | None:
    """The nonce in the coordinator's first frame; None if the frame has another form."""
    return frame[len(GREETING) :] if len(frame) == CHALLENGE_BYTES and frame.startswith(GREETING) else None


def answer(token: str, role: bytes, theirs: bytes, mine: bytes) -> bytes:
    """The frame with which a worker or a launcher authenticates."""
    return mine + proof(token, role, theirs, mine)


def confirmation(token: str, role: bytes, nonce: bytes, frame: bytes) -> bytes | None:
    """The coordinator's own proof, in answer to a valid frame; None for an invalid one."""
    theirs, given = frame[:NONCE_BYTES], frame[NONCE_BYTES:]
    if len(frame) != ANSWER_BYTES or not is_proof(given, token, role, nonce, theirs):
        return None
    return proof(token, b"coordinator", role.ljust(NONCE_BYTES), theirs, nonce)


def is_confirmed(frame: bytes, token: str, role: bytes, theirs: bytes, mine: bytes) -> bool:
    """Whether the coordinator has proved that it knows the token, too."""
    return is_proof(frame, token, b"coordinator", role.ljust(NONCE_BYTES), mine, theirs)


# -- over HTTP: each request is authenticated by itself

SCHEME = "Pliant"
"""``Authorization: Pliant <coordinator's nonce>.<own nonce>.<proof>``, all in hexadecimal digits."""

ANSWER_HEADER = "Pliant-Proof"


def request_proof(token: str, nonce: bytes, own: bytes, method: str, path: str, body: bytes) -> bytes:
    """The proof that the client knows the token, and sends exactly this request."""
    return proof(token, b"request", nonce, own, digest(method.encode()), digest(path.encode()), digest(body))


def answer_proof(token: str, nonce: bytes, own: bytes, status: int, body: bytes) -> bytes:
    """The proof that the server knows the token, and sends exactly this answer."""
    return proof(token, b"reply", own, nonce, digest(str(status).encode()), digest(body))


def authorization(token: str, nonce: bytes, own: bytes, method: str, path: str, body: bytes) -> str:
    """The ``Authorization`` header of a request."""
    return f"{SCHEME} {nonce.hex()}.{own.hex()}.{request_proof(token, nonce, own, method, path, body).hex()}"


def authorized(header: str) -> tuple[bytes, bytes, bytes] | None:
    """The coordinator's nonce, the client's nonce and the proof in such a header; None if it has another form."""
    scheme, _, rest = header.partition(" ")
    try:
        parts = [bytes.fromhex(part) for part in rest.split(".")]
    except ValueError:
        return None
    if scheme != SCHEME or [len(part) for part in parts] != [NONCE_BYTES, NONCE_BYTES, PROOF_BYTES]:
        return None
    return parts[0], parts[1], parts[2]


def metrics_token(token: str) -> str:
    """The bearer token for Prometheus. It gives access to the metrics only, and does not reveal the token."""
    return proof(token, b"metrics").hex()
