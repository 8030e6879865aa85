"""One worker as a member of the group.

Question  What do all parts of a worker's loop share?
Holds     The replicated state and the script's position in it are kept here and nowhere else. The replicated state is a
          value that ``core`` returns. Only ``advance`` and ``enter`` assign it, together with what follows from it.
Source    docs/protocol.md ("One round", "Following").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pliant.core import allowance, consistency, standings, tickets
from pliant.core.group_state import GroupState, Standing
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId
from pliant.worker.elastic.donor import StateLines, StateServer
from pliant.worker.elastic.enrolment import Enrolment, Solo
from pliant.worker.elastic.reception import Reception
from pliant.worker.elastic.user_state import UserState
from pliant.worker.in_flight import Contributions
from pliant.worker.journal import Journal
from pliant.worker.script.calls import ScriptPosition
from pliant.worker.snapshot import GroupSnapshot
from pliant.worker.training import Training


class WorkerState:
    """The state of one worker, shared by all parts of its loop."""

    def __init__(
        self,
        me: WorkerId,
        group: GroupState,
        training: Training,
        witness: Journal,
        enrolment: Enrolment | Solo,
        lines: StateLines,
        carried: Mapping[str, Any],
        clock: Callable[[], float],
    ) -> None:
        """``carried``: what the script has given besides the model; a newcomer takes it over."""
        self.me = me
        self._group = group
        self.training = training
        self.witness = witness
        self.enrolment = enrolment
        self.share = lines.share
        handed_on = {**carried, "journal": witness, "trained": training.trained}

        def name() -> WorkerId:
            return self.me

        self.reception = Reception(name, training, handed_on, lines.recipient, lines.say)
        self.users_state = UserState(name, training, handed_on, self.reception, shared=enrolment.has_eras)
        self.donor = StateServer(lines.donor, training, handed_on, self.reception, self.users_state)
        self.script = ScriptPosition()
        self.work = Contributions(clock)
        self.undrained = False
        """the exchange that makes the buffers equal at a phase's end is still to come"""
        self.turned = -1
        """the number of the last exchange that opened or ended a phase"""
        self.fresh: frozenset[WorkerId] = frozenset()
        """workers that have become active and contributed nothing yet: they may still ask for the user's state"""
        self.clip_norm: float | None = None
        """the bound on the gradient's norm that the script asks for; 0: no bound; None: it has not asked"""

    # -- the replicated state

    @property
    def group(self) -> GroupState:
        """The state that all members agree on after the last exchange."""
        return self._group

    def advance(self, group: GroupState, gathered: Sequence[Ticket] = ()) -> None:
        """Take the next state in the same sequence of exchanges; ``gathered``: the tickets that decided it, if any."""
        before, self._group = self._group, group
        if gathered:
            self.fresh = standings.fresh(self.fresh, before, group, gathered)
        if group.phases != before.phases or len(group.open) != len(before.open):
            self.turned = group.exchange
        if len(group.open) > len(before.open):
            self.work.enter_phase()

    def enter(self, group: GroupState, *, undrained: bool) -> None:
        """Go on from another state: that of a new era, of a checkpoint, or of a newcomer.

        The caller adapts what this worker has accumulated: only it knows which of that is still of use.
        """
        # The rules of ``advance`` do not hold: this worker has not taken part in the exchanges that led there.
        self.turned, self.undrained = -1, undrained
        self._group = group

    # -- this worker in it

    @property
    def index(self) -> int:
        """This worker's index in the roster."""
        return self.group.roster.index(self.me)

    @property
    def standing(self) -> Standing:
        return self.group.standings[self.index]

    @property
    def follows(self) -> bool:
        """Whether it takes part without the whole state."""
        return self.standing is Standing.FOLLOWING

    @property
    def holders(self) -> list[int]:
        """The indices of the members that hold the whole state."""
        return [m for m, standing in enumerate(self.group.standings) if standing is not Standing.FOLLOWING]

    @property
    def speaks(self) -> bool:
        """Whether it has a vote in what the next exchange is."""
        return allowance.speaks(self.group, self.index)

    def is_in(self, phase: int) -> bool:
        """Whether the group is in ``phase``, or in one inside it."""
        return any(each.number == phase for each in self.group.open)

    @property
    def leaving(self) -> bool:
        """Whether this worker draws no more, because it was asked to leave.

        False inside an ``evaluate`` in a loop, and until the round in flight is settled or a micro-batch was drawn
        during it: until then the others may rely on this worker being inside its loop body.
        """
        if not self.enrolment.leaving or self.script.depth > 1:
            return False
        flight = self.work.flight
        return flight is None or flight.leaving or self.work.contribution.micro_batches > 0

    @property
    def handed(self) -> GroupSnapshot:
        """The replicated state, to be sent to other members or written into a checkpoint."""
        return GroupSnapshot(self.group, self.witness.records, self.training.buffers.live, self.undrained)

    def ticket(self, kind: Kind, flags: Flag) -> Ticket:
        """A ticket with this worker's position. Raises if the planned era was given up."""
        group, training = self.group, self.training
        if self.leaving:
            flags |= Flag.LEAVING
        plan_term, plan_era = self.enrolment.prepared(group.era)
        if plan_era and self.enrolment.left_out:
            flags |= Flag.GOING
        return Ticket(
            group.era,
            group.round,
            group.phases,
            kind,
            flags,
            digest=consistency.digest(group),
            exchange=group.exchange,
            plan_term=plan_term,
            plan_era=plan_era,
            momentum=training.momentum,
            measured_round=training.measured[0],
            measured_norm=training.measured[1],
            weights_round=training.weighed[0],
            weights=training.weighed[1],
            arithmetic=training.fingerprint.arithmetic,
            sketch=training.sketch,
            clip_norm=-1.0 if self.clip_norm is None else self.clip_norm,
            trained=training.contributed,
            wanted=training.look(),
        )

    def packed(self, ticket: Ticket, bitmap: int = 0) -> bytes:
        return tickets.pack(ticket, bitmap, self.training.bits)
