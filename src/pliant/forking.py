"""What a forked child must not keep of its parent.

Question  How does a forked child, such as a loader's process, let go of its parent's sockets and groups?
Holds     Right after a fork, in the child, each registered object that still exists is dropped once. A copy of a socket
          that stayed open would hide the parent's death from its peers for seconds. Registering keeps nothing alive:
          the registry is as large as the number of registered objects that exist.
Source    ours; DESIGN, facts measured: forked loaders.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")

_registered: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def drop_in_children(owner: Owner, drop: Callable[[Owner], None]) -> None:
    """In a forked child call ``drop(owner)``; ``drop`` must not refer to the owner otherwise."""
    _register()
    _registered[owner] = drop


def close_in_children(own: socket.socket) -> None:
    """In a forked child close its copy of the socket; the parent's stays as it is."""
    drop_in_children(own, _close)


def _close(own: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # close() would wait for the files made of it.
        os.close(own.detach())


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    # An error of one keeps none of the others from being dropped.
    with contextlib.ExitStack() as stack:
        for owner, drop in list(_registered.items()):
            stack.callback(drop, owner)
        _registered.clear()
