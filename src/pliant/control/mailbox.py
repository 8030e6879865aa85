"""The coordinator's latest orders to this worker.

Question  Which era should this worker be in, which one is planned, and is the run over?
Holds     Only the newest order counts, and none of an older coordinator (term). Reading is cheap and never blocks;
          every message wakes waiting threads. There are no sockets here: a link, or a simulated network, fills it.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pliant.control.messages import (
    Again,
    Broken,
    EraPlan,
    EraStart,
    FromCoordinator,
    Hold,
    Leave,
    Named,
    Push,
    Refuse,
    Stop,
    Void,
    Welcome,
    Written,
)
from pliant.errors import PliantError, Refused, RunEnded, Stopped


class Mailbox:
    """Receives messages, and returns the newest orders. Thread-safe."""

    def __init__(self, welcome: Welcome) -> None:
        self.changed = threading.Condition()
        self.worker = welcome.worker
        self.term = 0
        self.plan: EraPlan | None = None
        """the planned era, while it is neither in force nor overtaken"""
        self.start: EraStart | None = None
        """the era to enter at once"""
        self.broken_era = 0
        """every era up to this one is over"""
        self.broken_reason = ""
        self.voided_era = 0
        """planned eras up to this one do not come about"""
        self.written = 0
        """journal records that are on disk"""
        self.named: list[str] = []
        """checkpoints that exist, newest first"""
        self.leave: str | None = None
        """why this worker is asked to go"""
        self.evicted: str | None = None
        """why this worker was taken off the roster; it may come back as a newcomer"""
        self.trouble: PliantError | None = None
        self.on_group: Callable[[EraPlan | Broken], None] | None = None
        """called where messages arrive, in that thread, with a word about a group to come"""
        self._keys: dict[tuple[int, str], bytes] = {}
        self._oldest_attempt = 0
        self.welcome = welcome
        self.take(welcome)

    def take(self, message: FromCoordinator) -> None:
        """Note one message."""
        with self.changed:
            planned, broken_era = self.plan, self.broken_era
            self._take(message)
            is_new = (message is self.plan and message is not planned) or self.broken_era > broken_era
            self.changed.notify_all()
        if is_new and isinstance(message, EraPlan | Broken) and self.on_group is not None:
            self.on_group(message)

    def _take(self, message: FromCoordinator) -> None:
        match message:
            case Welcome(term=term, written=written):
                if term > self.term:
                    # What another coordinator had planned is void.
                    self.term, self.plan = term, None
                self.worker = message.worker
                self.written = max(self.written, written)
            case EraStart(term=term, era=era):
                if term >= self.term and (self.start is None or era > self.start.era):
                    self.start, self.plan = message, None
                    self._forget_keys(message.attempt)
            case EraPlan(term=term, era=era):
                # Told again after a reconnection it is the same plan.
                known = max(self.broken_era, self.voided_era)
                if term >= self.term and era > known and message != self.plan:
                    self.plan = message
            case Void(term=term, era=era):
                if term >= self.term and era > self.voided_era:
                    self.voided_era = era
                    if self.plan is not None and self.plan.era <= era:
                        self.plan = None
            case Broken(term=term, era=era, reason=reason):
                if term >= self.term and era > self.broken_era:
                    self.broken_era, self.broken_reason, self.plan = era, reason, None
            case Push(attempt=attempt, keys=keys):
                if attempt >= self._oldest_attempt:
                    self._keys.update({(attempt, key): value for key, value in keys.items()})
            case Again() | Hold():
                # The link's own.
                pass
            case Written(count=count):
                self.written = max(self.written, count)
            case Named(names=names):
                self.named = names
            case Leave(reason=reason):
                self.leave = reason
            case Refuse(reason=reason, again=True):
                self.evicted = reason
            case Refuse(reason=reason):
                self.trouble = self.trouble or Refused(reason)
            case Stop(reason=reason, completed=completed):
                self.trouble = self.trouble or Stopped(reason, completed=completed)

    def fulfilled(self, plan: EraPlan) -> None:
        """The planned era is in force."""
        with self.changed:
            if self.plan is plan:
                self.plan = None
            self._forget_keys(plan.attempt)

    def _forget_keys(self, attempt: int) -> None:
        self._oldest_attempt = attempt
        self._keys = {key: value for key, value in self._keys.items() if key[0] >= attempt}

    def set_key(self, attempt: int, key: str, value: bytes) -> None:
        """A key this worker has put itself."""
        with self.changed:
            self._keys[attempt, key] = value
            self.changed.notify_all()

    def key(self, attempt: int, key: str, timeout_s: float) -> bytes:
        """The value of a key; blocks until a member of the attempt has put it."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while (value := self._keys.get((attempt, key))) is None:
                self.check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"waited {timeout_s:g} s for {key!r}")
                self.changed.wait(left_s)
            return value

    def check(self) -> None:
        """Raise if the run is over for this worker."""
        if self.trouble is not None:
            raise self.trouble.again()

    def lose(self, reason: str) -> None:
        """The coordinator is gone for good."""
        with self.changed:
            self.trouble = self.trouble or RunEnded(reason)
            self.changed.notify_all()
