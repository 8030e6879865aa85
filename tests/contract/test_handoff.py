"""The state stream: what a donor copies arrives bit by bit, and whatever else arrives is refused with a text."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.auth import NONCE_BYTES, PROOF_BYTES
from pliant.tensors import allocation, framing, handoff
from pliant.tensors.handoff import Donor, Recipient

PATIENCE_S = 20.0
TOKEN = "correct horse"


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.001)
    return answer


@pytest.fixture
def donor() -> Iterator[Donor]:
    made = Donor("127.0.0.1", TOKEN)
    yield made
    made.close()


@pytest.fixture
def newcomer(donor: Donor) -> Iterator[Recipient]:
    made = Recipient(donor.address, TOKEN)
    yield made
    made.close()


def passed(donor: Donor, newcomer: Recipient, state: dict[str, Any], exchange: int = 7) -> Any:
    """What the newcomer gets of ``state``."""
    newcomer.request(1, exchange, list(state))
    until(lambda: donor.pending, "the request")
    donor.serve(1, exchange, lambda want, as_of: {name: state[name] for name in want})
    return until(lambda: newcomer.arrived() or newcomer.failed, "the answer")


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.1, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_and_its_optimizer_arrive(donor: Donor, newcomer: Recipient, name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    exchange, arrived = passed(donor, newcomer, state)
    assert exchange == 7
    assert same(arrived, state)
    OPTIMIZERS[name](model.parameters()).load_state_dict(arrived["optimizer"])


def test_every_kind_of_tensor_arrives(donor: Donor, newcomer: Recipient) -> None:
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (2, 3)]
    tensors = [(torch.rand(shape) * 3).to(kind) for kind in kinds for shape in shapes]
    state = {
        "tensors": tensors,
        "not contiguous": torch.arange(12.0).reshape(3, 4).t(),
        "trained": nn.Parameter(torch.ones(2)),
        "large": torch.rand(framing.CHUNK_BYTES // 4 * 2 + 1),
        "plain": (1, 2.5, "text", None, True, [], {}, {3: "number"}),
    }
    _, arrived = passed(donor, newcomer, state)
    assert same(arrived, {**state, "trained": torch.ones(2)})


def test_requests_wait_for_their_era_and_exchange(donor: Donor, newcomer: Recipient) -> None:
    taken: list[Sequence[str]] = []

    def snapshot(want: Sequence[str], as_of: int) -> dict[str, Any]:
        taken.append(want)
        return dict.fromkeys(want, 1)

    newcomer.request(2, 5, ["a"])
    until(lambda: donor.pending, "the request")
    donor.serve(2, 4, snapshot)
    donor.serve(1, 6, snapshot)
    assert donor.pending and not taken
    donor.serve(2, 6, snapshot)
    assert until(newcomer.arrived, "the answer") == (6, {"a": 1})
    assert not donor.pending
    newcomer.request(2, 8, ["a", "b"])
    until(lambda: donor.pending, "the request")
    donor.serve(3, 8, snapshot)
    assert until(newcomer.arrived, "the answer") == (8, {"a": 1, "b": 1})
    assert taken == [["a"], ["a", "b"]]
    assert newcomer.arrived() is None and newcomer.failed is None


def test_several_newcomers_are_served_at_one_rest(donor: Donor) -> None:
    newcomers = [Recipient(donor.address, TOKEN) for _ in range(3)]
    for each in newcomers:
        each.request(1, 2, ["x"])
    answers: list[Any] = []

    def all_answered() -> bool:
        donor.serve(1, 2, lambda want, as_of: {"x": torch.ones(1000)})
        answers.extend(answer for each in newcomers if (answer := each.arrived()))
        return len(answers) == 3

    until(all_answered, "three answers")
    for each in newcomers:
        each.close()


def test_what_the_donor_cannot_give_is_a_text_at_the_newcomer(donor: Donor) -> None:
    for state, said in [({}, "KeyError: 'x'"), ({"x": object()}, "state.x is a object")]:
        newcomer = Recipient(donor.address, TOKEN)
        newcomer.request(1, 1, ["x"])
        until(lambda: donor.pending, "the request")
        donor.serve(1, 1, lambda want, as_of, state=state: {name: state[name] for name in want})
        assert said in until(lambda newcomer=newcomer: newcomer.failed, "the failure")
        newcomer.close()


def test_a_wrong_token_is_refused_on_both_sides(donor: Donor) -> None:
    stranger = Recipient(donor.address, "wrong")
    stranger.request(1, 1, ["x"])
    assert "did not accept the token" in until(lambda: stranger.failed, "the failure")
    assert not donor.pending
    with socket.create_server(("127.0.0.1", 0)) as server:
        victim = Recipient(f"127.0.0.1:{server.getsockname()[1]}", TOKEN)
        connection, _ = server.accept()
        with connection:
            # An impostor that plays the newcomer's own proof back to it.
            connection.sendall(framing._GREETING + bytes(32))
            said = connection.recv(64, socket.MSG_WAITALL)
            connection.sendall(said[32:])
            assert "does not know the token" in until(lambda: victim.failed, "the failure")


def test_an_address_where_nobody_listens(donor: Donor) -> None:
    donor.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    for address in (f"127.0.0.1:{free}", "nonsense", "127.0.0.1:70000"):
        newcomer = Recipient(address, TOKEN)
        assert address in until(lambda newcomer=newcomer: newcomer.failed, "the failure")


def test_a_donor_that_closes_in_mid_stream(donor: Donor, newcomer: Recipient) -> None:
    newcomer.request(1, 1, ["x"])
    until(lambda: donor.pending, "the request")
    large = torch.empty(64 << 20, dtype=torch.uint8)
    cut = threading.Event()
    write_chunks = framing.write_chunks

    def closing(writer: Any, memory: memoryview) -> None:
        if len(memory) == len(large):
            write_chunks(writer, memory[: 3 * framing.CHUNK_BYTES])
            donor.close()
            cut.set()
        write_chunks(writer, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "write_chunks", closing)
        donor.serve(1, 1, lambda want, as_of: {"x": large})
        assert cut.wait(PATIENCE_S)
        assert newcomer.failed or until(lambda: newcomer.failed, "the failure")
    assert newcomer.arrived() is None


def test_a_newcomer_knows_how_much_of_an_answer_is_here(donor: Donor, newcomer: Recipient) -> None:
    tensors = [torch.arange(1000.0), torch.arange(3000.0)]
    go_on = threading.Event()
    write_chunks = framing.write_chunks

    def halting(writer: Any, memory: memoryview) -> None:
        if len(memory) == tensors[1].nbytes:
            writer.flush()
            assert go_on.wait(PATIENCE_S)
        write_chunks(writer, memory)

    assert newcomer.begun() is None
    newcomer.request(1, 7, ["x"])
    until(lambda: donor.pending, "the request")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "write_chunks", halting)
        donor.serve(1, 7, lambda want, as_of: {"x": tensors})
        assert until(lambda: (newcomer.begun() or (0, 0.0))[1] and newcomer.begun(), "the first tensor") == (7, 0.25)
        assert newcomer.arrived() is None
        go_on.set()
        until(newcomer.arrived, "the answer")
    assert newcomer.begun() is None


def test_a_newcomer_that_goes_is_forgotten(donor: Donor, newcomer: Recipient) -> None:
    newcomer.request(1, 9, ["x"])
    until(lambda: donor.pending, "the request")
    newcomer.close()
    until(lambda: not donor.pending, "the withdrawal")
    assert newcomer.failed is None


def test_a_forked_child_keeps_no_connection_open(donor: Donor, newcomer: Recipient) -> None:
    assert passed(donor, newcomer, {"x": 1}) == (7, {"x": 1})
    go, gone = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gone)
        os.read(go, 1)
        os._exit(0)
    donor.close()
    assert until(lambda: newcomer.failed, "the end of the connection")
    os.close(gone)
    os.close(go)
    os.waitpid(child, 0)


# -- damaged streams

STATE = {"weights": torch.arange(300.0), "step": torch.tensor(3), "betas": (0.9, 0.99), "groups": [{"lr": 0.1}]}


def recorded() -> bytes:
    """An answer as it goes over the wire."""
    waiting = handoff._Waiting(handoff._Request(1, 1, []))
    waiting.answer(handoff._State(1, 0, 0), dict(STATE))
    out = io.BytesIO()
    handoff._send_answer(out, waiting)
    return out.getvalue()


ANSWER = recorded()


def test_what_changes_while_it_is_sent_is_never_taken_for_whole() -> None:
    """Large tensors that nobody is expected to change are not copied."""
    frozen = allocation.lent(torch.ones(2 << 20))
    waiting = handoff._Waiting(handoff._Request(1, 1, []))
    waiting.answer(handoff._State(1, 0, 0), {"frozen": frozen})
    frozen.mul_(2.0)
    out = io.BytesIO()
    with pytest.raises(framing.StreamBroken, match="changed meanwhile"):
        handoff._send_answer(out, waiting)
    with pytest.raises(framing.StreamBroken, match="too early"):
        read(out.getvalue())


def read(data: bytes) -> Any:
    reader = io.BytesIO(data)
    return handoff._read_answer(reader, framing.read_frame(reader))


def test_an_undamaged_recording_is_read() -> None:
    exchange, state = read(ANSWER)
    assert exchange == 1 and same(state, STATE)


@given(st.integers(0, len(ANSWER) - 1))
def test_a_short_stream_is_broken(length: int) -> None:
    with pytest.raises(framing.StreamBroken):
        read(ANSWER[:length])


@given(st.integers(0, len(ANSWER) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_broken_or_harmless(index: int, flip: int) -> None:
    damaged = bytearray(ANSWER)
    damaged[index] ^= flip
    try:
        answer = read(bytes(damaged))
    except framing.StreamBroken:
        return
    # Only the head has no checksum: TCP's has to do for the number of the exchange and the word "state".
    assert same(answer[1], STATE)


@given(st.binary(max_size=200))
def test_noise_is_broken(data: bytes) -> None:
    with pytest.raises(framing.StreamBroken):
        read(data)


JSON = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(["t", "u", "d", "float32", "Tensor", "load"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["t", "u", "d", "x"]), inner, max_size=2)
    ),
)


@given(JSON)
def test_a_skeleton_that_makes_no_sense_is_broken(skeleton: Any) -> None:
    encoded = msgspec.json.encode(skeleton)
    out = io.BytesIO()
    framing.write_chunks(out, memoryview(encoded))
    framing.write_frame(out, handoff._WHOLE)
    out.seek(0)
    try:
        state = handoff._read_state(out, handoff._State(1, len(encoded), 0))
    except framing.StreamBroken:
        return
    assert isinstance(state, dict)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (handoff._State(1, handoff.SKELETON_BYTES + 1, 0), "announces a skeleton"),
        (handoff._State(1, 40, 1 << 60), "bytes of tensors and describes"),
    ],
)
def test_nothing_is_allocated_on_a_liars_word(head: Any, said: str) -> None:
    skeleton = msgspec.json.encode({"d": [["x", {"t": ["uint8", [2]]}]]}).ljust(40)
    out = io.BytesIO()
    framing.write_frame(out, msgspec.msgpack.encode(head))
    framing.write_chunks(out, memoryview(skeleton))
    with pytest.raises(framing.StreamBroken, match=said):
        read(out.getvalue())


@given(st.lists(st.integers(1, 1 << 62), min_size=1, max_size=3))
def test_shapes_beyond_all_memory_are_broken(shape: list[int]) -> None:
    shape = [*shape, 1 << 55]
    skeleton = msgspec.json.encode({"d": [["x", {"t": ["float64", shape]}]]})
    size = handoff.size_of(handoff.described(skeleton))
    out = io.BytesIO()
    framing.write_chunks(out, memoryview(skeleton))
    out.seek(0)
    with pytest.raises(framing.StreamBroken):
        handoff._read_state(out, handoff._State(1, len(skeleton), size))


REQUEST = msgspec.msgpack.encode(handoff._Request(2, 3, ["model", "optimizer"]))


@given(st.binary(max_size=100) | st.integers(0, len(REQUEST)).map(lambda n: len(REQUEST).to_bytes(4) + REQUEST[:n]))
def test_the_donors_reader_takes_requests_or_breaks(data: bytes) -> None:
    try:
        request = handoff._read_request(io.BytesIO(data))
    except framing.StreamBroken:
        return
    assert isinstance(request.as_of, int) and all(isinstance(name, str) for name in request.want)


def test_a_donor_survives_whatever_connects(donor: Donor, newcomer: Recipient) -> None:
    host, _, port = donor.address.partition(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(10_000)):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    # One that knows the token and then talks nonsense.
    with (
        socket.create_connection((host, int(port))) as connection,
        connection.makefile("rb") as reader,
        connection.makefile("wb") as writer,
    ):
        framing.introduce(reader, writer, TOKEN)
        connection.sendall(b"\xff" * 100)
        assert reader.read() == b""
    assert passed(donor, newcomer, {"x": 1}) == (7, {"x": 1})


# -- strangers


def connected(donor: Donor) -> socket.socket:
    host, _, port = donor.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_idle_strangers_shut_out_no_newcomer(donor: Donor) -> None:
    strangers: list[socket.socket] = []
    try:
        for _ in range(handoff._STRANGERS + 10):
            strangers.append(connected(donor))
            # It has the greeting, and so a place.
            assert strangers[-1].recv(1) == b"p"
        newcomer = Recipient(donor.address, TOKEN)
        assert passed(donor, newcomer, {"x": 1}) == (7, {"x": 1})
        newcomer.close()
    finally:
        for stranger in strangers:
            stranger.close()


def test_there_is_an_end_to_newcomers_too(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_CONNECTIONS", 1)
    first, second = Recipient(donor.address, TOKEN), None
    try:
        assert passed(donor, first, {"x": 1}) == (7, {"x": 1})
        second = Recipient(donor.address, TOKEN)
        second.request(1, 7, ["x"])
        assert until(lambda: second.failed, "the refusal")
        assert passed(donor, first, {"x": 2}) == (7, {"x": 2})
    finally:
        for each in (first, second):
            if each is not None:
                each.close()


def test_a_stranger_that_trickles_has_one_deadline(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_GREETING_S", 0.5)
    with connected(donor) as stranger, pytest.raises(ConnectionError):
        # One byte less than nonce and proof have: it is never told that it is wrong.
        for _ in range(NONCE_BYTES + PROOF_BYTES - 1):
            stranger.sendall(b"x")
            time.sleep(0.1)
