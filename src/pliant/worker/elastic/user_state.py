"""The user's ``state=``: values and objects that only the script's own code changes.

Question  Which moment's user state does a worker hold, whom does it give which, and when does it install another's?
Holds     Code that runs on some workers only (a loop's body, what follows an update) changes it there; the others ask
          one that has run it, before their own script goes on. A copy of each moment that may still be asked for is
          kept: after the last two updates, at the end of the last calls, before the functions of ``on_update``. What
          was read from a checkpoint is installed in the call that it is of. It is the last thing that comes: with it a
          catch-up is over.
Source    docs/design/0007-elastic.md, docs/design/0014-checkpoints.md, docs/design/0016-updates.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pliant.core import allowance
from pliant.core.group_state import GroupState, Standing
from pliant.types import WorkerId
from pliant.worker.elastic.catch_up import CatchUp, StateRecipient
from pliant.worker.elastic.reception import Reception, active, holders
from pliant.worker.elastic.rendezvous import FormedGroup
from pliant.worker.snapshot import DEPTH, copied, install_state, stated
from pliant.worker.training import Training

STATE = "state"
"""the name of the user's state as it is now"""
_TRAINED = "\0trained"
"""beside the names of the user's own values"""
_AT_END = "state at the end of call "
_BEFORE_HOOKS = "state before the hooks of exchange "


def at_end_of(call: str) -> str:
    """The name of the user's state as it was at the end of a call."""
    return f"{_AT_END}{call}"


def before_hooks_of(exchange: int) -> str:
    """The name of the user's state as it was when an update was applied, before anything was done with it."""
    return f"{_BEFORE_HOOKS}{exchange}"


@torch.no_grad()
def users_state_of(carried: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the user's own state, and which parameters the script trains by now: its code decides about both."""
    values = copied(stated(carried["state"]))
    return {**values, _TRAINED: copied(carried["trained"].state_dict())} if "trained" in carried else values


def install_users_state(carried: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Take over what the script's code has made of both on other workers."""
    install_state(carried["state"], {name: value for name, value in values.items() if name != _TRAINED})
    if _TRAINED in values and "trained" in carried:
        carried["trained"].take_over(values[_TRAINED], later=False, hyper=False)


class UserState:
    """What one worker has of it, keeps of it for others, and waits for."""

    def __init__(
        self,
        me: Callable[[], WorkerId],
        training: Training,
        carried: Mapping[str, Any],
        reception: Reception,
        *,
        shared: bool,
    ) -> None:
        """``shared``: others may ask for it."""
        self._me = me
        self._training = training
        self._carried = carried
        self._reception = reception
        self._shared = shared
        self._own_is_newest = False
        """it was the last one to compute: of the user's state it has the newest, whatever else it takes over"""
        self.lost = False
        """the user's state was on its way here, and has gone with the last worker that had it"""
        self._restored: tuple[int, Mapping[str, Any]] | None = None
        """of a checkpoint, until the script is in that call"""
        # What is kept for others.
        self._came_along: set[int] = set()
        """phases to whose end somebody has come without the user's state of that moment"""
        self._left: dict[str, Any] = {}
        """the user's state at the end of the last calls to whose end somebody came without it"""
        self._kept: dict[int, Any] = {}
        """by exchange, the user's state after it, for one that asks when the next is settled already"""
        self._before_hooks: tuple[str, Any] | None = None
        """the last update with which somebody began to compute, and the user's state before what was done with it"""
        self._missed = math.inf
        """the first exchange with an update whose code this worker, about to go, has not run"""
        self._ahead: frozenset[WorkerId] = frozenset()
        """who has run it for the last such update"""
        # What is asked for.
        self._asked_as_of: int | None = None
        self._asked_for: str | None = None
        self._asked_from: StateRecipient | None = None
        self._under_way: deque[int] = deque()
        """as of which exchanges, one answer after another"""

    # -- of a checkpoint

    def restore(self, values: Mapping[str, Any] | None, call: int) -> None:
        """This was read from a checkpoint: to be installed when the script is in top-level call number ``call``."""
        self._restored = None if values is None else (call, values)

    def install_restored(self, call: int) -> None:
        """The script goes on, in top-level call number ``call``: it gets its own state back, if it is that far."""
        if self._restored is not None and call >= self._restored[0]:
            (_, values), self._restored = self._restored, None
            install_state(self._carried["state"], values)
            # Together with it: which layers its code had frozen and unfrozen by then.
            self._training.settle_set()

    def forget_restored(self) -> None:
        """This worker does not hold the state any more."""
        self._restored = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is still to come, from other workers or from a checkpoint."""
        return self._restored is None and self._reception.holds_all

    # -- an era begins

    def trust_own(self, group: GroupState, *, was_active: bool) -> None:
        """A new era begins with ``group``. Where nobody else computed, nobody has a newer user's state to ask for."""
        held = self._own_is_newest or (was_active and self._reception.holds_all)
        self._own_is_newest = held and set(active(group)) <= {self._me()}

    def go_on(self, group: GroupState, seat: FormedGroup, *, knows_best: bool) -> None:
        """An era has begun while something is still to come: ask those who are in it.

        ``knows_best``: of all who are left this worker is the donor, whatever it lacks.
        """
        # Who takes the state over has run that code, too, but waits for the outcome like any newcomer.
        self._ahead &= set(holders(group))
        catch_up = self._reception.under_way
        if catch_up is None:
            self._own_is_newest = False
            return
        donors = self._reception.donors(group, seat)
        following = group.standings[group.roster.index(self._me())] is Standing.FOLLOWING
        if not following and (not donors or knows_best):
            # Only the user's own state is missing, and nobody has a newer one.
            self.lost = self.lost or self.is_lacking
            self.drop()
        else:
            self._asked_as_of = None
            catch_up.restart(donors, group.era, group.exchange, keep=True)

    # -- keeping it for others

    @property
    def _has_latest(self) -> bool:
        """Whether the user's state here is that of the last update: nobody is to get another one, now or later."""
        return self._reception.holds_all or self._own_is_newest

    def expect_at_end(self, phase: int) -> None:
        """Somebody may come to the end of this phase without the user's state of that moment."""
        self._came_along.add(phase)

    def is_expected_at_end(self, phase: int, *, around: bool) -> bool:
        """Whether that is so; asked once. ``around``: there is a loop around it, which is asked about later."""
        found = phase in self._came_along
        self._came_along = {earlier for earlier in self._came_along if around and earlier < phase}
        return found and self._shared

    def keep_at_end(self, call: str) -> None:
        """Somebody may come to the end of this call without the user's state: keep it as it is now."""
        if not self._has_latest:
            return
        # Between two exchanges a script may leave a call and the loop around it.
        kept = list(self._left.items())[-(DEPTH - 1) :]
        self._left = {**dict(kept), at_end_of(call): users_state_of(self._carried)}

    def keep_for_latecomers(self, exchange: int | None) -> None:
        """Somebody has just begun to compute, and its question may come after the next update: keep what it asks for.

        None: nobody has.
        """
        if exchange is None or not self._shared:
            self._kept = {}
        elif exchange not in self._kept and self._has_latest:
            # Nobody settles two exchanges more than the one who asks.
            last = {number: state for number, state in self._kept.items() if number == exchange - 1}
            self._kept = {**last, exchange: users_state_of(self._carried)}

    def keep_before_hooks(self, exchange: int) -> None:
        """Somebody has just begun to compute, and is to begin with this update, too: keep what it asks for."""
        if self._shared and self._reception.holds_all:
            self._before_hooks = before_hooks_of(exchange), users_state_of(self._carried)

    # -- giving it

    def answer(self, want: Sequence[str], as_of: int, group: GroupState) -> dict[str, Any] | None:
        """What was kept of what somebody asks for; None: it asks for the present state. ``LookupError``: ask others."""
        at_end = any(name.startswith(_AT_END) for name in want)
        before_hooks = any(name.startswith(_BEFORE_HOOKS) for name in want)
        if not (at_end or before_hooks or STATE in want):
            return None
        if as_of >= self._missed and not self._ahead.isdisjoint(active(group)):
            raise LookupError("it leaves, and others have a newer one")
        if len(want) != 1:
            raise LookupError("the user's state is asked for alone")
        if before_hooks:
            if self._before_hooks is None or want[0] != self._before_hooks[0]:
                raise LookupError("it has not kept that")
            return {want[0]: self._before_hooks[1]}
        if at_end:
            if want[0] not in self._left:
                raise LookupError("it has not kept that")
            return {want[0]: self._left[want[0]]}
        if not self._reception.holds_all:
            raise LookupError("it waits for the user's state itself")
        if self._restored is not None:
            return {STATE: self._restored[1]}
        if as_of < group.exchange and as_of in self._kept:
            # It has handed in nothing to the exchange since, and runs the code for that itself.
            return {STATE: self._kept[as_of]}
        return None

    # -- asking for it

    @property
    def is_lacking(self) -> bool:
        """Whether this worker, a newcomer, has never had it."""
        catch_up = self._reception.under_way
        return catch_up is not None and catch_up.is_of_newcomer

    def fell_behind(self, before: GroupState, group: GroupState, *, leaving: bool) -> None:
        """The script's code for an update runs on those who computed in ``before``, and not here: ask one of them.

        Whoever does not hold the state in ``group``, that of now, does not run it either: an era has ended meanwhile.
        Who leaves needs it no more.
        """
        spoke = {worker for member, worker in enumerate(before.roster) if allowance.speaks(before, member)}
        computing = [worker for worker in holders(group) if worker in spoke]
        if leaving and computing:
            self._missed, self._ahead = min(self._missed, before.exchange + 1), frozenset(computing)
        if leaving or not self._reception.holds_all:
            return
        donors = self._reception.addresses_of(computing)
        if donors and self._me() not in computing:
            self._own_is_newest = False
            self._reception.take_users_state(donors, group)

    def ask(self, as_of: int) -> None:
        """Ask for it as of the exchange from which this worker computes; everything else is here."""
        catch_up = self._reception.under_way
        if catch_up is not None and self._asked_as_of != as_of:
            self._asked_as_of = as_of
            line = catch_up.line()
            if line is not None:
                self._request(catch_up, line, as_of, STATE)

    def _request(self, catch_up: CatchUp, line: StateRecipient, as_of: int, name: str) -> None:
        if line is not self._asked_from:
            self._under_way.clear()
        self._asked_from, self._asked_for = line, name
        self._under_way.append(as_of)
        catch_up.request(line, as_of, [name])

    def arrived(self, group: GroupState, left: str | None) -> bool:
        """Whether it is here, and installed; ``left``: as it was at the end of that call."""
        return self._arrived(group, group.exchange, STATE if left is None else at_end_of(left))

    def arrived_before_hooks(self, group: GroupState, exchange: int) -> bool:
        """The same as of the moment when the update of ``exchange`` was applied, before anything was done with it."""
        return self._arrived(group, exchange, before_hooks_of(exchange))

    def _arrived(self, group: GroupState, exchange: int, name: str) -> bool:
        catch_up = self._reception.under_way
        if catch_up is None:
            return True
        if self._own_is_newest:
            self.drop()
            return True
        # Who was asked first may be about to go, and behind those who have come to compute since.
        catch_up.may_ask(self._reception.others_computing(group))
        values = self.awaited(catch_up, exchange, name)
        if values is None:
            return False
        install_users_state(self._carried, values)
        self.drop()
        return True

    def awaited(self, catch_up: CatchUp, exchange: int, name: str = STATE) -> Mapping[str, Any] | None:
        """The user's state once it is here; asks again where the donor failed or the answer is out of date.

        ``name``: of another moment than now (``at_end_of``, ``before_hooks_of``).
        """
        if self._asked_for not in (None, name):
            # What it was asked for is due only later, and it answers in turn.
            catch_up.hang_up()
        line = catch_up.line()
        if line is None:
            return None
        # A donor that failed was replaced, perhaps long ago; who came after it has not been asked for this.
        if line is not self._asked_from:
            self._request(catch_up, line, exchange, name)
            return None
        answer = line.arrived()
        if answer is None:
            return None
        as_of = self._under_way.popleft()
        # Asked for less, the donor may have given more: the state after an update whose code is still to run here.
        if name != STATE or as_of >= exchange:
            return answer[1][name]
        if not self._under_way or self._under_way[-1] < exchange:
            # This worker was ready, and went along until it was dealt something.
            self._request(catch_up, line, exchange, name)
        return None

    def drop(self) -> None:
        """Nothing more is to come, or all of it is to come anew."""
        self._reception.drop()
        self._own_is_newest = False
        self._asked_as_of = self._asked_for = self._asked_from = None
        self._under_way.clear()
