"""HTTP requests of a user to a run's coordinator.

Question  How does a command on the terminal reach a run that another command started?
Holds     A failed request is a ``PliantError`` with one line: what is wrong, what to do. The token is never sent, and
          an answer is accepted only from a server that knows the token, too.
Source    ours; docs/protocol.md, docs/design/0011-trust.md.
"""

from __future__ import annotations

import secrets
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pliant import auth
from pliant.control import tls
from pliant.control.handshake import Endpoint, check_brackets
from pliant.environment import given_authority, given_token
from pliant.errors import Refused, RunEnded, UsageError
from pliant.launch import run_directory
from pliant.launch.certificate_check import asked
from pliant.launch.run_directory import Access

if TYPE_CHECKING:
    from http.client import HTTPConnection

ANSWER_S = 5.0
"""A coordinator that lives answers in milliseconds."""


def found(directory: Path | None, address: str, token_file: Path | None, authority: Path | None = None) -> Access:
    """The run that the options name; without any, the newest in runs/."""
    if not address:
        if token_file is not None and directory is None:
            raise UsageError("--token-file without --address; give both, or --dir")
        there = run_directory.access(directory or run_directory.newest())
        return there if authority is None else Access(there.address, there.token, authority)
    return at(address, directory, token_file, authority)


def at(address: str, directory: Path | None, token_file: Path | None, authority: Path | None) -> Access:
    """The run at a given address."""
    check_brackets(address)
    if authority is None and given_authority():
        authority = Path(given_authority())
    if authority is None and directory is not None:
        authority = run_directory.authority_in(directory)
    # The workers may have another working directory.
    return Access(address, token(directory, token_file), authority.absolute() if authority is not None else None)


def token(directory: Path | None, token_file: Path | None) -> str:
    """The token for a run at a given address: from a file, from the environment, or from its directory."""
    if token_file is not None:
        return run_directory.token_in(token_file)
    if given_token():
        return given_token()
    if directory is not None:
        return run_directory.token_in(directory / run_directory.TOKEN)
    raise UsageError("the run asks for its token; give --token-file, PLIANT_TOKEN or --dir with the file `token` in it")


def get(access: Access, path: str) -> bytes:
    """The body of the coordinator's answer."""
    return _asked(access, "GET", path, None)


def post(access: Access, path: str, wish: dict[str, object]) -> bytes:
    """POST a request; the coordinator's answer."""
    return _asked(access, "POST", path, msgspec.json.encode(wish))


def _asked(access: Access, method: str, path: str, body: bytes | None) -> bytes:
    status, answer = _answered(access, method, path, body or b"")
    if status == 401:
        # A coordinator that has just been replaced does not know the other one's nonces.
        status, answer = _answered(access, method, path, body or b"")
    if status == 403:
        raise Refused(f"the coordinator at {access.address} refused the token; is it another run's?")
    if status != 200:
        raise Refused(_reason(answer) or f"the coordinator at {access.address} answered {status}")
    return answer


def _answered(access: Access, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an answer. Its sender has proven that it knows the token, except for 401 and 403."""
    # Not at the top: every command would load it, and only these use it.
    import http.client

    connection = _connection(access)
    try:
        connection.request("GET", "/nonce")
        nonce = _nonce(connection.getresponse().read(), access)
        own = secrets.token_bytes(auth.NONCE_BYTES)
        headers = {"Authorization": auth.authorization(access.token, nonce, own, method, path, body)}
        if body:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, body=body or None, headers=headers)
        response = connection.getresponse()
        answer = response.read()
    except ssl.SSLError as error:
        raise tls.explained(error, access.address) from None
    except TimeoutError:
        raise RunEnded(f"the coordinator at {access.address} did not answer within {ANSWER_S:g} s; try again") from None
    except (OSError, http.client.HTTPException):
        if access.authority is None and tls.speaks_tls(*Endpoint(access.address, "").place, ANSWER_S):
            raise tls.wants_tls(access.address) from None
        raise RunEnded(f"the run is over: nobody listens at {access.address}") from None
    finally:
        connection.close()
    if response.status not in (401, 403):
        expected = auth.answer_proof(access.token, nonce, own, response.status, answer)
        if not auth.same(response.headers.get(auth.ANSWER_HEADER, ""), expected):
            raise Refused(f"what answers at {access.address} does not know the token: it is no coordinator of this run")
    return response.status, answer


def _connection(access: Access) -> HTTPConnection:
    import http.client

    context = asked(access)
    try:
        if context is not None:
            return http.client.HTTPSConnection(access.address, timeout=ANSWER_S, context=context)
        return http.client.HTTPConnection(access.address, timeout=ANSWER_S)
    except http.client.InvalidURL:
        raise UsageError(f"{access.address!r} is no address; give HOST:PORT") from None


def _nonce(text: bytes, access: Access) -> bytes:
    try:
        nonce = bytes.fromhex(text.decode())
    except ValueError:
        nonce = b""
    if len(nonce) != auth.NONCE_BYTES:
        raise Refused(f"what answers at {access.address} is no Pliant coordinator of this version")
    return nonce


def _reason(answer: bytes) -> str:
    """The first line of what the coordinator said."""
    return next(iter(answer.decode("utf-8", "replace").strip().splitlines()), "")
