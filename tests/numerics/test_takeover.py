"""What a newcomer takes over is as of the exchange at which it goes on, whatever it had asked for or seen before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from numerics.trainings import training_of
from pliant.core.group import Group, OpenPhase, Policy, Standing, founded
from pliant.core.ledger import Hand, Ledger
from pliant.core.tickets import Kind
from pliant.runtime.eras import Eras
from pliant.runtime.place import Seat
from pliant.runtime.takeover import META, STATE, Takeover, at_end_of, snapshot
from pliant.tensors.buffers import Buffers
from pliant.types import WorkerId


class Line:
    """To a donor whose answers the test gives."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.failed: str | None = None
        self.asked: list[tuple[int, list[str]]] = []
        self.eras: list[int] = []
        self.answers: deque[Any] = deque()

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None:
        self.asked.append((as_of, list(want)))
        self.eras.append(era)

    def answer(self, exchange: int, updates: int) -> None:
        self.answers.append((exchange, {name: {"updates": updates} for name in self.asked[-1][1]}))

    def arrived(self) -> Any:
        return self.answers.popleft() if self.answers else None

    def begun(self) -> tuple[int, float] | None:
        return None

    def close(self) -> None: ...


Newcomer = tuple[Takeover, list[Line]]


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    model = nn.Linear(2, 1)
    training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lines: list[Line] = []

    def connect(address: str) -> Line:
        lines.append(Line(address))
        return lines[-1]

    takeover = Takeover(training, {"state": {"updates": 0}}, connect, tensors=False)
    takeover.restart(["there", "elsewhere"], 1, 10, keep=True)
    yield takeover, lines
    takeover.close()
    training.close()


def test_what_was_asked_for_is_taken(newcomer: Newcomer) -> None:
    takeover, lines = newcomer
    takeover.ask_state(12)
    assert takeover.users_state(12) is None
    lines[0].answer(12, updates=4)
    assert takeover.users_state(12) == {"updates": 4}
    # Ahead of the one who asked, the donor gives what it has kept.
    takeover.ask_state(14)
    lines[0].answer(15, updates=5)
    assert takeover.users_state(14) == {"updates": 5}


def test_a_late_answer_to_an_old_question_is_not_taken(newcomer: Newcomer) -> None:
    takeover, lines = newcomer
    takeover.ask_state(12)
    takeover.ask_state(13)
    lines[0].answer(12, updates=4)
    assert takeover.users_state(15) is None, "it has gone along since"
    # The donor has settled 16 meanwhile, and its script has counted that; here that code is still to run.
    lines[0].answer(16, updates=6)
    assert takeover.users_state(15) is None
    assert lines[0].asked == [(12, [STATE]), (13, [STATE]), (15, [STATE])], "once is enough"
    lines[0].answer(16, updates=5)
    assert takeover.users_state(15) == {"updates": 5}


def test_another_donor_is_asked_anew(newcomer: Newcomer) -> None:
    takeover, lines = newcomer
    takeover.ask_state(12)
    lines[0].failed = "gone"
    assert takeover.users_state(13) is None
    assert lines[1].asked == [(13, [STATE])]
    lines[1].answer(13, updates=4)
    assert takeover.users_state(13) == {"updates": 4}


def test_the_state_at_the_end_of_a_call_is_of_no_other_moment(newcomer: Newcomer) -> None:
    takeover, lines = newcomer
    takeover.ask_state(12)
    assert takeover.users_state(13, at_end_of("call 2")) is None
    assert lines[1].asked == [(13, [at_end_of("call 2")])], "on a line of its own: the first one answers in turn"
    lines[1].answer(20, updates=4)
    assert takeover.users_state(14, at_end_of("call 2")) == {"updates": 4}


def test_who_computes_by_now_may_be_asked(newcomer: Newcomer) -> None:
    takeover, lines = newcomer
    takeover.may_ask(["elsewhere", "later"])
    for _ in range(4):
        assert takeover.users_state(13) is None
        lines[-1].failed = "it leaves, and others have a newer one"
    assert [line.address for line in lines] == ["there", "elsewhere", "later", "there"]


def test_statistics_that_are_older_than_a_drain_are_not_taken() -> None:
    """The last round of a loop was skipped: the buffers are made equal by an exchange of their own."""

    def normed() -> Any:
        model = nn.BatchNorm1d(2)
        training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        training.buffers.grow(0b111)
        return training

    donor, training, line = normed(), normed(), Line("there")
    takeover = Takeover(training, {"state": {}}, lambda address: line)
    takeover.restart(["there"], 1, 10, keep=False)
    takeover.pursue(10)
    asked_for = line.asked[0][1]
    assert META in asked_for
    answer = snapshot(donor, {"state": {}}, asked_for)
    for each in (donor, training):
        each.buffers.hand_in(0.0, leader=each is donor)
        each.buffers.merge(torch.tensor([0.5, 0.5, 1.25, 1.25, 7.0], dtype=torch.float64), 1.0)
    takeover.note_drain(11)
    line.answers.append((10, answer))
    takeover.pursue(11)
    assert takeover.complete
    assert all(map(torch.equal, training.buffers.held(), donor.buffers.held()))
    takeover.close()


def test_a_merge_that_is_void_is_taken_back() -> None:
    buffers = Buffers(nn.BatchNorm1d(2))
    assert buffers.hand_in(1.0, leader=True) is None
    buffers.grow(0b11)
    summed = buffers.hand_in(1.0, leader=True)
    assert summed is not None and summed.numel() == 4
    buffers.begin_anew(0b01)
    summed = buffers.hand_in(1.0, leader=True)
    assert summed is not None and summed.numel() == 2
    buffers.begin_anew(0)
    assert buffers.hand_in(1.0, leader=True) is None


class Spare:
    """A worker for which there is no sample: the others run the code in the loop body."""

    def __init__(self) -> None:
        model = nn.Linear(2, 1)
        self.training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.lines: list[Line] = []
        self.served: Any = None
        place, donor, state = SimpleNamespace(me="w2"), SimpleNamespace(serve=self._serve), {"state": {"updates": 3}}
        share: Any = None
        self.eras = Eras(place, donor, self._connect, state, share, share)  # type: ignore[arg-type]
        roster = tuple(map(WorkerId, ("w0", "w1", "w2")))
        addresses = {worker: f"{worker}'s" for worker in roster}
        self.eras.entered(Seat(None, 4, roster, 2, addresses))
        # Two of them compute.
        held = Ledger(30, 0, (), (Hand(),) * 3)
        computed = (True, True, False)
        phase = OpenPhase(1, Kind.TRAIN, 0, 30, (2,) * 3, (0,) * 3, held, took_part=computed, present=(True,) * 3)
        self.before = replace(founded(Policy(4), 3, roster), exchange=33, open=(phase,))

    def _connect(self, address: str) -> Line:
        self.lines.append(Line(address))
        return self.lines[-1]

    def _serve(self, era: int, exchange: int, snapshot: Any) -> None:
        self.served = snapshot

    def now(self, *standings: Standing) -> Group:
        """An era later, in what the script does with the update."""
        return replace(self.before, era=4, exchange=40, standings=standings)


@pytest.fixture
def spare() -> Iterator[Spare]:
    found = Spare()
    yield found
    found.training.close()


def test_who_lost_its_place_in_the_hook_is_not_asked_for_what_follows(spare: Spare) -> None:
    now = spare.now(Standing.FOLLOWING, Standing.ACTIVE, Standing.ACTIVE)
    spare.eras.fell_behind(spare.training, spare.before, now, leaving=False)
    assert not spare.eras.users_state_arrived(now, None)
    assert [line.address for line in spare.lines] == ["w1's"]
    # Of an earlier era's exchange it would answer at once, before it has run that code.
    assert (spare.lines[0].asked, spare.lines[0].eras) == ([(40, [STATE])], [4])
    spare.lines[0].answer(40, updates=4)
    assert spare.eras.users_state_arrived(now, None)
    assert spare.eras.holds_all


def test_where_nobody_runs_what_follows_the_own_state_is_the_newest(spare: Spare) -> None:
    now = spare.now(Standing.FOLLOWING, Standing.FOLLOWING, Standing.ACTIVE)
    spare.eras.fell_behind(spare.training, spare.before, now, leaving=False)
    assert spare.eras.holds_all


def test_who_leaves_hands_its_state_on_unless_somebody_is_ahead_now(spare: Spare) -> None:
    now = spare.now(Standing.FOLLOWING, Standing.FOLLOWING, Standing.LEAVING)
    spare.eras.fell_behind(spare.training, spare.before, now, leaving=True)
    # By now one of them has taken the state over.
    later = replace(spare.now(Standing.ACTIVE, Standing.FOLLOWING, Standing.LEAVING), exchange=41)
    spare.eras.serve(spare.training, later, None)
    assert spare.served([STATE], 41)[STATE]["updates"] == 3
    ahead = spare.now(Standing.FOLLOWING, Standing.ACTIVE, Standing.LEAVING)
    spare.eras.fell_behind(spare.training, spare.before, ahead, leaving=True)
    spare.eras.serve(spare.training, ahead, None)
    with pytest.raises(LookupError, match="newer"):
        spare.served([STATE], 41)
