"""What a worker may ask of a group, whatever the group is made of.

Question  Which operations does the group of an era offer, and what may a caller rely on?
Holds     All members start the same operations in the same order; each operation runs after the earlier ones of its
          member. Sums are made in place. Only ``broadcast`` and ``told`` block. A failed operation raises
          ``RuntimeError``, where it is started or where its tickets are read, and never another error.
Source    docs/design/0005-exchange.md. ``tests/contract/test_channels.py`` holds every implementation to it:
          ``gloo.Gloo``, ``gloo.Alone``, ``nccl.Nccl`` and the simulator's ``VirtualGroup``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Summation(Protocol):
    """One exchange, running or over."""

    @property
    def over(self) -> bool:
        """Whether the exchange has completed or failed: its tensors are not accessed any more."""
        ...

    @property
    def seconds(self) -> float:
        """Time from hand-in until a poll saw that it was over."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, for a limited time; returns ``over``."""
        ...

    def tickets(self) -> list[bytes]:
        """All tickets, in the order of the roster; raises the error if the exchange failed. Only once it is over.

        Empty for an exchange that has no tickets (``add_up``).
        """
        ...


class Channel(Protocol):
    """One member's end of a group."""

    @property
    def members(self) -> int:
        """How many workers are in the group."""
        ...

    @property
    def place(self) -> int:
        """This worker's index in the roster."""
        ...

    def exchange(self, ticket: bytes, sums: Sequence[Tensor]) -> Summation:
        """All-gather the tickets, which have one length, and all-reduce ``sums`` in place; returns at once."""
        ...

    def gather(self, ticket: bytes) -> Summation:
        """The first half of ``exchange``, for a caller that needs the tickets before it knows the sums."""
        ...

    def add_up(self, sums: Sequence[Tensor]) -> Summation:
        """The second half of ``exchange``; it has no tickets."""
        ...

    def begin(self, ticket: bytes) -> Summation:
        """Start an exchange with only the ticket; tensors to sum follow by ``go_on``."""
        ...

    def go_on(self, summation: Summation, sums: Sequence[Tensor], *, last: bool = False) -> None:
        """All-reduce these tensors, too, as a part of what ``begin`` returned; it is not over before the ``last``."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0, check: Callable[[], None] | None = None) -> None:
        """Overwrite the tensor with that of the member at index ``root``; blocks. ``check`` may end that by raising."""
        ...

    def tell(self, payload: bytes, root: int) -> None:
        """Send bytes to the members that call ``told``; all members that have them call this. Returns at once."""
        ...

    def told(self, root: int, check: Callable[[], None]) -> bytes:
        """Receive the bytes of the member at index ``root``; blocks. ``check`` may end that by raising."""
        ...

    def leave(self) -> None:
        """Leave the group at any moment, also twice: what is under way fails, here and at the other members."""
        ...
