"""The key-value store for the process group that is being formed.

Question  How do the members of an attempt learn of it, and exchange their addresses?
Holds     There is one attempt at a time, the last one announced. Only its members may put keys, up to a limit of bytes;
          keys are kept for members that reconnect. In a large group keys are sent together: each member gets one
          message per tick, not one per member.
Source    ours; docs/protocol.md, docs/design/0006-control.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from pliant.control import messages
from pliant.coordinator.connections import Connections
from pliant.core.membership.events import BreakEra, PlanEra, StartEra
from pliant.types import WorkerId

KEYS_BYTES = 64 << 20
"""Most bytes of keys and values for one group: a member puts about 150 bytes for each other member."""

AT_ONCE = 16
"""Up to this many members keys are sent one by one: forming is a chain of messages, and takes milliseconds."""


class StoreRelay:
    """Passes on the keys that members put to form their group."""

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
        """Announce a group to be formed, with the keys that its members have put so far."""
        if effect.attempt != self.attempt:
            # Older attempts are over: their keys are dropped.
            self.attempt, self._roster, self.keys, self._keys_bytes = effect.attempt, effect.roster, {}, 0
            self._unsent = {}
        self._workers.send(message, effect.to)
        self._send(self.keys, effect.to)

    def push(self, sender: WorkerId, put: messages.Put) -> str | None:
        """Pass a key on to the other members of its attempt; returns the reason if it is refused."""
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
        """Send the keys that have been collected."""
        keys, self._unsent = self._unsent, {}
        self._send(keys, self._roster)

    def _send(self, keys: dict[str, bytes], to: Iterable[WorkerId]) -> None:
        if keys:
            self._workers.send(messages.Push(self.attempt, keys), to)
