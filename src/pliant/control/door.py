"""What it takes to be let in by a coordinator.

Question  What do all who connect have to know, and what do they say when they are not let in?
Holds     Plain values and texts, for workers, launchers and the coordinator alike.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from pliant.errors import Refused

WRONG_TOKEN = 4403
"""The code with which the coordinator closes the WebSocket of one that does not know the token."""

INCOMING_BYTES = 16 << 20
"""The largest frame that is taken from a coordinator: an era of some 100,000 members."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where the coordinator is, and what opens it; with a ``context`` it speaks TLS."""

    address: str
    token: str
    context: ssl.SSLContext | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Host and port; ``ValueError`` if the address has another form."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def impostor(self) -> Refused:
        """Who answers has not proven that it knows the token."""
        return Refused(
            f"what answers at {self.address} does not know the job token: it is no coordinator of this run, "
            "so nothing was said to it"
        )
