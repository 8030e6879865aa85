"""Questions and wishes of people, put to a run's coordinator.

Question  How does a command on the terminal reach a run that somebody else started?
Holds     An answer that is not the one hoped for is a ``PliantError`` with one line: what is wrong, what to do.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pliant.errors import Refused, RunEnded, UsageError
from pliant.launch import directory as run_directory
from pliant.launch.directory import Access
from pliant.runtime.environment import given_token

ANSWER_S = 5.0
"""A coordinator that lives answers in milliseconds."""


def found(directory: Path | None, address: str, token_file: Path | None) -> Access:
    """The run that the options name; without any, the newest in runs/."""
    if not address:
        if token_file is not None and directory is None:
            raise UsageError("--token-file without --address; give both, or --dir")
        return run_directory.access(directory or run_directory.newest())
    return Access(address, token(directory, token_file))


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
    """What the coordinator answers."""
    return _asked(access, "GET", path, None)


def post(access: Access, path: str, wish: dict[str, object]) -> bytes:
    """Ask for something; what the coordinator says to it."""
    return _asked(access, "POST", path, msgspec.json.encode(wish))


def _asked(access: Access, method: str, path: str, body: bytes | None) -> bytes:
    # Not at the top: every command would load it, and only these use it.
    import http.client

    headers = {"Authorization": f"Bearer {access.token}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection = http.client.HTTPConnection(access.address, timeout=ANSWER_S)
    except http.client.InvalidURL:
        raise UsageError(f"{access.address!r} is no address; give HOST:PORT") from None
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        answer = response.read()
    except TimeoutError:
        raise RunEnded(f"the coordinator at {access.address} did not answer within {ANSWER_S:g} s; try again") from None
    except (OSError, http.client.HTTPException):
        raise RunEnded(f"the run is over: nobody listens at {access.address}") from None
    finally:
        connection.close()
    if response.status == 403:
        raise Refused(f"the coordinator at {access.address} refused the token; is it another run's?")
    if response.status != 200:
        raise Refused(_reason(answer) or f"the coordinator at {access.address} answered {response.status}")
    return answer


def _reason(answer: bytes) -> str:
    """The first line of what the coordinator said."""
    return next(iter(answer.decode("utf-8", "replace").strip().splitlines()), "")
