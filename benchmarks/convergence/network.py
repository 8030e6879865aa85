"""Four workers behind slow links: a namespace each, joined by one switch.

Question  How slow must the links be for a sum of this model's gradients to take as long as two micro-batches?
Holds     The same links for all systems. Each worker's link is bounded in both directions, the switch is not. A ring
          all-reduce of G bytes among n sends 2·(n − 1)/n·G over each link.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.convergence.course import NEARLY_EQUAL_MS, WORKERS
from benchmarks.namespaces import INTERFACE, inside, joined, port, shape

SUBNET = "10.211.78"
GRADIENT_BYTES = 4 * 172_554
SUM_S = 2 * NEARLY_EQUAL_MS[0] / 1000
HEADERS = 1.05  # Ethernet, IP and TCP around each 1448 bytes of payload
BURST = "32kb"  # a twentieth of the gradient goes through at once after a pause


def rate_mbit(gradient_bytes: int = GRADIENT_BYTES, sum_s: float = SUM_S, workers: int = WORKERS) -> int:
    """The links' rate in megabits per second."""
    return round(2 * (workers - 1) / workers * gradient_bytes * HEADERS * 8 / sum_s / 1e6)


@dataclass(frozen=True, slots=True)
class Star:
    """The workers' namespaces, and their addresses."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def at(self, index: int, line: list[str]) -> list[str]:
        """The command line as worker ``index`` runs it: gloo takes the link, not loopback."""
        return inside(self.names[index], ["env", f"GLOO_SOCKET_IFNAME={INTERFACE}", *line])


@contextmanager
def star(workers: int = WORKERS) -> Iterator[Star]:
    """One namespace per worker, and one with the switch; ``NoNetwork`` where that cannot be."""
    rate = f"{rate_mbit()}mbit"
    with joined(workers, SUBNET) as (switch, names):
        for index, name in enumerate(names):
            shape(name, INTERFACE, rate, BURST)
            shape(switch, port(index), rate, BURST)
        yield Star(names, tuple(f"{SUBNET}.{index + 1}" for index in range(workers)))
