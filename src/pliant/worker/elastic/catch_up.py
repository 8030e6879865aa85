"""A newcomer takes the group's state over while the rounds go on.

Question  How does a follower come to hold weights and optimizer state that change with every round?
Holds     From the exchange at which it asks for tensors it keeps the sums of those in flight (of no others). They come
          as of a named exchange, so nothing is guessed: it catches up from there, and updates what it holds with every
          sum. What it keeps is bounded, whatever happens: beyond that it asks for less at a time, and in the end, for
          one large tensor, takes part in no further round before that has arrived. A donor that fails is replaced; what
          was installed stays good as long as no exchange was missed.
Source    docs/design/0007-elastic.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pliant.core import portion_size
from pliant.tensors.gradients import FlatGradients
from pliant.worker.elastic.kept_rounds import KeptResult, KeptRound, PortionRequest
from pliant.worker.snapshot import META, everything, install_meta, install_parameter, is_parameter
from pliant.worker.training import Training

# What a donor copies at a time. One tensor may be larger.
_REQUEST_BYTES = 128 << 20


class StateRecipient(Protocol):
    """The line to the donor (``tensors.handoff.Recipient``)."""

    failed: str | None

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None: ...
    def arrived(self) -> Any: ...
    def begun(self) -> tuple[int, float] | None: ...
    def close(self) -> None: ...


def say_to_user(text: str) -> None:
    """On the worker's own output."""
    print(f"pliant: {text}", file=sys.stderr, flush=True)


class CatchUp:
    """What a follower holds, what it waits for, and whom it asks."""

    def __init__(
        self,
        training: Training,
        carried: Mapping[str, Any],
        connect: Callable[[str], StateRecipient],
        *,
        tensors: bool = True,
        say: Callable[[str], None] = say_to_user,
    ) -> None:
        """Without ``tensors`` only the user's state is to come. ``say`` is told once where the group has to wait."""
        self._training = training
        self._carried = carried
        self._connect = connect
        self._say = say
        self._recipient: StateRecipient | None = None
        self._donors: list[str] = []
        self._asked: PortionRequest | None = None
        self._era = 0
        self._expected: tuple[str, int] | None = None
        """(donor, era): everything was asked for, as of that era's start"""
        self._missing: list[str] = []
        self._portions = portion_size.portions(sum(p.nbytes for p in training.parameters))
        self._said = False
        """that the group waits for a part of the state"""
        self.is_of_newcomer = tensors
        """whether exchanges were missed; else only the script's own code for some updates was"""
        if tensors:
            self._missing = everything(training)
            training.held = 0

    def _bytes(self, name: str) -> int:
        if name == META:
            return 0
        kind, index = name[0], int(name[1:])
        if kind == "c":
            return self._training.constants()[index].nbytes
        if kind == "b":
            return self._training.buffers.nbytes(index)
        # A parameter comes with an optimizer state of about its size.
        return self._training.parameters[index].nbytes * 2

    def _gradient_bytes(self, name: str) -> int:
        return self._training.parameters[int(name[1:])].nbytes if is_parameter(name) else 0

    @property
    def complete(self) -> bool:
        """Whether everything but the user's own state is here."""
        return not self._missing and self._asked is None

    def expect(self, donor: str, era: int) -> None:
        """An era is planned with this worker in it: ask for what its donor will have at its start."""
        if self._expected == (donor, era):
            return
        self.restart([donor], era, 0, keep=False)
        recipient = self.line()
        assert recipient is not None
        self._ask(recipient, 0)
        self._expected = donor, era

    def restart(self, donors: Sequence[str], era: int, exchange: int, *, keep: bool) -> None:
        """An era has begun: ask its active members; ``keep``: no exchange was missed."""
        expected, self._expected = self._expected, None
        if expected == (next(iter(donors), ""), era) and self._asked is not None:
            self._donors, self._asked.as_of = list(donors), exchange
            return
        self.hang_up()
        self._donors, self._era = list(donors), era
        self._ask_again_for(self._asked)
        if not keep:
            self._missing = everything(self._training)
            self._training.held = 0
            self.is_of_newcomer = True

    def may_ask(self, donors: Sequence[str]) -> None:
        """These compute by now; one that lacks the state itself says so, and the next one is asked."""
        self._donors += [address for address in donors if address not in self._donors]

    def lose(self, parameters: Sequence[int]) -> None:
        """The optimizer does not have these: their updates pass it by until its groups are those of the others."""
        names = [META, *(f"p{index}" for index in parameters)]
        self._missing += [name for name in names if name not in self._missing]
        for index in parameters:
            self._training.held = (self._training.held or 0) & ~(1 << index)

    def _ask_again_for(self, asked: PortionRequest | None) -> None:
        """A request comes to nothing: what it was for is missing still."""
        if asked is not None:
            # What was lost since is in both; were it installed twice, it would be updated twice.
            self._missing = list(dict.fromkeys([*asked.want, *self._missing]))
        self._asked = None

    def hang_up(self) -> None:
        """What was asked for and is not here does not come."""
        if self._recipient is not None:
            self._recipient.close()
            self._recipient = None

    def close(self) -> None:
        """No longer needed."""
        self.hang_up()
        self._training.held = None

    def pursue(self, exchange: int) -> None:
        """Ask for what is missing, install what has come. ``exchange``: what this worker has settled."""
        recipient = self.line()
        if recipient is None:
            return
        asked = self._asked
        if asked is not None:
            self._begun()
            # The donor may be one exchange ahead: its tensors hold a sum that is still to be applied here.
            if asked.answer is None or asked.answer[0] > exchange:
                return
            if asked.answer[0] < asked.dropped:
                self._portions = portion_size.missed(self._portions)
                self._ask_again_for(asked)
            else:
                self._asked = None
                self._portions = portion_size.arrived(self._portions, asked.size, asked.rounds)
                self._install(asked, *asked.answer)
        if self._missing:
            self._ask(recipient, exchange)

    def line(self) -> StateRecipient | None:
        """To the donor that is asked now; the next one where it has failed. None: there is nobody to ask."""
        if self._recipient is not None and self._recipient.failed is not None:
            self.hang_up()
            self._donors = self._donors[1:] + self._donors[:1]
            self._ask_again_for(self._asked)
        if self._recipient is None and self._donors:
            self._recipient = self._connect(self._donors[0])
        return self._recipient

    def _ask(self, recipient: StateRecipient, as_of: int) -> None:
        want: list[str] = []
        size = gradients = 0
        while self._missing:
            name = self._missing[0]
            size += self._bytes(name)
            more = self._gradient_bytes(name)
            if want and (size > _REQUEST_BYTES or (gradients and more and not self._portions.fits(gradients + more))):
                break
            gradients += more
            want.append(self._missing.pop(0))
        self._asked = PortionRequest(as_of, want, gradients)
        recipient.request(self._era, as_of, want)

    def request(self, recipient: StateRecipient, as_of: int, want: Sequence[str]) -> None:
        """Ask for something that is no part of ``everything``."""
        recipient.request(self._era, as_of, want)

    # -- rounds meanwhile

    def note(
        self,
        exchange: int,
        means: FlatGradients | None,
        present: int,
        factor: float,
        scheduled: tuple[float, float],
        *,
        finite: bool = True,
    ) -> bool:
        """A round was settled as ``exchange``; ``means`` are its gradients, None if it was not applied.

        True: they are kept. Copying all of them into fresh memory would hold the group up.
        """
        asked = self._asked
        if asked is None or exchange <= asked.as_of:
            return False
        asked.rounds += means is not None
        begun = self._begun()
        if begun is not None and exchange <= begun[0]:
            # The donor has made this update already.
            return False
        kept = means if len(asked.parameters) == len(self._training.parameters) else None
        needed: dict[int, Tensor] = {}
        if means is not None:
            views = {index: means.views[index] for index in asked.parameters if present >> index & 1}
            needed = {index: view for index, view in views.items() if view is not None}
        # A buffer that is kept as a whole takes its memory whatever is in it.
        size = asked.size if kept else sum(self._training.parameters[index].nbytes for index in needed)
        if size and not self._make_room(asked, size):
            return False
        gradients = needed if kept else {index: view.clone() for index, view in needed.items()}
        hyper = self._training.scheduled()
        applied = means is not None
        asked.since.append(KeptRound(exchange, gradients, kept, size, factor, hyper, applied, finite, scheduled))
        return kept is not None

    @property
    def kept_bytes(self) -> int:
        """Gradients that are kept of past rounds."""
        return self._asked.kept_bytes if self._asked is not None else 0

    def _begun(self) -> tuple[int, float] | None:
        """Of the answer that is arriving or here: the exchange it is of, and which part is here."""
        asked, recipient = self._asked, self._recipient
        if recipient is None or recipient.failed is not None:
            begun = None
        else:
            # In this order: one that ceases to arrive between the two is here.
            begun = recipient.begun()
            if asked is not None and asked.answer is None:
                asked.answer = recipient.arrived()
        if asked is not None and asked.answer is not None:
            return asked.answer[0], 1.0
        return begun

    def _make_room(self, asked: PortionRequest, size: int) -> bool:
        """Before a round with ``size`` bytes of gradients is kept; False: the request was given up instead."""
        if not self._portions.is_full(asked.kept_bytes + size):
            return True
        begun = self._begun()
        if begun is not None:
            asked.answered_as_of(begun[0])
        if len(asked.parameters) > 1 and self._portions.is_full(asked.kept_bytes + size):
            part = begun[1] if begun is not None else 0.0
            self._portions = portion_size.given_up(self._portions, asked.size, asked.rounds, part)
            self._ask_again_for(asked)
            # The donor stops sending what is of no use any more; it is asked again on another line.
            self.hang_up()
            return False
        # Only before the answer has begun, and only once: after that ``holds_up`` is in time.
        while self._portions.is_full(asked.kept_bytes + size) and asked.drop_oldest():
            pass
        return True

    def holds_up(self, coming: int) -> bool:
        """Whether this worker takes part in no further round before what it has asked for has arrived.

        That is one tensor, or most of it is here. ``coming``: so many rounds may be settled until this is asked again.
        Only while the donor sends, or has yet to answer: for neither it needs a round.
        """
        asked, begun = self._asked, self._begun()
        if asked is None or not asked.parameters:
            return False
        if begun is None:
            # One that fails, or refuses, is asked again: then nothing is kept, and there is room for a round.
            if self._portions.drops or len(asked.parameters) > 1:
                return False
        elif begun[0] < asked.dropped or (len(asked.parameters) > 1 and begun[1] < portion_size.MOST):
            return False
        else:
            asked.answered_as_of(begun[0])
        holds = self._portions.is_full(asked.kept_bytes + coming * asked.size)
        if holds and not self._said:
            self._said = True
            self._say(_waiting(asked.size, self._portions.at_most))
        return holds

    def note_result(self, exchange: int, result: float) -> None:
        """A top-level ``evaluate`` ended as ``exchange``."""
        if self._asked is not None and exchange > self._asked.as_of:
            self._asked.since.append(KeptResult(exchange, result))

    def note_drain(self, exchange: int) -> None:
        """The buffers were made equal as ``exchange``."""
        if self._asked is not None:
            self._asked.drained = exchange

    def _install(self, asked: PortionRequest, as_of: int, parts: Mapping[str, Any]) -> None:
        training = self._training
        since = [each for each in asked.since if each.exchange > as_of]
        merged = asked.drained > as_of or any(isinstance(each, KeptRound) and each.applied for each in since)
        if META in asked.want:
            install_meta(training, self._carried, parts[META], merged=merged)
        training.buffers.adopt({index: parts[f"b{index}"] for index in asked.buffers}, merged=merged)
        with torch.no_grad():
            for index in asked.constants:
                training.constants()[index].copy_(parts[f"c{index}"])
        for index in asked.parameters:
            install_parameter(training, index, parts[f"p{index}"])
        for each in since:
            self._catch_up(each, schedules=META in asked.want)
        spare = next((each.kept for each in asked.since if isinstance(each, KeptRound) and each.kept), None)
        if spare is not None:
            training.gradients.take_back(spare)
        training.held = (training.held or 0) | sum(1 << index for index in asked.parameters)

    def _catch_up(self, each: KeptRound | KeptResult, *, schedules: bool) -> None:
        """Do what the group has done since; ``schedules``: the schedule came with it, and is to catch up, too."""
        training = self._training
        if isinstance(each, KeptRound):
            training.catch_up(each.gradients, each.factor, None if schedules else each.hyper)
            if schedules:
                training.advance_schedule(*each.scheduled)
                training.follow_scale(applied=each.applied, finite=each.finite)
        elif schedules:
            training.evaluated(each.result)


def _waiting(size: int, at_most: int) -> str:
    return (
        f"the group waits for this worker until {size / 1e6:.0f} MB of parameters have arrived with their "
        f"optimizer state: keeping the gradients of all rounds meanwhile would take more than {at_most / 1e6:.0f} MB; "
        "a quicker network, or longer rounds, avoid this"
    )
