"""A newcomer receives the group's state while the rounds go on.

Question  How does a follower come to hold weights and optimizer state that change with every round?
Holds     A follower asks a donor for a portion of the tensors and keeps, from that exchange on, the gradients of
          exactly these. The answer names the exchange it is of; the follower repeats the updates since then, and from
          there on makes every update. The memory for kept gradients is bounded: if a portion would exceed it, the next
          ones are smaller, and for a single large tensor the follower takes part in no round until it has arrived. A
          donor that fails is replaced; tensors that were installed stay valid as long as no exchange was missed.
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

# How much a donor copies at a time. A single tensor may be larger.
_REQUEST_BYTES = 128 << 20


class StateRecipient(Protocol):
    """The connection to a donor (``tensors.handoff.Recipient``)."""

    failed: str | None

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None: ...
    def arrived(self) -> Any: ...
    def begun(self) -> tuple[int, float] | None: ...
    def close(self) -> None: ...


def say_to_user(text: str) -> None:
    """Print a line on the worker's stderr."""
    print(f"pliant: {text}", file=sys.stderr, flush=True)


class CatchUp:
    """What a follower lacks, what it has asked for, and the donors that it may ask."""

    def __init__(
        self,
        training: Training,
        carried: Mapping[str, Any],
        connect: Callable[[str], StateRecipient],
        *,
        tensors: bool = True,
        say: Callable[[str], None] = say_to_user,
    ) -> None:
        """Without ``tensors`` only the user's state is missing. ``say`` is called once if the group has to wait."""
        self._training = training
        self._carried = carried
        self._connect = connect
        self._say = say
        self._recipient: StateRecipient | None = None
        self._donors: list[str] = []
        self._asked: PortionRequest | None = None
        self._era = 0
        self._expected: tuple[str, int] | None = None
        """(donor, era) of a planned era whose state at the start was asked for"""
        self._missing: list[str] = []
        self._portions = portion_size.portions(sum(p.nbytes for p in training.parameters))
        self._said = False
        """whether the user was told that the group waits for this worker"""
        self.is_of_newcomer = tensors
        """whether exchanges were missed; else only the script's own code for some updates has not run here"""
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
        """Whether everything but the user's own state is installed."""
        return not self._missing and self._asked is None

    def expect(self, donor: str, era: int) -> None:
        """Ask for the state that a planned era will begin with; ``donor`` answers when it begins."""
        if self._expected == (donor, era):
            return
        self.restart([donor], era, 0, keep=False)
        recipient = self.line()
        assert recipient is not None
        self._ask(recipient, 0)
        self._expected = donor, era

    def restart(self, donors: Sequence[str], era: int, exchange: int, *, keep: bool) -> None:
        """Go on in a new era, with its ``donors``; ``keep``: no exchange was missed."""
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
        """Add donors. One that lacks the state itself refuses, and the next one is asked."""
        self._donors += [address for address in donors if address not in self._donors]

    def lose(self, parameters: Sequence[int]) -> None:
        """Ask for these again: this optimizer has no group for them yet, and misses their updates."""
        names = [META, *(f"p{index}" for index in parameters)]
        self._missing += [name for name in names if name not in self._missing]
        for index in parameters:
            self._training.held = (self._training.held or 0) & ~(1 << index)

    def _ask_again_for(self, asked: PortionRequest | None) -> None:
        """A request has failed: what it asked for is still missing."""
        if asked is not None:
            # A parameter lost meanwhile is in both; installed twice, it would be updated twice.
            self._missing = list(dict.fromkeys([*asked.want, *self._missing]))
        self._asked = None

    def hang_up(self) -> None:
        """Close the connection: what has not arrived does not arrive."""
        if self._recipient is not None:
            self._recipient.close()
            self._recipient = None

    def close(self) -> None:
        """End the catch-up."""
        self.hang_up()
        self._training.held = None

    def pursue(self, exchange: int) -> None:
        """Install what has arrived and ask for what is missing; ``exchange``: the last one settled here."""
        recipient = self.line()
        if recipient is None:
            return
        asked = self._asked
        if asked is not None:
            self._begun()
            # The donor may be one exchange ahead: its tensors contain an update that is still to be made here.
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
        """The connection to the present donor, or to the next one if that has failed. None: there is no donor."""
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
        """Ask for something besides ``everything``: the user's state."""
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

        True: the buffer itself is kept, because copying all gradients into fresh memory would delay the group.
        """
        asked = self._asked
        if asked is None or exchange <= asked.as_of:
            return False
        asked.rounds += means is not None
        begun = self._begun()
        if begun is not None and exchange <= begun[0]:
            # The answer contains this update already.
            return False
        kept = means if len(asked.parameters) == len(self._training.parameters) else None
        needed: dict[int, Tensor] = {}
        if means is not None:
            views = {index: means.views[index] for index in asked.parameters if present >> index & 1}
            needed = {index: view for index, view in views.items() if view is not None}
        # A buffer that is kept as a whole takes all of its memory, however few gradients are in it.
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
        """Bytes of gradients of past rounds that are kept."""
        return self._asked.kept_bytes if self._asked is not None else 0

    def _begun(self) -> tuple[int, float] | None:
        """Of the answer that is arriving or here: the exchange it is of, and the fraction that is here."""
        asked, recipient = self._asked, self._recipient
        if recipient is None or recipient.failed is not None:
            begun = None
        else:
            # In this order: an answer that completes between the two calls is found by the second.
            begun = recipient.begun()
            if asked is not None and asked.answer is None:
                asked.answer = recipient.arrived()
        if asked is not None and asked.answer is not None:
            return asked.answer[0], 1.0
        return begun

    def _make_room(self, asked: PortionRequest, size: int) -> bool:
        """Make room for a round with ``size`` bytes of gradients; False: the request was given up instead."""
        if not self._portions.is_full(asked.kept_bytes + size):
            return True
        begun = self._begun()
        if begun is not None:
            asked.answered_as_of(begun[0])
        if len(asked.parameters) > 1 and self._portions.is_full(asked.kept_bytes + size):
            part = begun[1] if begun is not None else 0.0
            self._portions = portion_size.given_up(self._portions, asked.size, asked.rounds, part)
            self._ask_again_for(asked)
            # The donor stops sending what is of no use any more; it is asked again over another connection.
            self.hang_up()
            return False
        # Only before the answer has begun, and only once: after that ``holds_up`` prevents it.
        while self._portions.is_full(asked.kept_bytes + size) and asked.drop_oldest():
            pass
        return True

    def holds_up(self, coming: int) -> bool:
        """Whether this worker must not take part in another round before its request is answered.

        That is so for a single tensor, or if most of the answer is here. ``coming``: how many rounds may be settled
        until this is asked again. The donor needs no further round in order to answer or send.
        """
        asked, begun = self._asked, self._begun()
        if asked is None or not asked.parameters:
            return False
        if begun is None:
            # A failed or refused request is made again; nothing is kept then, so that there is room for a round.
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
        """A top-level ``evaluate`` ended in ``exchange``."""
        if self._asked is not None and exchange > self._asked.as_of:
            self._asked.since.append(KeptResult(exchange, result))

    def note_drain(self, exchange: int) -> None:
        """The buffers were made equal in ``exchange``."""
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
        """Repeat what the group has done since; ``schedules``: the schedule arrived with it and repeats it, too."""
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
