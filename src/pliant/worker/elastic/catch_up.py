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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from pliant.core import portion_size
from pliant.tensors import allocation
from pliant.tensors.background_copy import BackgroundCopy, CopyMemory
from pliant.tensors.gradients import FlatGradients
from pliant.types import is_dict, is_list_or_tuple
from pliant.worker.elastic.kept_rounds import KeptResult, KeptRound, PortionRequest
from pliant.worker.training import Training

META, STATE = "meta", "state"
_TRAINED = "\0trained"
"""beside the names of the user's own values"""
_AT_END = "state at the end of call "
_BEFORE_HOOKS = "state before the hooks of exchange "
# What a donor copies at a time. One tensor may be larger.
_REQUEST_BYTES = 128 << 20


def at_end_of(call: str) -> str:
    """The name of the user's state as it was at the end of a call."""
    return f"{_AT_END}{call}"


def before_hooks_of(exchange: int) -> str:
    """The name of the user's state as it was when an update was applied, before anything was done with it."""
    return f"{_BEFORE_HOOKS}{exchange}"


def is_before_hooks(want: Sequence[str]) -> bool:
    """Whether it is that which is wanted."""
    return any(name.startswith(_BEFORE_HOOKS) for name in want)


def is_of_end(want: Sequence[str]) -> bool:
    """Whether it is that which is wanted."""
    return any(name.startswith(_AT_END) for name in want)


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
        self._state_from: StateRecipient | None = None
        """who was asked for the user's state"""
        self._state_asked: str | None = None
        """for which"""
        self._states_under_way: deque[int] = deque()
        """as of which exchanges, one answer after another"""
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
        recipient = self._line()
        assert recipient is not None
        self._ask(recipient, 0)
        self._expected = donor, era

    def restart(self, donors: Sequence[str], era: int, exchange: int, *, keep: bool) -> None:
        """An era has begun: ask its active members; ``keep``: no exchange was missed."""
        expected, self._expected = self._expected, None
        if expected == (next(iter(donors), ""), era) and self._asked is not None:
            self._donors, self._asked.as_of = list(donors), exchange
            return
        self._drop_recipient()
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

    def _drop_recipient(self) -> None:
        if self._recipient is not None:
            self._recipient.close()
            self._recipient = None

    def close(self) -> None:
        """No longer needed."""
        self._drop_recipient()
        self._training.held = None

    def pursue(self, exchange: int) -> None:
        """Ask for what is missing, install what has come. ``exchange``: what this worker has settled."""
        recipient = self._line()
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

    def _line(self) -> StateRecipient | None:
        if self._recipient is not None and self._recipient.failed is not None:
            self._drop_recipient()
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

    def ask_state(self, as_of: int) -> None:
        """Ask for the user's own state; everything else is here."""
        recipient = self._line()
        if recipient is not None:
            self._request_state(recipient, as_of, STATE)

    def _request_state(self, recipient: StateRecipient, as_of: int, name: str) -> None:
        if recipient is not self._state_from:
            self._states_under_way.clear()
        self._state_from, self._state_asked = recipient, name
        self._states_under_way.append(as_of)
        recipient.request(self._era, as_of, [name])

    def users_state(self, exchange: int, name: str = STATE) -> Mapping[str, Any] | None:
        """The user's state once it is here; asks again where the donor failed or the answer is out of date.

        ``name``: of another moment than now (``at_end_of``, ``before_hooks_of``).
        """
        if self._state_asked not in (None, name):
            # What it was asked for is due only later, and it answers in turn.
            self._drop_recipient()
        recipient = self._line()
        if recipient is None:
            return None
        # A donor that failed was replaced, perhaps long ago; who came after it has not been asked for this.
        if recipient is not self._state_from:
            self._request_state(recipient, exchange, name)
            return None
        answer = recipient.arrived()
        if answer is None:
            return None
        as_of = self._states_under_way.popleft()
        # Asked for less, the donor may have given more: the state after an update whose code is still to run here.
        if name != STATE or as_of >= exchange:
            return answer[1][name]
        if not self._states_under_way or self._states_under_way[-1] < exchange:
            # This worker was ready, and went along until it was dealt something.
            self._request_state(recipient, exchange, name)
        return None

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
            self._drop_recipient()
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


# -- both ends


def everything(training: Training, live: int | None = None) -> list[str]:
    """The names of all there is to take over but the user's state, in the order in which it is asked for.

    Buffers that are merged (``live``, if not those of ``training``) are small and come with the first part; large ones
    hardly ever change.
    """
    merged = training.buffers.live if live is None else live
    unmerged = [index for index in range(len(training.buffers)) if not merged >> index & 1]
    names = [f"c{i}" for i in range(len(training.constants()))] + [f"b{i}" for i in unmerged]
    return [META, *names, *(f"p{i}" for i in range(len(training.parameters)))]


@torch.no_grad()
def snapshot(training: Training, carried: Mapping[str, Any], want: Sequence[str]) -> dict[str, Any]:
    """What a follower asks for, as of now: copies, except of what never changes.

    The model shows the plain weights and the group's buffers.
    """
    parts: dict[str, Any] = {}
    for name in want:
        if name == META:
            parts[name] = _meta(training, carried)
        elif name == STATE:
            parts[name] = users_state_of(carried)
        elif name.startswith("b"):
            parts[name] = training.buffers.value(int(name[1:]))
        elif name.startswith("c"):
            parts[name] = allocation.lent(training.constants()[int(name[1:])])
        else:
            p = training.parameters[int(name[1:])]
            state = training.optimizer.state.get(p, {})
            parts[name] = {"value": allocation.copied(p), "state": _copied(dict(state))}
    return parts


@torch.no_grad()
def copy_parameters(training: Training, copying: BackgroundCopy) -> dict[str, Any]:
    """The same for all parameters, where they will be when ``copying`` is complete."""
    parts: dict[str, Any] = {}
    for index, p in enumerate(training.parameters):
        state = training.optimizer.state.get(p, {})
        value = copying.of_tensor(training.plain_weights(index))
        parts[f"p{index}"] = {"value": value, "state": copying.of(dict(state))}
    training.copying = copying
    return parts


def room_for_parameters(training: Training) -> CopyMemory:
    """Memory for such a copy."""
    return CopyMemory(training.parameters, [dict(training.optimizer.state.get(p, {})) for p in training.parameters])


def users_state_of(carried: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the user's own state, and which parameters the script trains by now: its code decides about both."""
    values = _copied(stated(carried["state"]))
    return {**values, _TRAINED: _copied(carried["trained"].state_dict())} if "trained" in carried else values


def _meta(training: Training, carried: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trained": _copied(training.trained.state_dict()),
        "buffers": {i: training.buffers.value(i) for i in range(len(training.buffers)) if training.buffers.is_live(i)},
        "epochs": training.epochs_ended,
        "scale": training.scale_state(),
        "outer": _copied(stated({name: carried.get(name) for name in ("scheduler", "scaler", "journal")})),
    }


def stated(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Objects by their ``state_dict``, plain values as they are."""
    present = {name: value for name, value in objects.items() if value is not None}
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in present.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return allocation.copied(value)
    if is_dict(value):
        return {key: _copied(item) for key, item in value.items()}
    if is_list_or_tuple(value):
        return type(value)(_copied(item) for item in value)
    return value


@torch.no_grad()
def install_meta(training: Training, carried: Mapping[str, Any], meta: Mapping[str, Any], *, merged: bool) -> None:
    """Take over hyper-parameters, schedule, scaler, buffers, and what of the journal is not on disk.

    Which parameters are trained is taken over when the script is where the group is, or with the next update.
    """
    for name, value in meta["outer"].items():
        if carried.get(name) is not None:
            carried[name].load_state_dict(value)
    training.trained.take_over(meta["trained"], later=True)
    training.schedule_guard.forget()
    for index in meta["buffers"]:
        training.buffers.grow(1 << index)
    training.buffers.adopt(meta["buffers"], merged=merged)
    ended, training.epochs_ended = training.epochs_ended, meta["epochs"]
    for epoch in range(meta["epochs"], ended):
        # Ended here since; the schedule that was just loaded does not know of it.
        training.end_epoch(epoch)
    training.take_scale(meta["scale"])


@torch.no_grad()
def install(training: Training, carried: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Take over everything but the user's state."""
    install_meta(training, carried, parts[META], merged=False)
    training.buffers.adopt({int(name[1:]): parts[name] for name in parts if _is(name, "b")}, merged=False)
    for index, constant in enumerate(training.constants()):
        constant.copy_(parts[f"c{index}"])
    for index in range(len(training.parameters)):
        install_parameter(training, index, parts[f"p{index}"])


def is_parameter(name: str) -> bool:
    """Whether it is the name of a parameter and its optimizer state."""
    return _is(name, "p")


def _is(name: str, kind: str) -> bool:
    return name[0] == kind and name[1:].isdecimal()


@torch.no_grad()
def install_parameter(training: Training, index: int, part: Mapping[str, Any]) -> None:
    """Take over one parameter and its optimizer state."""
    training.finish_copy()
    p = training.parameters[index]
    p.copy_(part["value"])
    # Asking for a parameter's state makes an empty one: where the donor has none, there is to be none.
    training.optimizer.state.pop(p, None)
    for name, value in part["state"].items():
        # As torch's own load_state_dict: a step counter stays where it is, the rest goes with the parameter.
        moves = isinstance(value, Tensor) and value.shape == p.shape
        training.optimizer.state[p][name] = laid_out_like(p, value) if moves else value


def laid_out_like(p: Tensor, value: Tensor) -> Tensor:
    """The same numbers on the parameter's device, with its strides: fused optimizers walk both by memory."""
    if value.stride() == p.stride():
        return value.to(p.device)
    return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)


def install_users_state(carried: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Take over what the script's code has made of both on other workers."""
    install_state(carried["state"], {name: value for name, value in values.items() if name != _TRAINED})
    if _TRAINED in values and "trained" in carried:
        carried["trained"].take_over(values[_TRAINED], later=False, hyper=False)


def install_state(objects: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Take over the user's own objects and values."""
    for name, value in values.items():
        if hasattr(objects.get(name), "load_state_dict"):
            objects[name].load_state_dict(value)
            if isinstance(objects[name], Optimizer):
                _lay_out_like_parameters(objects[name])
        else:
            objects[name] = value


@torch.no_grad()
def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """State that came over the wire is contiguous, and ``load_state_dict`` leaves it so."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                state[name] = laid_out_like(p, value)
