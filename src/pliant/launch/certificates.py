"""Certificates for one job.

Question  How does a user without a certificate authority get the files for ``--tls-cert``, ``--tls-key`` and
          ``--tls-ca``?
Holds     A new authority signs one certificate, and its key is discarded: no other certificate can be made that the
          job's workers would trust. No file is overwritten; only its owner can read the key.
Source    X.509 (RFC 5280) by the ``cryptography`` package; docs/design/0011-trust.md.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from pliant.control.handshake import address_of
from pliant.errors import UsageError
from pliant.launch.run_directory import AUTHORITY

CERTIFICATE, KEY = "coordinator.pem", "coordinator.key"

ALWAYS = ("localhost", "127.0.0.1")
"""Names by which the owner's own workers reach a coordinator on loopback."""

SLACK = datetime.timedelta(hours=1)
"""The certificate is valid from this long before now, because clocks differ."""


def made(directory: Path, hosts: Sequence[str], days: int, now: datetime.datetime | None = None) -> list[str]:
    """Write the three files; returns lines that tell the user what to do with them."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise UsageError("certificates are made with the cryptography package; pip install 'pliant[tls]'") from None

    now = now or datetime.datetime.now(datetime.UTC)
    names = list(dict.fromkeys((*hosts, *ALWAYS)))
    alternatives = x509.SubjectAlternativeName([_name(each) for each in names])
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # A name of its own each time: with two authorities of one name a client would blame the signature.
    title = f"Pliant job {x509.random_serial_number():x}"[:40]
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Pliant coordinator")])

    def started(subject: x509.Name, public: ec.EllipticCurvePublicKey, ca: bool) -> x509.CertificateBuilder:
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not ca, key_cert_sign=ca, encipher_only=False, decipher_only=False, **usage
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    authority = started(issuer, authority_key.public_key(), ca=True).sign(authority_key, hashes.SHA256())
    certificate = (
        started(subject, key.public_key(), ca=False)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    _write(directory, {AUTHORITY: authority.public_bytes(pem), CERTIFICATE: certificate.public_bytes(pem), KEY: secret})
    until = (now + datetime.timedelta(days=days)).strftime("%Y-%m-%d")
    where = {name: directory / name for name in (AUTHORITY, CERTIFICATE, KEY)}
    return [
        f"made {where[AUTHORITY]}, {where[CERTIFICATE]} and {where[KEY]}, for {', '.join(names)}, until {until}",
        f"start the run:   pliant run --host {names[0]} --tls-cert {where[CERTIFICATE]} --tls-key {where[KEY]} "
        f"--tls-ca {where[AUTHORITY]} train.py",
        f"join it:         pliant run --join {address_of(names[0], 'PORT')} --token-file token "
        f"--tls-ca {AUTHORITY} train.py",
        f"joiners need copies of {AUTHORITY} and of the run's file `token`; {KEY} never leaves this machine",
    ]


def _name(host: str):
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    # Non-ASCII names need their encoded form, which is not ours to guess.
    if not host or not host.isascii() or any(sign in host for sign in " :/"):
        raise UsageError(f"--host {host!r} is no name or address of a machine; give it without a port")
    return x509.DNSName(host)


def _write(directory: Path, files: dict[str, bytes]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = [name for name in files if (directory / name).exists()]
        if there:
            raise UsageError(f"{directory / there[0]} is there already; give another directory, or remove it")
        for name, content in files.items():
            mode = 0o600 if name == KEY else 0o644
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; give another directory") from None
