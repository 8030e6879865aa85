"""Pure decisions, computed once for all workers in the same state.

Question  How is a group of four simulated without making every decision four times?
Holds     Only pure functions of frozen values are cached: workers with equal states share the result, workers with
          different states do not. The cache ends with the ``with`` block.
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
    """Cache the decisions of ``core.rounds``, digests, allowances and the contents of tickets."""
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
    # The arguments are kept, so that no other value can get their ``id``.
    decided: dict[tuple[int, ...], tuple[Any, ...]] = {}
    known: dict[tuple[int, int], list[GroupState]] = {}

    def decision(group: GroupState, handed_in: Sequence[Ticket]) -> Any:
        key = (id(group), *map(id, handed_in))
        found = decided.get(key)
        if found is None:
            # An equal state of another worker: from here on both use the same object.
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
