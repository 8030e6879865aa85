"""Groups that cannot be formed: tensors.process_group.reachability, tensors.process_group.failures, and what
worker.elastic.rendezvous says about them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from pliant.control.link import Position
from pliant.control.mailbox import Mailbox
from pliant.control.messages import Broken, EraPlan, Signature, Void, Welcome
from pliant.errors import Unsupported
from pliant.tensors.process_group import failures, gloo, reachability
from pliant.tensors.process_group.reachability import ProbePort, Unconnected
from pliant.worker.collectives import Collectives
from pliant.worker.elastic.rendezvous import EraBroken, Rendezvous


def closed_port() -> bytes:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1 {listener.getsockname()[1]}".encode()


def test_a_doorbell_is_reached_without_an_answer_and_a_closed_port_is_named() -> None:
    with ProbePort("127.0.0.1", 3) as one, ProbePort("127.0.0.1", 3) as other:
        assert reachability.unreached({0: one.address, 2: other.address}) == ()
        assert reachability.unreached({0: one.address, 1: closed_port(), 2: other.address}) == (1,)


def test_one_that_gives_up_first_can_still_be_reached() -> None:
    address = b""
    with pytest.raises(Unconnected), ProbePort("127.0.0.1", 2) as doorbell:
        address = doorbell.address
        raise Unconnected("no", (1,))
    assert reachability.unreached({0: address}) == ()


class Keys:
    """A control channel within one process; ``lies`` are put in the place of what is said."""

    def __init__(self, **lies: bytes) -> None:
        self._lies = {name.replace("_", "/"): value for name, value in lies.items()}
        self._keys: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, attempt: int, key: str, value: bytes) -> None:
        with self._changed:
            self._keys[key] = self._lies.get(key, value)
            self._changed.notify_all()

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._keys, timeout_s):
                raise TimeoutError(key)
            return self._keys[key]


def formed(keys: Keys, members: int) -> list[gloo.FormingGroup[gloo.Gloo]]:
    def make(place: int) -> gloo.FormingGroup[gloo.Gloo]:
        return gloo.FormingGroup(
            lambda channel: gloo.Gloo(channel, attempt=1, place=place, members=members, address="127.0.0.1"), keys
        )

    return [make(place) for place in range(members)]


def test_who_cannot_be_reached_is_named_by_its_place() -> None:
    forming = formed(Keys(here_1=closed_port()), 2)
    with pytest.raises(Unconnected) as failed:
        forming[0].result()
    assert failed.value.places == (1,)
    forming[1].abandon()


@pytest.fixture
def pair() -> Any:
    groups = [each.result() for each in formed(Keys(), 2)]
    yield groups
    for each in groups:
        each.leave()


@pytest.mark.parametrize("tensor", [torch.zeros(3, dtype=torch.int16), torch.zeros(3, device="meta")], ids=str)
def test_what_no_group_can_sum_is_an_error_of_this_worker(pair: Any, tensor: torch.Tensor) -> None:
    def summed(channels: Collectives) -> None:
        summation = channels.add_up([tensor.clone()])
        assert summation.wait(30.0)
        channels.added_up(summation)

    def fails() -> None:
        with pytest.raises(Unsupported):
            summed(Collectives(pair[1]))

    other = threading.Thread(target=fails)
    other.start()
    with pytest.raises(Unsupported, match=r"cannot be summed with the others' .*: keep parameters"):
        summed(Collectives(pair[0]))
    other.join()


def test_a_broken_connection_is_the_end_of_the_era(pair: Any) -> None:
    channels = Collectives(pair[0])
    gathered = channels.gather(b"ticket")
    pair[1].leave()
    pair[0]._wiring.cut()
    assert gathered.wait(30.0)
    with pytest.raises(EraBroken):
        channels.gathered(gathered)


@pytest.mark.parametrize(
    "text",
    [
        "[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12677. This is typically caused by …",
        "[…/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "something that nobody has seen before",
    ],
)
def test_what_is_unknown_counts_as_a_failure_of_connections(text: str) -> None:
    assert failures.as_own(RuntimeError(text)) is None


def test_no_memory_is_what_it_is() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert failures.as_own(error) is error


# what a worker says about it


class Line:
    """To a coordinator that is written down only."""

    worker = "w0"

    def __init__(self, era: int = 1) -> None:
        self.mailbox = Mailbox(Welcome("job", "w0", 1, 5.0, 0, running=True))
        self.position = Position(era=era, exchange=7, round=7, active=True)
        self.said: list[Any] = []

    def unformed(self, era: int, unreached: Any, *, connecting: bool = True) -> None:
        self.said.append((era, list(unreached), connecting))

    def stopped(self, era: int, exchange: int, **_: Any) -> None:
        self.said.append("stopped")


class Failed:
    over = failed = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> Any:
        raise self._error

    def abandon(self) -> None: ...


PLAN = EraPlan(1, 2, 2, ["w0", "w1", "w2"], "w0", {})


def placed(line: Any, *errors: Exception) -> tuple[Rendezvous, list[int]]:
    attempts: list[int] = []

    def form(attempt: int, place: int, members: int) -> Any:
        attempts.append(attempt)
        return Failed(errors[min(len(attempts), len(errors)) - 1])

    return Rendezvous(line, form, Signature("", [], {}), ""), attempts


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unconnected("no", (1, 2)), (2, ["w1", "w2"], True)),
        (Unconnected("no"), (2, [], True)),
        (TimeoutError("the coordinator is away"), (2, [], False)),
    ],
)
def test_a_plan_whose_group_cannot_be_formed_is_told_of_once_and_the_era_goes_on(error: Exception, said: Any) -> None:
    line: Any = Line()
    place, attempts = placed(line, error)
    line.mailbox.take(PLAN)
    assert [place.prepared(1) for _ in range(3)] == [(0, 0)] * 3
    line.mailbox.take(EraPlan(1, 2, 2, ["w0", "w1", "w2"], "w0", {}))
    assert place.prepared(1) == (0, 0), "told again after a reconnection it is the same plan"
    assert line.said == [said] and attempts == [2]
    place.look(1)
    line.mailbox.take(Void(1, 2))
    assert place.prepared(1) == (0, 0)
    line.mailbox.take(PLAN)
    assert line.mailbox.plan is None, "it does not come about any more"


def test_an_error_of_its_own_is_not_told_as_a_failed_connection() -> None:
    line: Any = Line()
    place, _ = placed(line, Unsupported("no such device"))
    line.mailbox.take(PLAN)
    with pytest.raises(Unsupported):
        place.prepared(1)


def test_a_newcomer_whose_plan_fails_waits_for_another_and_says_nothing_else() -> None:
    line: Any = Line(era=0)
    place, attempts = placed(line, Unconnected("no", (1,)))
    plans = iter([PLAN, Void(1, 2), EraPlan(1, 3, 3, ["w1", "w0"], "w1", {})])

    def sleep(_: float) -> None:
        word = next(plans, None)
        if word is None:
            raise EraBroken("enough")
        line.mailbox.take(word)

    place._sleep = sleep
    with pytest.raises(EraBroken):
        place.next_seat(0, lambda plan: None)
    assert line.said == [(2, ["w1"], True), (3, ["w0"], True)] and attempts == [2, 3]


def test_who_is_about_to_enter_a_dropped_plan_does_not() -> None:
    line: Any = Line(era=0)
    place, _ = placed(line, Unconnected("no"))
    place.look_entering(2)
    line.mailbox.take(Void(1, 2))
    with pytest.raises(EraBroken, match="does not come about"):
        place.look_entering(2)


def test_a_broken_era_ends_a_plan_as_before() -> None:
    line: Any = Line()
    place, _ = placed(line, Unconnected("no"))
    line.mailbox.take(PLAN)
    assert place.prepared(1) == (0, 0)
    line.mailbox.take(Broken(1, 2, "w1 was lost"))
    with pytest.raises(EraBroken, match="w1 was lost"):
        place.look(1)
