"""Network namespaces of our own, with shaped interfaces.

Question  How does one machine give processes a network that is slower than its loopback?
Holds     Only namespaces made here are touched, and they are removed at the end, whatever happens. Needs root, ``ip``
          and ``tc``; where they are absent ``NoNetwork`` says so.
Source    ip-netns(8); token bucket filter, tc-tbf(8).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "wire"
"""of a host, to the switch"""


class NoNetwork(Exception):
    """The network could not be made, and why."""


def _done(line: list[str]) -> None:
    outcome = subprocess.run(line, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise NoNetwork(f"{' '.join(line)}: {outcome.stderr.strip()}")


def ip(*words: str) -> None:
    _done(["ip", *words])


def inside(namespace: str, line: list[str]) -> list[str]:
    """The command line that runs ``line`` in the namespace, as the same process."""
    return ["ip", "netns", "exec", namespace, *line]


def shape(namespace: str, interface: str, rate: str, burst: str) -> None:
    """Bound what leaves by this interface."""
    words = ["root", "tbf", "rate", rate, "burst", burst, "latency", "50ms"]
    _done(inside(namespace, ["tc", "qdisc", "add", "dev", interface, *words]))


@contextmanager
def namespaces(names: list[str]) -> Iterator[None]:
    """New namespaces of these names, each with a loopback."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise NoNetwork("network namespaces need root, ip and tc")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def port(index: int) -> str:
    """The switch's interface for a host."""
    return f"port{index}"


@contextmanager
def joined(count: int, subnet: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A switch and so many hosts at it, numbered from 1 in ``subnet``: their namespaces."""
    switch = f"pliant-{os.getpid()}-switch"
    names = tuple(f"pliant-{os.getpid()}-{index}" for index in range(count))
    with namespaces([switch, *names]):
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for index, name in enumerate(names):
            ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port(index), "netns", switch)
            ip("-n", switch, "link", "set", port(index), "master", "switch")
            ip("-n", switch, "link", "set", port(index), "up")
            ip("-n", name, "address", "add", f"{subnet}.{index + 1}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
        yield switch, names
