"""Deliberate bugs: each breaks the real code in one way that the simulator must notice.

Question  Would the simulator see it if the protocol were wrong?
Holds     Every entry is a patch of production code, never of the simulator; it lasts as long as its ``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from msgspec.structs import replace

import pliant.core.membership.advance
import pliant.core.membership.eras
from pliant.control.link import Link
from pliant.core import ledger, regrouping
from pliant.core.membership import admission, failed_formations, liveness, reachability, reports
from pliant.core.membership.roster import EraMember, with_standing, worker_of
from pliant.core.regrouping import Entry
from pliant.worker.draw import DrawLimits
from pliant.worker.elastic.catch_up import CatchUp
from pliant.worker.elastic.reception import Reception
from pliant.worker.elastic.rendezvous import EraBroken, Evicted, Rendezvous
from pliant.worker.elastic.transition import EraTransition
from pliant.worker.in_flight import Contributions
from pliant.worker.journal import JournalReporter
from pliant.worker.loop import Worker
from pliant.worker.submit import Submission
from pliant.worker.training import Training

Patch = tuple[Any, str, Any]


@contextmanager
def broken(name: str) -> Iterator[None]:
    """The code with that bug in it."""
    patches = BUGS[name][1]()
    originals = [(owner, attribute, owner.__dict__[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, value in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in originals:
            setattr(owner, attribute, value)


def skip_void() -> list[Patch]:
    """An unplanned era goes on with the number that a lost worker may have applied."""
    regrouped = regrouping.regrouped

    def without(group: Any, *arguments: Any) -> Any:
        return replace(regrouped(group, *arguments), round=group.round)

    return [(regrouping, "regrouped", without)]


def reuse_attempt() -> list[Patch]:
    """Every group is formed under the same number."""
    numbers = pliant.core.membership.eras._numbers
    return [(pliant.core.membership.eras, "_numbers", lambda state: (numbers(state)[0], 1))]


def settle_after_stopped() -> list[Patch]:
    """A sum that comes in after ``stopped`` was said is applied all the same."""
    go_on = Worker._go_on

    def late(self: Worker, trouble: EraBroken | Evicted) -> None:
        flight, crossing = self._member.work.flight, self._crossing
        if isinstance(trouble, EraBroken) and isinstance(crossing, EraTransition):
            crossing._stop(self.group.era, str(trouble))
            if flight is not None and flight.summation is not None and flight.summation.over:
                with suppress(EraBroken, RuntimeError):
                    self._exchanges.settle()
        go_on(self, trouble)

    return [(Worker, "_go_on", late)]


def forget_positions() -> list[Patch]:
    """What a lost worker had been dealt is dealt to nobody else."""

    def forgotten(held: Any, kept: Any, *, quotas: bool) -> Any:
        after = regrouped(held, kept, quotas=quotas)
        return replace(after, returned=held.returned)

    regrouped = ledger.regrouped
    return [(ledger, "regrouped", forgotten)]


def keep_dropped() -> list[Patch]:
    """A contribution whose sum failed is counted as still there."""
    entry = Contributions.entry

    def kept(self: Contributions, *, active: bool) -> Entry:
        true = entry(self, active=active)
        both = tuple(dropped + stays for dropped, stays in zip(true.dropped, true.kept, strict=True))
        if true.dropped and self.flight is not None:
            self.contribution.micro_batches += self.flight.drawn
        return replace(true, dropped=(0,) * len(both), kept=both)

    return [(Contributions, "entry", kept)]


def early_newcomer() -> list[Patch]:
    """A newcomer says it is ready before it holds the state."""
    return [(Reception, "complete", property(lambda self: True))]


def early_lines() -> list[Patch]:
    """Journal lines are told as soon as they are made."""
    write = JournalReporter._write

    def at_once(self: JournalReporter, record: Any) -> None:
        write(self, record)
        self.confirmed()

    return [(JournalReporter, "_write", at_once)]


def early_eviction() -> list[Patch]:
    """A new coordinator evicts whoever has not come back at once."""
    resumed = pliant.core.membership.advance.resumed

    def impatient(*arguments: Any) -> Any:
        state = resumed(*arguments)
        return replace(state, patient_until_s=0.0, trusting_until_s=0.0)

    return [(pliant.core.membership.advance, "resumed", impatient), (liveness, "RECONNECT_S", 0.0)]


def leaver_draws_on() -> list[Patch]:
    """A worker that has announced to leave goes on drawing."""
    following = DrawLimits.next

    def draws(self: DrawLimits) -> Any:
        enrolment = self._member.enrolment
        leaving, enrolment.leaving = enrolment.leaving, False
        try:
            return following(self)
        finally:
            enrolment.leaving = leaving

    return [(DrawLimits, "next", draws)]


def no_catching_up() -> list[Patch]:
    """A newcomer forgets the updates that were made while its tensors were on their way."""
    return [(CatchUp, "note", lambda self, *_, **__: None)]


def keep_every_round() -> list[Patch]:
    """A newcomer keeps the gradients of all rounds while its tensors are on their way."""
    return [
        (CatchUp, "_make_room", lambda self, *_: True),
        (CatchUp, "holds_up", lambda self, coming: False),
    ]


def update_while_copied() -> list[Patch]:
    """An update does not wait for the copy that a checkpoint is written from."""
    return [(Training, "finish_copy", lambda self: None)]


def half_settled() -> list[Patch]:
    """A round is not applied when the hand-in of the next one fails."""
    return [(Submission, "hand_in_or_remember", Submission.hand_in)]


def given_and_kept() -> list[Patch]:
    """A contribution whose era ends while its parts are being summed is kept for the next one as well."""
    complete = Submission._complete_or_remember

    def completes(self: Submission, *, usable: bool) -> None:
        if self._lookout.broken is None:
            complete(self, usable=usable)

    return [(Submission, "_complete_or_remember", completes)]


def forgotten_pledge() -> list[Patch]:
    """What was said shortly before the connection broke is not said again."""
    return [(Link, "_pledge", lambda self, message: self._queue(message))]


def failed_plan_breaks() -> list[Patch]:
    """A plan whose group cannot be formed ends the era in force, and the newcomer is taken along for ever."""

    def tell(self: Rendezvous, word: Any, error: Exception) -> None:
        if word is self._planned:
            raise EraBroken("the group of the plan could not be formed")

    return [(Rendezvous, "_tell_unformed", tell)]


def nobody_left_out() -> list[Patch]:
    """Formations fail with the same members again and again."""
    return [(failed_formations, "sifted", lambda state, now_s: (state, ()))]


def tried_at_once() -> list[Patch]:
    """Who could not be reached is tried again without a pause."""
    return [(reachability, "eligible", lambda known, slot, now_s: True), (reachability, "is_suspect", lambda *_: False)]


def forgets_weights() -> list[Patch]:
    """Who stops again before it was in an era says what its link tells: without the user's state it holds nothing."""
    stop_again = Rendezvous._stop_again

    def forgetful(self: Rendezvous, era: int, failed: str = "") -> None:
        self._said = None
        stop_again(self, era, failed)

    return [(Rendezvous, "_stop_again", forgetful)]


def link_knows_better() -> list[Patch]:
    """What a link that has come back tells counts for more than what its worker said when it stopped."""
    with_era_of = reports.with_era_of

    def believed(state: Any, worker: Any, era: int, exchange: int, active: bool | None, now_s: float) -> Any:
        state = with_era_of(state, worker, era, exchange, active, now_s)
        now = worker_of(state, worker.name)
        if now is None or active is None or not isinstance(now.standing, EraMember):
            return state
        return with_standing(state, now, replace(now.standing, active=active))

    return [(admission, "with_era_of", believed)]


def leads_on() -> list[Patch]:
    """Who has led once leads again when it comes back, beside the next leader."""
    leads = Worker.__dict__["leads"].fget
    have_led: WeakSet[Worker] = WeakSet()

    def still(self: Worker) -> bool:
        if leads(self):
            have_led.add(self)
        return self in have_led

    return [(Worker, "leads", property(still))]


BUGS: dict[str, tuple[str, Callable[[], list[Patch]]]] = {
    "skip_void": ("kills", skip_void),
    "reuse_attempt": ("kills", reuse_attempt),
    "settle_after_stopped": ("kills", settle_after_stopped),
    "forget_positions": ("kills", forget_positions),
    "keep_dropped": ("kills", keep_dropped),
    "early_newcomer": ("comings", early_newcomer),
    "early_lines": ("kills", early_lines),
    "early_eviction": ("coordinator", early_eviction),
    "leaver_draws_on": ("goings", leaver_draws_on),
    "no_catching_up": ("comings", no_catching_up),
    "keep_every_round": ("streams", keep_every_round),
    "update_while_copied": ("rewinds", update_while_copied),
    "half_settled": ("kills", half_settled),
    "given_and_kept": ("kills", given_and_kept),
    "forgotten_pledge": ("lines", forgotten_pledge),
    "failed_plan_breaks": ("walls", failed_plan_breaks),
    "nobody_left_out": ("walls", nobody_left_out),
    "tried_at_once": ("walls", tried_at_once),
    "forgets_weights": ("lonely", forgets_weights),
    "link_knows_better": ("lonely", link_knows_better),
    "leads_on": ("saves", leads_on),
}
"""name → the scene in which it shows, the patch"""
