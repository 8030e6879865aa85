"""The sockets of one gloo device: finding them, cutting them, keeping them out of forked children.

Question  How is a group taken down immediately, although gloo itself waits for answers from the others?
Holds     A cut connection fails every operation on it, here and at the peer. Only sockets that the device's own epoll
          instance watches are touched, each identified by its inode, so never one of the user's. The listening
          socket is never cut (gloo ends the process when ``accept`` fails); it is closed with the device. A forked
          child holds no copy. If ``/proc`` does not show the sockets, nothing is cut, and ``cut`` returns False.
Source    ours; /proc/PID/fdinfo of epoll instances (proc(5), since Linux 3.8; inodes since 4.13).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pliant import forking

_EPOLL = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)\b", re.MULTILINE)
# Linux's SIOCOUTQ: bytes of a TCP stream that the peer's kernel has not acknowledged.
_SIOCOUTQ = 0x5411

_making = threading.Lock()


class GlooSockets:
    """One gloo device and its sockets. Each group has its own device, so the sockets are the group's."""

    def __init__(self, address: str) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave most of it out
        with _making:
            before = _all_watched()
            # Many hosts resolve their own name to 127.0.1.1: use the address of the connection to the coordinator.
            self.device: Any = gloo.create_device(hostname=address)
            new = [(loop, fd, inode) for loop, fd, inode in _all_watched() - before if _listens(fd, inode, address)]
        # If there are two, another thread has just opened a server of its own, and gloo's cannot be told from it.
        self._loop, self._listener = (new[0][0], new[0][2]) if len(new) == 1 else (None, 0)
        # A forked loader that kept copies of the sockets would hide its parent's death from the peers.
        forking.drop_in_children(self, GlooSockets.close_in_child)

    def cut(self) -> bool:
        """Shut down reading on all connections, upon which gloo closes them; False if they are not known."""
        if self._loop is None:
            return False
        for fd, inode in self._connections():
            with _Borrowed(fd, inode) as connection:
                if connection is not None:
                    _shut_down(connection)
        return True

    def unsent(self) -> int:
        """Bytes sent that the peers' machines have not acknowledged yet."""
        import fcntl  # not on Windows, where there is no epoll instance either

        total = 0
        for fd, inode in self._connections():
            with _Borrowed(fd, inode) as connection:
                if connection is not None:
                    answer = fcntl.ioctl(connection.fileno(), _SIOCOUTQ, struct.pack("i", 0))
                    total += struct.unpack("i", answer)[0]
        return total

    def release(self) -> None:
        """The device goes: its numbers may be anybody's from now on."""
        self._loop = self.device = None

    def close_in_child(self) -> None:
        """Close this process's copies of the sockets; the parent's stay as they are."""
        if self._loop is not None:
            for fd, inode in _watched(self._loop):
                if _is_socket(fd, inode):
                    os.close(fd)

    def _connections(self) -> list[tuple[int, int]]:
        watched = _watched(self._loop) if self._loop is not None else []
        return [(fd, inode) for fd, inode in watched if inode != self._listener and _is_socket(fd, inode)]


class _Borrowed:
    """A duplicate of a descriptor, if that is still the socket: the number may be reused at any moment."""

    def __init__(self, fd: int, inode: int) -> None:
        self._copy: socket.socket | None = None
        # Also checked before duplicating: closing a duplicate of a locked file would drop its owner's locks.
        if not _is_socket(fd, inode):
            return
        try:
            copy = os.dup(fd)
        except OSError:
            return
        if _is_socket(copy, inode):
            self._copy = socket.socket(fileno=copy)
        else:
            os.close(copy)

    def __enter__(self) -> socket.socket | None:
        return self._copy

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            self._copy.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer closed it first
        # Not for writing: gloo never ends an operation whose write fails before its read.
        connection.shutdown(socket.SHUT_RD)


def _is_socket(fd: int, inode: int) -> bool:
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def _listens(fd: int, inode: int, address: str) -> bool:
    """Whether it is a listening TCP socket at ``address``."""
    with _Borrowed(fd, inode) as candidate:
        if candidate is None or candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        bound = candidate.getsockname()[0]
    try:
        return any(bound == found[4][0] for found in socket.getaddrinfo(address, None))
    except OSError:
        return False


def _all_watched() -> set[tuple[int, int, int]]:
    """(epoll instance, descriptor, inode) of everything any epoll instance of this process watches."""
    try:
        numbers = os.listdir("/proc/self/fd")  # noqa: PTH208 (a Path per descriptor costs more than the rest)
    except OSError:
        return set()
    return {(int(loop), fd, inode) for loop in numbers if _is_epoll(loop) for fd, inode in _watched(int(loop))}


def _is_epoll(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == _EPOLL  # noqa: PTH115
    except OSError:
        return False


def _watched(loop: int) -> list[tuple[int, int]]:
    """(descriptor, inode) of what an epoll instance watches."""
    try:
        text = Path(f"/proc/self/fdinfo/{loop}").read_text()
    except OSError:
        return []
    return [(int(fd), int(inode, 16)) for fd, inode in _WATCHED.findall(text)]
