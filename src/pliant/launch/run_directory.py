"""The directory of a run.

Question  Where are a run's journal, address, token and logs, and how are they found again?
Holds     A name is used only once, and a directory with a journal is never used for another run. A directory that a
          run creates can be entered by its owner only; in one that existed before, token, journal, logs and weights
          can be read by their owner only. A certificate's key is never copied.
Source    ours; DESIGN, the user's interface.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pliant.auth import metrics_token
from pliant.core.journal.records import JOURNAL
from pliant.errors import UsageError

HOST = "127.0.0.1"

ADDRESS, TOKEN, CHARTER, LOGS = "address", "token", "charter.json", "logs"
METRICS_TOKEN, AUTHORITY, TRUST = "metrics-token", "ca.pem", "trust.json"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
"""Hosts that can be reached from this machine only."""

PRIVATE = 0o700
"""Journal, logs and weights tell other users of the machine what is trained, and on what."""


@dataclass(frozen=True, slots=True)
class Access:
    """The address and token of a run's coordinator; it uses TLS if there is an ``authority``."""

    address: str
    token: str
    authority: Path | None = None


@dataclass(frozen=True, slots=True)
class Trust:
    """The TLS settings of a run's coordinator that its replacement needs."""

    certificate: str = ""
    key: str = ""
    authority: str = ""
    insecure: bool = False
    """the user allows other machines to reach it without a certificate"""

    @property
    def tls(self) -> bool:
        return bool(self.certificate)


NO_TLS = Trust()
"""For loopback."""


def made(directory: Path | None, script: str) -> Path:
    """The run directory, made if needed, with room for logs."""
    try:
        found = _fresh(Path(script).stem) if directory is None else directory
        found.mkdir(PRIVATE, parents=True, exist_ok=True)
        (found / LOGS).mkdir(PRIVATE, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory or 'runs'}: {error.strerror}; give another --dir") from error
    return found.resolve()


def refuse_journal(directory: Path) -> None:
    """Raise if the directory has a journal: it belongs to another run."""
    if (directory / JOURNAL).exists():
        raise UsageError(
            f"{directory / JOURNAL} already holds the journal of a run; give another --dir, or move that run away "
            "(--resume goes on with it, from its last checkpoint)"
        )


def expect_checkpoint(directory: Path | None) -> None:
    """Raise unless the run in the directory can be resumed: it is not over, and has a checkpoint."""
    if directory is None:
        raise UsageError("--resume goes on with a run from its last checkpoint; give the run's directory with --dir")
    # Loaded here: only this needs it.
    from pliant.coordinator.journal import JournalFile

    account = JournalFile.looked_at(directory / JOURNAL)
    if account.end is not None and account.end.completed:
        raise UsageError(f"the run in {directory} has come to its end; there is nothing to go on with")
    if not account.checkpoints:
        raise UsageError(
            f"the run in {directory} has no checkpoint to go on from; start another one, and give join a "
            "`checkpoint` directory"
        )


def publish(directory: Path, access: Access) -> None:
    """Write the coordinator's address and token, for the commands of users."""
    write_private(directory / TOKEN, access.token)
    write_private(directory / METRICS_TOKEN, metrics_token(access.token))
    copy = directory / AUTHORITY
    if access.authority is None:
        copy.unlink(missing_ok=True)
    elif access.authority.resolve() != copy.resolve():
        copy.write_bytes(access.authority.read_bytes())
    (directory / ADDRESS).write_text(access.address + "\n")


def access(directory: Path) -> Access:
    """Where the coordinator of the run in ``directory`` is."""
    try:
        address, token = (directory / ADDRESS).read_text().strip(), (directory / TOKEN).read_text().strip()
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"no run in {directory}; give a run's directory with --dir") from None
    return Access(address, token, authority_in(directory))


def authority_in(directory: Path) -> Path | None:
    """The certificate authority of a run whose coordinator speaks TLS."""
    path = (directory / AUTHORITY).resolve()
    return path if path.is_file() else None


def write_trust(directory: Path, trust: Trust) -> None:
    """Write the TLS settings, for a coordinator that replaces a lost one."""
    (directory / TRUST).write_bytes(msgspec.json.encode(trust))


def trust_in(directory: Path) -> Trust:
    """The TLS settings that ``write_trust`` has written."""
    path = directory / TRUST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trust)
    except FileNotFoundError:
        return Trust()
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is damaged or of another version of Pliant: {error}") from None


def check_address(host: str) -> None:
    """Refuse a host that names all addresses, or another machine when read elsewhere: others connect to it."""
    found, literal = _resolved(host), _literal(host)
    if host in ("", "*") or any(each.is_unspecified for each in found):
        raise UsageError(
            f"--host {host or repr('')} is no address that others can reach; "
            "give the one by which other machines know this one"
        )
    own = next((each for each in found if each.is_loopback), None)
    if own is not None and literal is None and host.lower() not in _LOCAL_NAMES:
        # Debian gives a machine's own name the address 127.0.1.1.
        raise UsageError(
            f"--host {host} is {own} on this machine, where no other one can reach it; give the address by which "
            f"others know this machine, or --host {HOST} for workers of this one alone"
        )
    if literal is not None and literal.version == 6 and literal.is_link_local:
        raise UsageError(
            f"--host {host} is a link-local address, which means something else on every machine; give another one"
        )


def check_exposure(host: str, trust: Trust) -> None:
    """Refuse a coordinator that other machines can reach and that has no certificate, only its token."""
    check_address(host)
    if trust.tls or trust.insecure or _is_loopback(host):
        return
    raise UsageError(
        f"--host {host} can be reached from other machines: give --tls-cert, --tls-key and --tls-ca "
        f"(`pliant certs init DIR --host {host}` makes them), or --insecure in a network that you trust"
    )


def _is_loopback(host: str) -> bool:
    # Without any it is no address of this machine either, which is said when it is bound.
    return all(each.is_loopback for each in _resolved(host))


def _literal(host: str) -> IPAddress | None:
    """``host`` as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _resolved(host: str) -> list[IPAddress]:
    """The IP addresses of a name; an address stands for itself."""
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(each.partition("%")[0]) for each in sorted(found)]


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
    """A listening socket. From now on workers can connect; they wait until a coordinator accepts."""
    check_address(host)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Of a name with several addresses the IPv4 one.
        family, *_, place = min(places, key=lambda each: each[0] != socket.AF_INET)
        return socket.create_server(place[:2], family=family, backlog=128)
    except UnicodeError:
        raise UsageError(f"{host} is no address of this machine; give another --host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is in use; give another --port, or none to take a free one") from error
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{host} is no address of this machine; give another --host") from error
        raise UsageError(f"cannot listen on port {port}: {error.strerror}; give another --port") from error


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
            (runs / candidate).mkdir(PRIVATE, parents=True)
        except FileExistsError:
            continue
        return runs / candidate
    raise UsageError(f"runs/{name} and 98 more exist; give a --dir")
