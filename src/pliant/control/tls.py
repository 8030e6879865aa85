"""TLS for the control port.

Question  How is the control channel encrypted with a certificate, and what is reported if the certificate does not fit?
Holds     TLS 1.3 only. A client checks the certificate against the job's own authority and the requested host; the
          server asks for the token, never for a client certificate. Any problem with a certificate is a ``PliantError``
          of one line. A ``SecureSocket`` may be read by one thread and written by another.
Source    ours; docs/design/0011-trust.md. Codes: X509_verify_cert_error_string(3).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import NoReturn

from pliant.errors import PliantError, Refused, RunEnded, UsageError

_EXPIRED, _TOO_EARLY = 10, 9
_OTHER_NAME = (62, 64)
_OTHER_AUTHORITY = (2, 18, 19, 20, 21)
# What OpenSSL of different ages says to bytes that are no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What the coordinator shows to who connects."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for path in (certificate, key):
        _readable(path, "--tls-cert" if path is certificate else "--tls-key")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"{key} is not the key of the certificate in {certificate}; give the two together"
            ) from None
        raise UsageError(
            f"{certificate} and {key} are no certificate and key in PEM form ({error.reason or 'unreadable'}); "
            "`pliant certs init DIR` makes them"
        ) from None
    return context


def client_context(authority: Path) -> ssl.SSLContext:
    """Trust the certificates of this authority alone."""
    _readable(authority, "--tls-ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError:
        raise UsageError(f"{authority} holds no certificate in PEM form; give the run's ca.pem with --tls-ca") from None
    return context


def _readable(path: Path, option: str) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give another {option}") from None


def _no_password() -> NoReturn:
    # Asked for in the background nobody would answer.
    raise UsageError("the key is encrypted; give --tls-key a key without a password, readable by you alone")


def rehearse(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Connect the two in memory: what every client would object to is said before a run is started."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=host)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (here, there):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise explained(error, host) from None


def explained(error: ssl.SSLError, address: str) -> PliantError:
    """One line for what went wrong with the coordinator at ``address``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code, whose = error.verify_code, f"the certificate of the coordinator at {address}"
        if code == _EXPIRED:
            return Refused(f"{whose} has expired; make new ones with `pliant certs init` and start the run with them")
        if code == _TOO_EARLY:
            return Refused(f"{whose} is not valid yet; compare the clocks of both machines")
        if code in _OTHER_NAME:
            return Refused(
                f"{whose} is for another name; use the one it was made for, "
                "or make one with `pliant certs init DIR --host NAME`"
            )
        if code in _OTHER_AUTHORITY:
            return Refused(f"{whose} is not of the authority in --tls-ca; give the ca.pem of this very run")
        return Refused(f"{whose} was not accepted: {error.verify_message}")
    if error.reason in _NO_TLS:
        return Refused(f"what listens at {address} speaks no TLS; leave out --tls-ca, or start the run with --tls-cert")
    return RunEnded(f"no TLS connection to the coordinator at {address}: {error.reason or error}")


def speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody there answers a TLS client; asked only to explain why a plain connection was closed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout_s) as raw,
        context.wrap_socket(raw),
    ):
        return True
    return False


def wants_tls(address: str) -> Refused:
    """Of a plain connection to a port that speaks TLS."""
    return Refused(f"the coordinator at {address} speaks TLS only; give the ca.pem of its run with --tls-ca")


class SecureSocket:
    """A connected socket under TLS, with the interface that the WebSocket library needs.

    The library uses a socket in two threads at once, which the ``ssl`` module's own sockets do not allow. Here every
    use of the TLS state is under a lock, but waiting for the network is not.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._raw = raw
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=host)
        self._state = threading.Lock()
        self._sending = threading.Lock()
        """keeps what was encrypted in order"""
        self.family = raw.family

    def shake_hands(self) -> None:
        """Agree on keys and check the certificate; raises ``ssl.SSLError`` or ``OSError``."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._feed(65536)
            except ssl.SSLError:
                # So that the other end hears why.
                with contextlib.suppress(OSError):
                    self._flush()
                raise
            else:
                self._flush()
                return

    def recv(self, size: int) -> bytes:
        """What has come, all of it: who polls the descriptor must not find it empty while something is left here."""
        while True:
            with self._state:
                found = self._decrypted()
            self._flush()
            if found is not None:
                return found
            self._feed(size)

    def sendall(self, data: bytes) -> None:
        with self._sending:
            with self._state:
                self._tls.write(data)
                ciphertext = self._out.read()
            self._raw.sendall(ciphertext)

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        # Wakes up the thread that is in ``recv``.
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()

    def settimeout(self, timeout_s: float | None) -> None:
        self._raw.settimeout(timeout_s)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._raw.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self._raw.fileno()

    def getsockname(self) -> tuple[str, int]:
        return self._raw.getsockname()

    def getpeername(self) -> tuple[str, int]:
        return self._raw.getpeername()

    def _decrypted(self) -> bytes | None:
        """All that is there; empty at the end of the stream, None if more has to come first."""
        parts: list[bytes] = []
        try:
            while part := self._tls.read(65536):
                parts.append(part)
        except ssl.SSLWantReadError:
            return b"".join(parts) if parts else None
        except ssl.SSLZeroReturnError:
            pass
        except ssl.SSLEOFError:
            # Closed without a farewell: what was whole is handed on, the next call finds the end.
            pass
        return b"".join(parts)

    def _feed(self, size: int) -> None:
        data = self._raw.recv(size)
        with self._state:
            if data:
                self._in.write(data)
            else:
                self._in.write_eof()

    def _flush(self) -> None:
        if not self._out.pending:
            return
        with self._sending:
            with self._state:
                ciphertext = self._out.read()
            self._raw.sendall(ciphertext)
