"""Three hosts on one machine, joined by a switch, whose links can be cut.

Question  How is a host cut off from the others, and joined again?
Holds     Only namespaces made here are touched, and they are removed at the end, whatever happens. Needs root, ``ip``
          and ``tc``. A cut link is down at the host: what is sent over it is lost, and connections go on when it is up.
Source    ip-netns(8), veth(4), setns(2).
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.namespaces import INTERFACE, inside, ip, joined

SUBNET = "10.211.79"
_CLONE_NEWNET = 0x40000000

Answer = TypeVar("Answer")


class Here:
    """No network of our own: one host, which nothing is cut off from."""

    hosts: tuple[str, ...] = ("",)
    address = "127.0.0.1"

    def at(self, host: str, line: list[str]) -> list[str]:
        return line

    def ask(self, question: Callable[[], Answer]) -> Answer:
        return question()

    def cut(self, host: str) -> None:
        raise AssertionError("there is no link")

    restore = cut

    def listening(self) -> list[str]:
        return []


class Hosts(Here):
    """Namespaces; the run's owner is on the first."""

    address = f"{SUBNET}.1"

    def __init__(self, names: tuple[str, ...], inside_first: ThreadPoolExecutor) -> None:
        self.hosts = names
        self._inside_first = inside_first

    def at(self, host: str, line: list[str]) -> list[str]:
        """The command line as it is run on the host: gloo takes the link, not loopback."""
        return inside(host, ["env", f"GLOO_SOCKET_IFNAME={INTERFACE}", *line])

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Answered by a thread that is on the first host."""
        return self._inside_first.submit(question).result()

    def cut(self, host: str) -> None:
        ip("-n", host, "link", "set", INTERFACE, "down")

    def restore(self, host: str) -> None:
        ip("-n", host, "link", "set", INTERFACE, "up")

    def listening(self) -> list[str]:
        """What still listens on any host."""
        found: list[str] = []
        for host in self.hosts:
            for table in ("tcp", "tcp6"):
                line = inside(host, ["cat", f"/proc/net/{table}"])
                rows = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
                found += [f"{host} {row.split()[1]}" for row in rows if row.split()[3] == "0A"]
        return found


def _enter(namespace: str) -> None:
    """Put this thread, and no other, into the namespace."""
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts; ``NoNetwork`` where that cannot be."""
    with (
        joined(count, SUBNET) as (_, names),
        ThreadPoolExecutor(2, initializer=_enter, initargs=(names[0],)) as first,
    ):
        yield Hosts(names, first)
