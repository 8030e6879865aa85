"""Checks a coordinator's certificate before anything is started with it.

Question  Do certificate, key, authority and host fit together, as every worker will check?
Holds     A mistake is reported in one line, before a directory is created or a process started.
Source    ours; docs/design/0011-trust.md.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pliant.control import tls
from pliant.errors import UsageError
from pliant.launch.run_directory import Access, Trust


def given(certificate: Path | None, key: Path | None, authority: Path | None, *, insecure: bool) -> Trust:
    """The TLS settings that the command's options name."""
    files = (certificate, key, authority)
    if any(files) and not all(files):
        raise UsageError(
            "--tls-cert, --tls-key and --tls-ca go together; `pliant certs init DIR` makes the files for all three"
        )
    return Trust(*(str(each.absolute()) if each else "" for each in files), insecure=insecure)


def served(trust: Trust, host: str) -> ssl.SSLContext | None:
    """The TLS context that the coordinator at ``host`` serves with; None without a certificate."""
    if not trust.tls:
        return None
    context = tls.server_context(Path(trust.certificate), Path(trust.key))
    tls.rehearse(context, tls.client_context(Path(trust.authority)), host)
    return context


def asked(access: Access) -> ssl.SSLContext | None:
    """The TLS context for connections to the coordinator; None if it speaks no TLS."""
    return None if access.authority is None else tls.client_context(access.authority)
