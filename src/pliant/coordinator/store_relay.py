"""The group that is being formed.

Question  How do the members of an attempt hear of it, and of each other?
Holds     There is one attempt at a time, the last one announced. Only its members put keys, and not more than a group
          can need; a key is kept for those who come back to the attempt. In a large group keys travel together: each
          member gets one message per tick, not one per member.
Source    ours; docs/protocol.md, docs/design/0006-control.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from pliant.control import messages
from pliant.coordinator.connections import Connections
from pliant.core.membership.events import BreakEra, PlanEra, StartEra
from pliant.types import WorkerId

KEYS_BYTES = 64 << 20
"""Of the keys under which one group is formed: a member puts some 150 bytes for each other one."""

AT_ONCE = 16
"""Members of a group whose keys are handed on one by one: forming it is a chain of messages, and takes milliseconds."""


class StoreRelay:
    """Passes on what members say to form their group."""

    def __init__(self, workers: Connections[WorkerId]) -> None:
        self.attempt = 0
        self.keys: dict[str, bytes] = {}
        self._workers = workers
        self._roster: tuple[WorkerId, ...] = ()
        self._keys_bytes = 0
        self._unsent: dict[str, bytes] = {}

    def invite(
        self, message: messages.EraStart | messages.EraPlan | messages.Broken, effect: StartEra | PlanEra | BreakEra
    ) -> None:
        """Tell of a group to be formed, and what its members have said about it so far."""
        if effect.attempt != self.attempt:
            # Nothing that is formed now can be of an older attempt.
            self.attempt, self._roster, self.keys, self._keys_bytes = effect.attempt, effect.roster, {}, 0
            self._unsent = {}
        self._workers.send(message, effect.to)
        self._send(self.keys, effect.to)

    def push(self, sender: WorkerId, put: messages.Put) -> str | None:
        """Hand a key on to the other members of its attempt; or why it is refused."""
        if put.attempt != self.attempt or sender not in self._roster:
            return None
        self.keys[put.key] = put.value
        self._keys_bytes += len(put.key) + len(put.value)
        if self._keys_bytes > KEYS_BYTES:
            del self.keys[put.key]
            return f"put more than {KEYS_BYTES} bytes to form one group"
        if len(self._roster) <= AT_ONCE:
            self._send({put.key: put.value}, (name for name in self._roster if name != sender))
            return None
        self._unsent[put.key] = put.value
        if len(self._unsent) >= len(self._roster):
            self.flush()
        return None

    def flush(self) -> None:
        """Hand on what has come together."""
        keys, self._unsent = self._unsent, {}
        self._send(keys, self._roster)

    def _send(self, keys: dict[str, bytes], to: Iterable[WorkerId]) -> None:
        if keys:
            self._workers.send(messages.Push(self.attempt, keys), to)
