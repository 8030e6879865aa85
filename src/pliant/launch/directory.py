"""The directory of a run.

Question  Where do a run's journal, address, token and logs lie, and how are they found again?
Holds     A name is taken only once, and a directory with a journal is never used for another run. The token can be
          read by its owner only.
Source    ours; DESIGN, the user's interface.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pliant.core import journal
from pliant.errors import UsageError

HOST = "127.0.0.1"

JOURNAL, ADDRESS, TOKEN, CHARTER, LOGS = "journal.jsonl", "address", "token", "charter.json", "logs"


@dataclass(frozen=True, slots=True)
class Access:
    """Where a run's coordinator listens, and what it asks for."""

    address: str
    token: str


def made(directory: Path | None, script: str) -> Path:
    """The run directory, made if needed, with room for logs."""
    try:
        found = _fresh(Path(script).stem) if directory is None else directory
        (found / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory or 'runs'}: {error.strerror}; give another --dir") from error
    return found.resolve()


def refuse_journal(directory: Path) -> None:
    """A journal belongs to one run."""
    if (directory / JOURNAL).exists():
        raise UsageError(
            f"{directory / JOURNAL} already holds the journal of a run; give another --dir, or move that run away "
            "(--resume goes on with it, from its last checkpoint)"
        )


def expect_checkpoint(directory: Path | None) -> None:
    """A run goes on only if it is not over, and has something to go on from."""
    if directory is None:
        raise UsageError("--resume goes on with a run from its last checkpoint; give the run's directory with --dir")
    try:
        with (directory / JOURNAL).open("rb") as lines:
            whole = (line for line in lines if line.endswith(b"\n"))
            history = journal.effective(journal.read(whole))
    except OSError as error:
        raise UsageError(f"no journal at {directory / JOURNAL}: {error.strerror}; give a run's directory") from None
    if history and isinstance(history[-1], journal.EndRecord) and history[-1].completed:
        raise UsageError(f"the run in {directory} has come to its end; there is nothing to go on with")
    if not any(isinstance(record, journal.CheckpointRecord) for record in history):
        raise UsageError(
            f"the run in {directory} has no checkpoint to go on from; start another one, and give join a "
            "`checkpoint` directory"
        )


def publish(directory: Path, access: Access) -> None:
    """Write down where the coordinator is, for the commands of people."""
    write_private(directory / TOKEN, access.token)
    (directory / ADDRESS).write_text(access.address + "\n")


def access(directory: Path) -> Access:
    """Where the coordinator of the run in ``directory`` is."""
    try:
        return Access((directory / ADDRESS).read_text().strip(), (directory / TOKEN).read_text().strip())
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"no run in {directory}; give a run's directory with --dir") from None


def newest() -> Path:
    """The directory of the run that was started last."""
    addresses: list[tuple[float, Path]] = []
    for path in Path("runs").glob(f"*/{ADDRESS}"):
        with contextlib.suppress(OSError):
            addresses.append((path.stat().st_mtime, path))
    if not addresses:
        raise UsageError("no run in ./runs; give its directory with --dir")
    return max(addresses)[1].parent


def token_in(path: Path) -> str:
    """The token in a file."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read a token from {path}: {why}; it is the file `token` of a run") from None
    if not token:
        raise UsageError(f"{path} is empty; give the file `token` of a run")
    return token


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens: from here on workers can connect, and wait until a coordinator accepts."""
    if host in ("", "0.0.0.0", "::", "*"):
        raise UsageError(
            f"--host {host or repr('')} is no address that others can reach; "
            "give the one by which other machines know this one"
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is in use; give another --port, or none to take a free one") from error
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{host} is no address of this machine; give another --host") from error
        raise UsageError(f"cannot listen on port {port}: {error.strerror}; give another --port") from error
    return listener


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")


def _fresh(stem: str) -> Path:
    runs = Path("runs")
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for candidate in (name, *(f"{name}-{number}" for number in range(2, 100))):
        try:
            (runs / candidate).mkdir(parents=True)
        except FileExistsError:
            continue
        return runs / candidate
    raise UsageError(f"runs/{name} and 98 more exist; give a --dir")
