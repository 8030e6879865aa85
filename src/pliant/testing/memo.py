"""Pure decisions, computed once for all workers that are at the same point.

Question  How is a group of four simulated without deciding everything four times?
Holds     Only pure functions of frozen values are remembered: workers whose states are equal share the answer, workers
          whose states differ do not. Nothing outlives the ``with`` block.
Source    ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pliant.core import allowance, consistency, rounds, tickets
from pliant.core.group_state import GroupState
from pliant.core.tickets import Ticket


@contextmanager
def remembered() -> Iterator[None]:
    """Remember the decisions of ``core.rounds``, digests, allowances and the tickets' contents."""
    originals = rounds.settled, rounds.opened, consistency.digest, allowance.allowance, tickets.unpack
    unpacked: dict[bytes, tuple[Ticket, int]] = {}
    unpack = tickets.unpack

    def seen(data: bytes) -> tuple[Ticket, int]:
        found = unpacked.get(data)
        if found is None:
            found = unpacked[data] = unpack(data)
        return found

    rounds.settled, rounds.opened = _once(rounds.settled), _once(rounds.opened)
    consistency.digest, allowance.allowance = _of_state(consistency.digest), _of_state(allowance.allowance)
    tickets.unpack = seen
    try:
        yield
    finally:
        rounds.settled, rounds.opened, consistency.digest, allowance.allowance, tickets.unpack = originals


def _of_state(ask: Callable[..., Any]) -> Callable[..., Any]:
    """``ask`` of a state and some numbers, once for each."""
    # The states are kept, so that no other one can have their identity.
    known: dict[tuple[int, ...], tuple[GroupState, Any]] = {}

    def answer(group: GroupState, *numbers: int) -> Any:
        key = (id(group), *numbers)
        found = known.get(key)
        if found is None:
            found = known[key] = group, ask(group, *numbers)
        return found[1]

    return answer


def _once(decide: Callable[[GroupState, Sequence[Ticket]], Any]) -> Callable[[GroupState, Sequence[Ticket]], Any]:
    # The arguments are kept, so that no other value can have their identity.
    decided: dict[tuple[int, ...], tuple[Any, ...]] = {}
    known: dict[tuple[int, int], list[GroupState]] = {}

    def decision(group: GroupState, handed_in: Sequence[Ticket]) -> Any:
        key = (id(group), *map(id, handed_in))
        found = decided.get(key)
        if found is None:
            # An equal state that was made elsewhere: from here on both go on with the same one.
            equals = known.setdefault((group.era, group.exchange), [])
            same = next((other for other in equals if other == group), None)
            if same is None:
                same = group
                equals.append(group)
            shared = (id(same), *map(id, handed_in))
            if shared not in decided:
                decided[shared] = decide(same, handed_in), same, handed_in
            found = decided[key] = decided[shared][0], group, handed_in
        return found[0]

    return decision
