"""Functions that the script has registered with ``on_update`` and ``on_roster``.

Question  When does such a function run, and on which state?
Holds     ``on_update`` is called once for each update, in order, on every worker that holds the whole state and whose
          script is in the loop. It is called after the update is applied and before anything more is handed in: nothing
          of this loop is in flight, so that all of them open an ``evaluate`` in it at the same place. The model shows
          the plain weights and the group's buffers; the function must leave the weights as they are.
          ``on_roster`` is called between two exchanges.
Source    ours; docs/design/0016-updates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pliant.core.group_state import GroupState
from pliant.core.rounds import Settled
from pliant.errors import UsageError
from pliant.types import WorkerId
from pliant.worker.poll import Poller
from pliant.worker.training import Training
from pliant.worker.worker_state import WorkerState

_CHANGED = (
    "a function of on_update has changed the weights: workers that are just taking the state over would not follow; "
    "change them in optimizer.register_step_post_hook(…), which runs wherever the update is made"
)


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the weights, as ``on_update`` gets it. Equal on all workers."""

    round: int
    """the round that it was made in; numbers of skipped and void rounds are passed over"""
    updates: int
    """updates so far, this one included"""
    samples: int
    """training samples so far, those of this update included"""
    loss: float
    """the mean loss of this update's samples; NaN where they had no weight"""
    grad_norm: float
    """the norm of the mean gradient before clipping"""
    rates: tuple[float, ...]
    """the learning rate of each parameter group that this update was made with"""
    ends_epoch: bool
    """the loop over batches ends with this update"""


OnUpdate = Callable[[Update], Any]
OnRoster = Callable[[tuple[WorkerId, ...], tuple[WorkerId, ...]], Any]


def told(outcome: Settled, group: GroupState, grad_norm: float, rates: tuple[float, ...]) -> Update:
    """The ``Update`` for an update that led to ``group``."""
    return Update(
        round=outcome.round,
        updates=group.updates,
        samples=group.samples,
        loss=math.nan if outcome.loss is None else outcome.loss,
        grad_norm=grad_norm,
        rates=rates,
        ends_epoch=outcome.ended,
    )


class Registered:
    """The functions that a script has registered, and the calls that are refused inside them."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._on_update: list[OnUpdate] = []
        self._on_roster: list[OnRoster] = []
        self.inside = ""
        """the name of the decorator whose functions are running"""

    def add_on_update(self, function: OnUpdate) -> None:
        """Call it for each update from now on, after the functions that were registered before."""
        self._on_update.append(function)
        self._training.takes_norm = True

    def add_on_roster(self, function: OnRoster) -> None:
        """Call it for each change of the roster from now on."""
        self._on_roster.append(function)

    @property
    def follow_updates(self) -> bool:
        """Whether any function is registered with ``on_update``."""
        return bool(self._on_update)

    def refuse(self, verb: str) -> None:
        """Raise if ``verb`` is called inside a registered function in which it cannot work."""
        if not self.inside:
            return
        if verb != "evaluate":
            raise UsageError(f"{verb} was called in a function of {self.inside}: call it in the loop over batches")
        if self.inside == "on_roster":
            raise UsageError(
                "evaluate was called in a function of on_roster, which workers call at different moments: "
                "call it in on_update or between the loops"
            )

    @contextmanager
    def _running(self, name: str) -> Generator[None]:
        self.inside = name
        try:
            yield
        finally:
            self.inside = ""


class ReplayedHooks(Registered):
    """The functions of a script that is replayed: the journal says when each update was made."""

    def call(self, update: Update) -> None:
        """Call the functions of ``on_update``."""
        with self._running("on_update"), self._training.plain():
            for function in self._on_update:
                function(update)


class Hooks(Registered):
    """The functions of a worker's script, and when they are called."""

    def __init__(self, member: WorkerState, lookout: Poller) -> None:
        super().__init__(member.training)
        self._member = member
        self._lookout = lookout
        self._roster: tuple[WorkerId, ...] = ()
        """the roster at the last call of ``on_roster``"""
        self.gone_on = False
        """the others have called theirs, and none of them has opened an ``evaluate`` in it"""
        self._pending: Update | None = None
        self._exchange = 0
        """the exchange in which the pending update's round was settled"""
        self._keeps_late = False
        """another worker may ask for the user's state of that moment, which this one is still to receive itself"""
        self._then: Callable[[], None] = lambda: None
        self._writes = True
        """a function may write to the weights and put them back: compare them before and after"""

    def add_on_update(self, function: OnUpdate) -> None:
        super().add_on_update(function)
        self._writes = self._lookout.follows_updates = True

    # -- updates

    def note(self, outcome: Settled, rates: tuple[float, ...], then: Callable[[], None]) -> None:
        """An update was applied here: its functions are due, and ``then`` is called after them."""
        member = self._member
        self._exchange = member.group.exchange
        self._pending = told(outcome, member.group, member.training.grad_norm, rates)
        self._then = then
        self._lookout.in_hook = True
        member.users_state.install_restored(member.script.calls)
        if member.fresh:
            member.users_state.keep_before_hooks(self._exchange)
        self._keeps_late = not member.reception.holds_all and bool(member.fresh - {member.me})

    @property
    def due(self) -> bool:
        """Whether functions are still to be called for the last update."""
        return self._pending is not None

    def call(self, *, gone_on: bool = False) -> None:
        """Call the functions that are due. ``gone_on``: the others have, and none has opened an ``evaluate``."""
        update, member = self._pending, self._member
        if update is None:
            return
        if not member.follows:
            # If the era ends meanwhile, they are still due in the next one.
            self._take_users_state()
            if self._keeps_late:
                # The worker that has sent it here may be lost before it has sent it to the others.
                member.users_state.keep_before_hooks(self._exchange)
        self._pending = None
        if member.follows:
            self._lookout.in_hook = False
            return
        # A member without samples runs no loop body: its calls are counted from here on.
        member.script.draws()
        if update.ends_epoch:
            member.script.ended_in_body()
        self.gone_on = gone_on
        with self._running("on_update"):
            self._tell(update)
        self._then()

    def _tell(self, update: Update) -> None:
        training = self._member.training
        with training.plain():
            before = training.fingerprint.whole() if self._writes else None
            versions = _versions(training.parameters)
            # Weights that the function swaps in for a while are not handed on to newcomers.
            self._lookout.swapped = lambda: _versions(training.parameters) != versions
            for function in self._on_update:
                function(update)
            if not self._member.follows and _versions(training.parameters) != versions:
                # Weights that were swapped and put back are as they were.
                self._writes = True
                if before is not None and training.fingerprint.whole() != before:
                    raise UsageError(_CHANGED)
            else:
                self._writes = False

    def _take_users_state(self) -> None:
        """Before the first one on a newcomer: wait for the user's state that the others had when they called theirs."""
        exchange, member = self._exchange, self._member
        if member.users_state.is_lacking:
            self._lookout.wait_at_rest(lambda: member.users_state.arrived_before_hooks(member.group, exchange))

    # -- the roster

    def look(self) -> None:
        """Between two exchanges: call ``on_roster`` if the roster has changed since its last call."""
        group = self._member.group
        if group.era == 0 or group.roster == self._roster or self.inside:
            return
        before, self._roster = self._roster, group.roster
        if before:
            with self._running("on_roster"):
                for function in self._on_roster:
                    function(before, group.roster)

    # -- both

    @contextmanager
    def _running(self, name: str) -> Generator[None]:
        lookout = self._lookout
        lookout.in_hook = True
        try:
            with super()._running(name):
                yield
        finally:
            lookout.in_hook, lookout.swapped, self.gone_on = False, None, False

    def refuse(self, verb: str) -> None:
        super().refuse(verb)
        if self.inside and self.gone_on:
            raise UsageError(
                f"evaluate was called in on_update after round {self._member.group.round} on {self._member.me}, and "
                "not on the others: let it depend on what is the same on all workers (update.updates, not is_leader)"
            )


def _versions(parameters: list[Any]) -> int:
    """A number that grows with every change in place."""
    return sum(getattr(p, "_version", 0) for p in parameters)
