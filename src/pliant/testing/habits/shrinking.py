"""The plainest script that still fails.

Question  Which habits of a failing script have nothing to do with its failure?
Holds     Every step is plainer than the last one: a field as in the plainest script, one event or one worker less.
          A failure that depends on timing may stay larger than it need be; it never becomes another script's.
Source    delta debugging (Zeller and Hildebrandt 2002), one part at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from pliant.testing.habits.values import Habits

_PLAIN = Habits()


def shrunk(habits: Habits, fails: Callable[[Habits], bool]) -> Habits:
    """The plainest one that is reached by steps which all fail."""
    while True:
        found = next((plainer for plainer in candidates(habits) if fails(plainer)), None)
        if found is None:
            return habits
        habits = found


def candidates(habits: Habits) -> Iterator[Habits]:
    """What is one step plainer."""
    for place in range(len(habits.events)):
        yield replace(habits, events=habits.events[:place] + habits.events[place + 1 :])
    for place in range(habits.workers):
        if habits.workers > 1:
            yield _without(habits, place)
    if habits.sizes != _PLAIN.sizes * habits.workers:
        yield replace(habits, sizes=_PLAIN.sizes * habits.workers)
    for place in range(len(habits.faults)):
        yield replace(habits, faults=habits.faults[:place] + habits.faults[place + 1 :])
    for name in msgspec.structs.asdict(habits):
        if name not in ("events", "sizes", "faults") and getattr(habits, name) != getattr(_PLAIN, name):
            yield replace(habits, **{name: getattr(_PLAIN, name)})


def _without(habits: Habits, place: int) -> Habits:
    """One worker less; what it did alone, the first one does."""
    events = (replace(e, place=0 if e.place == place else e.place - (e.place > place)) for e in habits.events)
    paces = habits.paces[:place] + habits.paces[place + 1 :]
    return replace(habits, sizes=habits.sizes[:place] + habits.sizes[place + 1 :], paces=paces, events=tuple(events))
