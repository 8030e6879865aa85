"""What a newcomer takes over is as of the exchange at which it goes on, whatever it had asked for or seen before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from numerics.trainings import training_of
from pliant.core import portion_size
from pliant.core.group_state import GroupState, OpenPhase, Policy, Standing, founded
from pliant.core.ledger import Hand, Ledger
from pliant.core.tickets import Kind
from pliant.tensors.buffers import ModelBuffers
from pliant.tensors.gradients import FlatGradients
from pliant.types import WorkerId
from pliant.worker.elastic.catch_up import CatchUp
from pliant.worker.elastic.donor import StateServer
from pliant.worker.elastic.reception import Reception
from pliant.worker.elastic.rendezvous import EraBroken, FormedGroup
from pliant.worker.elastic.user_state import STATE, UserState, at_end_of, before_hooks_of
from pliant.worker.script.hooks import Hooks, Update
from pliant.worker.snapshot import META, snapshot


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


class Newcomer:
    """It holds everything but the user's state, and asks for that."""

    def __init__(self) -> None:
        model = nn.Linear(2, 1)
        self.training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.lines: list[Line] = []
        state = {"state": {"updates": 0}}
        name = WorkerId("w2")
        reception = Reception(lambda: name, self.training, state, self._connect, lambda text: None)
        self._users_state = UserState(lambda: name, self.training, state, reception, shared=True)
        reception.take_users_state(["there", "elsewhere"], replace(founded(Policy(4), 1, [name]), exchange=10))
        assert reception.under_way is not None
        self.takeover = reception.under_way
        self.ask, self.close = self._users_state.ask, self._users_state.drop

    def _connect(self, address: str) -> Line:
        self.lines.append(Line(address))
        return self.lines[-1]

    def users_state(self, exchange: int, name: str = STATE) -> Any:
        """What has come of it."""
        return self._users_state.awaited(self.takeover, exchange, name)


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    found = Newcomer()
    yield found
    found.close()
    found.training.close()


def test_what_was_asked_for_is_taken(newcomer: Newcomer) -> None:
    newcomer.ask(12)
    assert newcomer.users_state(12) is None
    newcomer.lines[0].answer(12, updates=4)
    assert newcomer.users_state(12) == {"updates": 4}
    # Ahead of the one who asked, the donor gives what it has kept.
    newcomer.ask(14)
    newcomer.lines[0].answer(15, updates=5)
    assert newcomer.users_state(14) == {"updates": 5}


def test_a_late_answer_to_an_old_question_is_not_taken(newcomer: Newcomer) -> None:
    lines = newcomer.lines
    newcomer.ask(12)
    newcomer.ask(13)
    lines[0].answer(12, updates=4)
    assert newcomer.users_state(15) is None, "it has gone along since"
    # The donor has settled 16 meanwhile, and its script has counted that; here that code is still to run.
    lines[0].answer(16, updates=6)
    assert newcomer.users_state(15) is None
    assert lines[0].asked == [(12, [STATE]), (13, [STATE]), (15, [STATE])], "once is enough"
    lines[0].answer(16, updates=5)
    assert newcomer.users_state(15) == {"updates": 5}


def test_another_donor_is_asked_anew(newcomer: Newcomer) -> None:
    lines = newcomer.lines
    newcomer.ask(12)
    lines[0].failed = "gone"
    assert newcomer.users_state(13) is None
    assert lines[1].asked == [(13, [STATE])]
    lines[1].answer(13, updates=4)
    assert newcomer.users_state(13) == {"updates": 4}


def test_the_state_at_the_end_of_a_call_is_of_no_other_moment(newcomer: Newcomer) -> None:
    lines = newcomer.lines
    newcomer.ask(12)
    assert newcomer.users_state(13, at_end_of("call 2")) is None
    assert lines[1].asked == [(13, [at_end_of("call 2")])], "on a line of its own: the first one answers in turn"
    lines[1].answer(20, updates=4)
    assert newcomer.users_state(14, at_end_of("call 2")) == {"updates": 4}


def test_who_computes_by_now_may_be_asked(newcomer: Newcomer) -> None:
    newcomer.takeover.may_ask(["elsewhere", "later"])
    for _ in range(4):
        assert newcomer.users_state(13) is None
        newcomer.lines[-1].failed = "it leaves, and others have a newer one"
    assert [line.address for line in newcomer.lines] == ["there", "elsewhere", "later", "there"]


def test_statistics_that_are_older_than_a_drain_are_not_taken() -> None:
    """The last round of a loop was skipped: the buffers are made equal by an exchange of their own."""

    def normed() -> Any:
        model = nn.BatchNorm1d(2)
        training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        training.buffers.grow(0b111)
        return training

    donor, training, line = normed(), normed(), Line("there")
    takeover = CatchUp(training, {"state": {}}, lambda address: line)
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
    buffers = ModelBuffers(nn.BatchNorm1d(2))
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
        state = self.state = {"state": {"updates": 3}}
        me, donor = WorkerId("w2"), SimpleNamespace(pending=True, address="", serve=self._serve, close=lambda: None)
        self.reception = Reception(lambda: me, self.training, state, self._connect, lambda text: None)
        self.users_state = UserState(lambda: me, self.training, state, self.reception, shared=True)
        self.donor = StateServer(donor, self.training, state, self.reception, self.users_state)
        roster = tuple(map(WorkerId, ("w0", "w1", "w2")))
        addresses = {worker: f"{worker}'s" for worker in roster}
        self.reception.entered(FormedGroup(None, 4, roster, 2, addresses))
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

    def now(self, *standings: Standing) -> GroupState:
        """An era later, in what the script does with the update."""
        return replace(self.before, era=4, exchange=40, standings=standings)


@pytest.fixture
def spare() -> Iterator[Spare]:
    found = Spare()
    yield found
    found.training.close()


def test_who_lost_its_place_in_the_hook_is_not_asked_for_what_follows(spare: Spare) -> None:
    now = spare.now(Standing.FOLLOWING, Standing.ACTIVE, Standing.ACTIVE)
    spare.users_state.fell_behind(spare.before, now, leaving=False)
    assert not spare.users_state.arrived(now, None)
    assert [line.address for line in spare.lines] == ["w1's"]
    # Of an earlier era's exchange it would answer at once, before it has run that code.
    assert (spare.lines[0].asked, spare.lines[0].eras) == ([(40, [STATE])], [4])
    spare.lines[0].answer(40, updates=4)
    assert spare.users_state.arrived(now, None)
    assert spare.reception.holds_all


def test_where_nobody_runs_what_follows_the_own_state_is_the_newest(spare: Spare) -> None:
    now = spare.now(Standing.FOLLOWING, Standing.FOLLOWING, Standing.ACTIVE)
    spare.users_state.fell_behind(spare.before, now, leaving=False)
    assert spare.reception.holds_all


def test_who_leaves_hands_its_state_on_unless_somebody_is_ahead_now(spare: Spare) -> None:
    now = spare.now(Standing.FOLLOWING, Standing.FOLLOWING, Standing.LEAVING)
    spare.users_state.fell_behind(spare.before, now, leaving=True)
    # By now one of them has taken the state over.
    later = replace(spare.now(Standing.ACTIVE, Standing.FOLLOWING, Standing.LEAVING), exchange=41)
    spare.donor.serve(later)
    assert spare.served([STATE], 41)[STATE]["updates"] == 3
    ahead = spare.now(Standing.FOLLOWING, Standing.ACTIVE, Standing.LEAVING)
    spare.users_state.fell_behind(spare.before, ahead, leaving=True)
    spare.donor.serve(ahead)
    with pytest.raises(LookupError, match="newer"):
        spare.served([STATE], 41)


def test_a_copy_that_was_kept_is_there_after_the_loop_has_ended_with_the_next_update(spare: Spare) -> None:
    """The one that asks has not settled that update. With the end of the loop none lacks anything any more."""
    state, ended = spare.state["state"], replace(spare.before, exchange=34, open=())
    spare.users_state.keep_for_latecomers(33, may_ask=True)
    state["updates"] += 1
    spare.users_state.keep_for_latecomers(34, may_ask=False)
    spare.donor.serve(ended)
    assert spare.served([STATE], 33)[STATE]["updates"] == 3
    # After the next exchange none is left that might ask for it.
    spare.users_state.keep_for_latecomers(35, may_ask=False)
    spare.donor.serve(replace(ended, exchange=35))
    assert spare.served([STATE], 33)[STATE]["updates"] == 4


class Ready:
    """One of two newcomers that became active with an update. Only ``w0`` has the user's state before its hooks."""

    def __init__(self) -> None:
        model = nn.Linear(2, 1)
        self.training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.line = Line("w0's")
        self.state = {"updates": 0}
        state, me = {"state": self.state}, WorkerId("w1")
        self.roster = tuple(map(WorkerId, ("w0", "w1", "w2")))
        self.reception = Reception(lambda: me, self.training, state, lambda address: self.line, lambda text: None)
        self.users_state = UserState(lambda: me, self.training, state, self.reception, shared=True)
        self.group = replace(founded(Policy(4), 3, self.roster), exchange=33, round=5, updates=4)
        self.reception.take_over(self.group, self.seat(3, *self.roster), keep=True)
        member: Any = SimpleNamespace(
            me=me,
            group=self.group,
            training=self.training,
            reception=self.reception,
            users_state=self.users_state,
            script=SimpleNamespace(calls=0, draws=lambda: None),
            fresh=frozenset(self.roster[1:]),
            follows=False,
        )
        lookout: Any = SimpleNamespace(in_hook=False, swapped=None, wait_at_rest=lambda arrived: self.wait(arrived))
        self.hooks = Hooks(member, lookout)
        self.hooks.add_on_update(self._count)
        self.wait: Callable[[Callable[[], bool]], None] = lambda arrived: None

    def seat(self, era: int, *roster: WorkerId) -> FormedGroup:
        return FormedGroup(None, era, roster, 0, {worker: f"{worker}'s" for worker in roster})

    def _count(self, update: Update) -> None:
        self.state["updates"] += 1

    def update(self) -> None:
        outcome: Any = SimpleNamespace(round=5, loss=0.5, ended=False)
        self.hooks.note(outcome, (0.1,), lambda: None)

    def handed_on(self) -> Any:
        """What ``w2`` gets, which asks for that moment."""
        name = before_hooks_of(33)
        found = self.users_state.answer([name], 33, self.group)
        assert found is not None
        return found[name]


@pytest.fixture
def ready() -> Iterator[Ready]:
    found = Ready()
    yield found
    found.users_state.drop()
    found.training.close()


def test_who_was_sent_the_state_before_the_hooks_hands_it_on(ready: Ready) -> None:
    """The one that had it may be lost before it has sent it to the other one."""

    def wait(arrived: Callable[[], bool]) -> None:
        assert not arrived()
        ready.line.answer(33, updates=3)
        assert arrived()

    ready.wait = wait
    ready.update()
    with pytest.raises(LookupError):
        ready.handed_on()
    ready.hooks.call()
    assert ready.state == {"updates": 4}
    assert ready.handed_on() == {"updates": 3}


def test_who_goes_on_without_the_state_before_the_hooks_hands_its_own_on(ready: Ready) -> None:
    """The one that had it is lost: the other newcomer waits for that of the new era's donor."""

    def wait(arrived: Callable[[], bool]) -> None:
        assert not arrived()
        raise EraBroken("w0 was lost")

    ready.wait = wait
    ready.update()
    with pytest.raises(EraBroken):
        ready.hooks.call()
    rest = ready.roster[1:]
    now = replace(ready.group, era=4, exchange=34, roster=rest, standings=(Standing.ACTIVE,) * 2)
    ready.users_state.go_on(now, ready.seat(4, *rest), knows_best=True)
    assert ready.users_state.lost
    ready.hooks.call()
    assert ready.state == {"updates": 1}
    assert ready.handed_on() == {"updates": 0}


# -- what is kept of the rounds meanwhile


class Sending(Line):
    """... and says how much of the next answer is here."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.head: tuple[int, float] | None = None

    def begun(self) -> tuple[int, float] | None:
        return self.head


class Meanwhile:
    """A newcomer with large tensors, the donor's training, and the rounds that both make."""

    def __init__(self, *sizes: int) -> None:
        self.mine, self.theirs = self._training(sizes), self._training(sizes)
        self.lines: list[Sending] = []
        self.takeover = CatchUp(self.mine, {"state": {}}, self._connect)
        self.takeover.restart(["there"], 1, 10, keep=False)
        self.bound = portion_size.COPIES * sum(p.nbytes for p in self.mine.parameters)
        self.snapshots: dict[int, dict[str, Any]] = {}
        self.exchange = 10

    def _training(self, sizes: Sequence[int]) -> Any:
        model = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
        return training_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def _connect(self, address: str) -> Sending:
        self.lines.append(Sending(address))
        return self.lines[-1]

    @property
    def line(self) -> Sending:
        return self.lines[-1]

    def round(self, present: int = -1) -> None:
        """One more is settled."""
        self.exchange += 1
        means = FlatGradients(self.theirs.parameters)
        for view in means.views:
            assert view is not None
            view.fill_(0.01 * self.exchange)
        present &= (1 << len(means.views)) - 1
        gradients = {i: view.clone() for i, view in enumerate(means.views) if view is not None and present >> i & 1}
        held, self.mine.held = self.mine.held or 0, None
        self.mine.catch_up({i: gradient for i, gradient in gradients.items() if held >> i & 1}, 1.0, None)
        self.mine.held = held
        self.takeover.note(self.exchange, means, present, 1.0, (0.0, 0.0))
        self.theirs.catch_up(gradients, 1.0, None)
        assert self.takeover.kept_bytes <= self.bound

    def copy(self) -> None:
        """The donor copies what was asked for last; it is as of now."""
        self.snapshots[self.exchange] = snapshot(self.theirs, {"state": {}}, self.line.asked[-1][1])

    def answer(self, exchange: int) -> None:
        """That has arrived."""
        self.line.answers.append((exchange, self.snapshots[exchange]))
        self.line.head = None

    def close(self) -> None:
        for ours, theirs in zip(self.mine.parameters, self.theirs.parameters, strict=True):
            assert torch.equal(ours, theirs)
        self.takeover.close()
        self.mine.close()
        self.theirs.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portion_size, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("small")
def test_an_answer_that_is_here_and_not_installed_yet_loses_no_round() -> None:
    """Between its last byte and the next look at it: a round more would not fit, and an older one is needed."""
    run = Meanwhile(8)
    run.takeover.pursue(10)
    run.copy()
    run.line.head = 10, 0.5
    run.round()
    assert run.takeover.holds_up(2) and not run.takeover.holds_up(1)
    run.round()
    assert run.takeover.holds_up(1)
    run.answer(10)
    assert run.takeover.holds_up(1), "it is to be installed first"
    run.takeover.pursue(run.exchange)
    assert run.takeover.complete and not run.takeover.holds_up(1)
    assert len(run.line.asked) == 1, "it was of use"
    run.round()
    run.close()


@pytest.mark.usefixtures("small")
def test_an_answer_whose_head_is_late_is_asked_for_once_more_and_then_waited_for() -> None:
    run = Meanwhile(8)
    run.takeover.pursue(10)
    run.copy()
    for _ in range(3):
        assert not run.takeover.holds_up(1)
        run.round()
    run.answer(10)
    run.takeover.pursue(run.exchange)
    assert [as_of for as_of, _ in run.line.asked] == [10, 13], "round 11 was dropped"
    run.copy()
    assert not run.takeover.holds_up(2), "two rounds always fit"
    run.round()
    run.round()
    assert run.takeover.holds_up(1), "nothing is known about the answer, and nothing is dropped"
    run.takeover.pursue(run.exchange)
    run.answer(13)
    assert run.takeover.holds_up(1)
    run.takeover.pursue(run.exchange)
    assert run.takeover.complete
    run.close()


@pytest.mark.usefixtures("small")
def test_a_donor_that_fails_before_it_has_answered_is_waited_for_no_longer() -> None:
    """It may have refused because it needs the very round that is held up."""
    run = Meanwhile(8)
    run.takeover.pursue(10)
    run.copy()
    for _ in range(3):
        run.round()
    run.answer(10)
    run.takeover.pursue(run.exchange)
    run.round()
    run.round()
    assert run.takeover.holds_up(1)
    run.line.failed = "refused"
    run.takeover.pursue(run.exchange)
    assert not run.takeover.holds_up(2)
    run.copy()
    run.round()
    run.answer(15)
    run.takeover.pursue(run.exchange)
    run.close()


@pytest.mark.usefixtures("small")
def test_several_tensors_that_arrive_before_a_round_that_does_not_fit_are_asked_for_again() -> None:
    """They were neither here nor near when the newcomer said that it takes part in that round."""
    run = Meanwhile(8, 8, 8)
    run.takeover.pursue(10)
    run.copy()
    run.line.head = 10, 0.1
    for _ in range(2):
        assert not run.takeover.holds_up(1)
        run.round()
    assert not run.takeover.holds_up(1)
    run.answer(10)
    run.round()
    assert len(run.lines) == 1 and run.takeover.kept_bytes == 0
    for _ in range(4):
        run.takeover.pursue(run.exchange)
        if run.takeover.complete:
            break
        run.copy()
        run.answer(run.exchange)
    assert len(run.lines) == 2, "on another line"
    run.close()


@pytest.mark.usefixtures("small")
def test_a_buffer_that_is_kept_counts_as_a_whole() -> None:
    """Though few parameters got a gradient: its memory is that of all of them."""
    run = Meanwhile(8, 8, 8, 8)
    run.takeover.pursue(10)
    run.round(present=0b1)
    assert run.takeover.kept_bytes == run.bound // 2
    run.round(present=0b10)
    assert run.takeover.kept_bytes == run.bound
    run.round(present=0b100)
    assert run.takeover.kept_bytes == 0, "the portion was given up"
    for _ in range(5):
        run.takeover.pursue(run.exchange)
        if run.takeover.complete:
            break
        run.copy()
        run.answer(run.exchange)
    run.close()
