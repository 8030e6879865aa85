"""Limits on unauthenticated connections and wrong proofs at the control port.

Question  How does a port that strangers can reach stay usable for clients that know the token?
Holds     Unauthenticated connections are limited in bytes, time and number, per address and in all. A further one
          replaces the oldest, so that idle ones cannot shut out others. A right proof is always accepted: if an address
          could be blocked, a stranger behind it could block the workers there. Wrong proofs are answered late once an
          address has used up its tries, which also bounds the log.
Source    ours; docs/design/0011-trust.md. Token bucket.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

PROOF_S = 10.0
"""Who connects proves itself within a round trip; a coordinator on a busy machine needs seconds for its part."""

UNPROVEN, UNPROVEN_OF_ONE = 512, 256
"""Connections without a proof, in all and of one address: twice the workers that may start on one machine at once."""

CONNECTIONS = 4096
"""All connections."""

TRIES, TRY_EVERY_S = 10.0, 1.0
"""Wrong proofs that an address has free, and how soon it has one more. A person with the wrong file needs three."""

LATE_S = 1.0
"""How late further wrong ones are answered."""

ADDRESSES = 1024
"""Addresses whose wrong proofs are remembered."""


class Closing(Protocol):
    """A transport that can be closed."""

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass(slots=True)
class _Bucket:
    tries: float
    at_s: float
    unsaid: int = 0
    """wrong proofs since the last line in the log"""


class ConnectionLimits:
    """Counts connections and wrong proofs. Not thread-safe."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._unproven: dict[Closing, str] = {}
        """in the order of their coming"""
        self._proven: set[Closing] = set()
        self._buckets: dict[str, _Bucket] = {}

    def opened(self, connection: Closing, address: str) -> bool:
        """Take note of a connection; False if there is no room even for those who know the token."""
        if len(self._proven) + UNPROVEN >= CONNECTIONS:
            connection.abort()
            return False
        place = _place(address)
        of_one = [each for each, other in self._unproven.items() if other == place]
        if len(of_one) >= UNPROVEN_OF_ONE:
            self._drop(of_one[0])
        elif len(self._unproven) >= UNPROVEN:
            self._drop(next(iter(self._unproven)))
        self._unproven[connection] = place
        return True

    def proven(self, connection: Closing) -> None:
        """It knows the token."""
        if self._unproven.pop(connection, None) is not None:
            self._proven.add(connection)

    def closed(self, connection: Closing) -> None:
        """It is gone."""
        self._unproven.pop(connection, None)
        self._proven.discard(connection)

    def expire(self, connection: Closing) -> None:
        """Its time without a proof is over."""
        if connection in self._unproven:
            self._drop(connection)

    def failed(self, address: str, what: str) -> float:
        """Note a wrong proof; how many seconds the answer is to be held back."""
        place = _place(address)
        bucket = self._bucket(place)
        if bucket.tries >= 1.0:
            bucket.tries -= 1.0
            more = f" (and {bucket.unsaid} more from there before)" if bucket.unsaid else ""
            bucket.unsaid = 0
            self._log(f"refused {what} from {address}: it does not know the job token{more}")
            return 0.0
        bucket.unsaid += 1
        return LATE_S

    def note(self, text: str, address: str) -> None:
        """Something else that is wrong with a stranger, in the log as long as it has tries."""
        bucket = self._bucket(_place(address))
        if bucket.tries >= 1.0:
            bucket.tries -= 1.0
            self._log(text)

    def _drop(self, connection: Closing) -> None:
        self.closed(connection)
        connection.abort()

    def _bucket(self, place: str) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.pop(place, None) or _Bucket(TRIES, now_s)
        bucket.tries = min(TRIES, bucket.tries + (now_s - bucket.at_s) / TRY_EVERY_S)
        bucket.at_s = now_s
        if len(self._buckets) >= ADDRESSES:
            # The one that was wrong longest ago.
            del self._buckets[next(iter(self._buckets))]
        self._buckets[place] = bucket
        return bucket


def _place(address: str) -> str:
    """What counts as one: an IPv4 address, or the 64-bit network of an IPv6 one, which is one customer's."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address
