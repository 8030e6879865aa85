"""The user's ``state=``: values and objects that only the script's own code changes.

Question  The user's state of which moment does a worker hold, and when does it give it to others or install theirs?
Holds     Code that runs on some workers only (a loop's body, a function of ``on_update``) changes the state there. The
          other workers ask one that has run it, before their own scripts go on. A copy is kept of each moment that may
          still be asked for: after the last two updates, at the end of the last calls, before the functions of
          ``on_update``. The state of a checkpoint is installed in the call that it was taken in. The user's state is
          the last part of a catch-up: with it that is over.
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
"""names the user's state of the present moment in a request"""
_TRAINED = "\0trained"
"""the set of trained parameters, beside the names of the user's own values"""
_AT_END = "state at the end of call "
_BEFORE_HOOKS = "state before the hooks of exchange "


def at_end_of(call: str) -> str:
    """Names the user's state at the end of a call."""
    return f"{_AT_END}{call}"


def before_hooks_of(exchange: int) -> str:
    """Names the user's state after an update was applied and before the functions of ``on_update`` were called."""
    return f"{_BEFORE_HOOKS}{exchange}"


@torch.no_grad()
def users_state_of(carried: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the user's own state and of the set of trained parameters: the script's code changes both."""
    values = copied(stated(carried["state"]))
    return {**values, _TRAINED: copied(carried["trained"].state_dict())} if "trained" in carried else values


def install_users_state(carried: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Install both, as the script's code has changed them on another worker."""
    install_state(carried["state"], {name: value for name, value in values.items() if name != _TRAINED})
    if _TRAINED in values and "trained" in carried:
        carried["trained"].take_over(values[_TRAINED], later=False, hyper=False)


class UserState:
    """The user's state of one worker: its own, the copies kept for others, and what it waits for."""

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
        """it was the last worker to compute: its user's state is the newest, whatever else it receives"""
        self.lost = False
        """the last worker that had the user's state was lost before it had sent it here"""
        self._restored: tuple[int, Mapping[str, Any]] | None = None
        """(call, values) of a checkpoint, until the script is in that call"""
        # What is kept for others.
        self._came_along: set[int] = set()
        """phases whose end a member may have reached without the user's state of that moment"""
        self._left: dict[str, Any] = {}
        """the user's state at the end of the last such calls"""
        self._kept: dict[int, Any] = {}
        """exchange → the user's state after it, for a member that asks when the next one is settled already"""
        self._before_hooks: tuple[str, Any] | None = None
        """(name, state) before the functions of ``on_update``, for a member that became active with that update"""
        self._missed = math.inf
        """the first exchange with an update whose code this worker, which is leaving, has not run"""
        self._ahead: frozenset[WorkerId] = frozenset()
        """the workers that have run it for the last such update"""
        # What is asked for.
        self._asked_as_of: int | None = None
        self._asked_for: str | None = None
        self._asked_from: StateRecipient | None = None
        self._under_way: deque[int] = deque()
        """the exchanges of the requests that are not answered yet, in order"""

    # -- of a checkpoint

    def restore(self, values: Mapping[str, Any] | None, call: int) -> None:
        """Keep the state of a checkpoint until the script is in top-level call number ``call``."""
        self._restored = None if values is None else (call, values)

    def install_restored(self, call: int) -> None:
        """Install the state of a checkpoint, if the script, now in call number ``call``, has come that far."""
        if self._restored is not None and call >= self._restored[0]:
            (_, values), self._restored = self._restored, None
            install_state(self._carried["state"], values)
            # Together with the set of parameters that its code had made trainable by then.
            self._training.settle_set()

    def forget_restored(self) -> None:
        """This worker does not hold the state any more."""
        self._restored = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or still to be installed, from other workers or from a checkpoint."""
        return self._restored is None and self._reception.holds_all

    # -- an era begins

    def trust_own(self, group: GroupState, *, was_active: bool) -> None:
        """A new era begins with ``group``. If no other worker computed, none has a newer user's state."""
        held = self._own_is_newest or (was_active and self._reception.holds_all)
        self._own_is_newest = held and set(active(group)) <= {self._me()}

    def go_on(self, group: GroupState, seat: FormedGroup, *, knows_best: bool) -> None:
        """A new era has begun: go on with a catch-up that is under way, with the donors of this era.

        ``knows_best``: this worker is the era's donor, whatever it lacks.
        """
        # A worker that follows now has run that code, too, but waits for the result like any newcomer.
        self._ahead &= set(holders(group))
        catch_up = self._reception.under_way
        if catch_up is None:
            self._own_is_newest = False
            return
        donors = self._reception.donors(group, seat)
        following = group.standings[group.roster.index(self._me())] is Standing.FOLLOWING
        if not following and (not donors or knows_best):
            # Only the user's own state is missing, and no member has a newer one.
            self.lost = self.lost or self.is_lacking
            self.drop()
        else:
            self._asked_as_of = None
            catch_up.restart(donors, group.era, group.exchange, keep=True)

    # -- keeping it for others

    @property
    def _has_latest(self) -> bool:
        """Whether the user's state here is that of the last update. No other one may be given away, now or later."""
        return self._reception.holds_all or self._own_is_newest

    def expect_at_end(self, phase: int) -> None:
        """A member may reach the end of this phase without the user's state of that moment."""
        self._came_along.add(phase)

    def is_expected_at_end(self, phase: int, *, around: bool) -> bool:
        """Whether that was noted for this phase; asked once. ``around``: a loop around it is asked about later."""
        found = phase in self._came_along
        self._came_along = {earlier for earlier in self._came_along if around and earlier < phase}
        return found and self._shared

    def keep_at_end(self, call: str) -> None:
        """Keep a copy of now for members that reach the end of this call without the user's state."""
        if not self._has_latest:
            return
        # Between two exchanges a script may leave a call and the loop around it.
        kept = list(self._left.items())[-(DEPTH - 1) :]
        self._left = {**dict(kept), at_end_of(call): users_state_of(self._carried)}

    def keep_for_latecomers(self, exchange: int | None, *, may_ask: bool) -> None:
        """Keep a copy of now if members ``may_ask`` for it after the next update: they do not run the same code yet.

        The copy of the exchange before stays as long as that is the last one: a member may still ask for it, although
        from now on none lacks anything. ``exchange`` None: this worker follows, and keeps nothing.
        """
        # No member is two exchanges ahead of the one that asks.
        last = () if exchange is None else (exchange - 1, exchange)
        self._kept = {number: state for number, state in self._kept.items() if number in last}
        if exchange is not None and may_ask and self._shared and exchange not in self._kept and self._has_latest:
            self._kept[exchange] = users_state_of(self._carried)

    def keep_before_hooks(self, exchange: int) -> None:
        """Keep a copy of now for members that become active with this update, and call ``on_update`` for it, too."""
        if self._shared and self._reception.holds_all:
            self._before_hooks = before_hooks_of(exchange), users_state_of(self._carried)

    # -- giving it

    def answer(self, want: Sequence[str], as_of: int, group: GroupState) -> dict[str, Any] | None:
        """The kept copy that a request asks for; None: it asks for the present state, or for no user's state.

        Raises ``LookupError`` if this worker cannot give it; the newcomer asks another one.
        """
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
            # The newcomer has contributed nothing to the exchange since, and runs the code for that itself.
            return {STATE: self._kept[as_of]}
        return None

    # -- asking for it

    @property
    def is_lacking(self) -> bool:
        """Whether this worker is a newcomer that has never had it."""
        catch_up = self._reception.under_way
        return catch_up is not None and catch_up.is_of_newcomer

    def fell_behind(self, before: GroupState, group: GroupState, *, leaving: bool) -> None:
        """The script's code for an update runs on the workers that computed in ``before``, not here: ask one of them.

        A worker that has lost the state since (``group`` is now, an era may have ended) does not run it either. A
        leaving worker does not need it any more.
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
        """Ask for it as of the exchange from which this worker computes. Everything else is installed."""
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
        """Whether the state has arrived; then it is installed. ``left``: as of the end of that call."""
        return self._arrived(group, group.exchange, STATE if left is None else at_end_of(left))

    def arrived_before_hooks(self, group: GroupState, exchange: int) -> bool:
        """The same, as of before the functions of ``on_update`` for the update of ``exchange``."""
        return self._arrived(group, exchange, before_hooks_of(exchange))

    def _arrived(self, group: GroupState, exchange: int, name: str) -> bool:
        catch_up = self._reception.under_way
        if catch_up is None:
            return True
        if self._own_is_newest:
            self.drop()
            return True
        # The first donor may be leaving, and may be behind members that have become active since.
        catch_up.may_ask(self._reception.others_computing(group))
        values = self.awaited(catch_up, exchange, name)
        if values is None:
            return False
        install_users_state(self._carried, values)
        self.drop()
        return True

    def awaited(self, catch_up: CatchUp, exchange: int, name: str = STATE) -> Mapping[str, Any] | None:
        """The user's state if it has arrived. Asks again if the donor has failed or the answer is out of date.

        ``name``: of another moment than now (``at_end_of``, ``before_hooks_of``).
        """
        if self._asked_for not in (None, name):
            # The donor answers in turn, and what it was asked for before may be due only later.
            catch_up.hang_up()
        line = catch_up.line()
        if line is None:
            return None
        # A donor that failed was replaced, perhaps long ago; its successor has not been asked yet.
        if line is not self._asked_from:
            self._request(catch_up, line, exchange, name)
            return None
        answer = line.arrived()
        if answer is None:
            return None
        as_of = self._under_way.popleft()
        # The answer to an older request may be of a later exchange, whose code is still to run here.
        if name != STATE or as_of >= exchange:
            return answer[1][name]
        if not self._under_way or self._under_way[-1] < exchange:
            # This worker was ready, and followed further exchanges until it was dealt samples.
            self._request(catch_up, line, exchange, name)
        return None

    def drop(self) -> None:
        """End the catch-up that is under way, with everything asked for in it."""
        self._reception.drop()
        self._own_is_newest = False
        self._asked_as_of = self._asked_for = self._asked_from = None
        self._under_way.clear()
