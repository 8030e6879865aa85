"""What it takes to be let in by a coordinator.

Question  What do all who connect have to know, and what do they say when they are not let in?
Holds     Plain values and texts, for workers, launchers and the coordinator alike.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from pliant.errors import Refused, UsageError

WRONG_TOKEN = 4403
"""The code with which the coordinator closes the WebSocket of one that does not know the token."""

INCOMING_BYTES = 16 << 20
"""The largest frame that is taken from a coordinator: an era of some 100,000 members."""


def address_of(host: str, port: int | str) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_in(address: str) -> str:
    """The host of an address, without brackets."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def check_brackets(address: str) -> None:
    """Refuse an IPv6 address whose port cannot be told from it."""
    host, _, port = address.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(f"{address!r} is no address; put an IPv6 one in brackets, e.g. [{host.strip('[]')}]:{port}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The coordinator's address and token; with a ``context`` it uses TLS."""

    address: str
    token: str
    context: ssl.SSLContext | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Host and port; ``ValueError`` if the address has another form."""
        return host_in(self.address), int(self.address.rpartition(":")[2])

    def impostor(self) -> Refused:
        """Who answers has not proven that it knows the token."""
        return Refused(
            f"what answers at {self.address} does not know the job token: it is no coordinator of this run, "
            "so nothing was said to it"
        )
