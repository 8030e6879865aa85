"""A few thousand hostile inputs for every surface, and proof that the harness would notice."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from benchmarks.fuzz import control
from benchmarks.fuzz.control import ControlSurface, Session
from benchmarks.fuzz.handoffs import HandoffSurface
from benchmarks.fuzz.journals import JournalSurface
from benchmarks.fuzz.schedule import SURFACES, opened, selection
from benchmarks.fuzz.surface import Outcome, chance_of, hammer

from pliant.control import messages
from pliant.coordinator.store_relay import StoreRelay
from pliant.core.journal import records as journal
from pliant.tensors import framing

INPUTS = {"control": 2400, "journal": 1200, "handoff": 3000, "ticket": 3000, "checkpoint": 2000, "socket": 200}
GROWN_BYTES = 64 << 20
"""A process whose allocator has settled grows by far less; one that keeps what it is sent by far more."""

SEED = 20


def fired(name: str, seed: int = SEED) -> Outcome:
    surface = opened(name)
    try:
        return hammer(surface, INPUTS[name], seed)
    finally:
        surface.close()


@pytest.mark.parametrize("name", [name for name in SURFACES if name != "socket"])
def test_a_surface_stands_hostile_input(name: str) -> None:
    outcome = fired(name)
    assert outcome.failures == []
    assert outcome.inputs >= INPUTS[name] and outcome.accepted > 0 and outcome.rejected > 0
    assert outcome.grown_bytes < GROWN_BYTES


@pytest.mark.slow
def test_the_coordinators_port_stands_hostile_input() -> None:
    assert fired("socket").failures == []


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_stands_hostile_input_for_long(name: str) -> None:
    """``INPUTS`` of them, from a fresh ``SEED``; a failure says which volley it was."""
    inputs, seed = int(os.environ.get("INPUTS", "50000")), int(os.environ.get("SEED", str(time.time_ns() // 10**9)))
    surface = opened(name)
    try:
        outcome = hammer(surface, inputs // 50 if name == "socket" else inputs, seed)
    finally:
        surface.close()
    assert outcome.failures == [], f"SEED={seed}"
    assert outcome.grown_bytes < GROWN_BYTES


def test_a_coordinator_keeps_nothing_of_what_it_refuses() -> None:
    session = Session(chance_of("control", SEED, 0))
    session.train()

    def siege(volleys: int) -> int:
        for _ in range(volleys):
            wire = session.connected()
            session.hostile.append((wire, False))
            session.receive(wire, False, messages.encode(messages.Hello("w2", 7, control.VERSION)), lambda _: True)
            session.receive(wire, False, b"\xc1" * 100, lambda _: True)
            session.tick(0.05)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = siege(60)
        grown = siege(200) - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000


def test_a_volley_is_repeated_by_its_number() -> None:
    surface = ControlSurface()
    first, second = surface.fire(chance_of("control", 1, 5)), surface.fire(chance_of("control", 1, 5))
    assert (first.accepted, first.rejected) == (second.accepted, second.rejected)


def test_an_unknown_surface_is_named() -> None:
    assert selection([]) == list(SURFACES)
    with pytest.raises(ValueError, match="unknown surface: disk"):
        selection(["disk"])


# What the harness is there to notice.


def test_a_coordinator_that_raises_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def push(self: Any, *_: Any) -> None:
        raise KeyError("key")

    monkeypatch.setattr(StoreRelay, "push", push)
    outcome = hammer(ControlSurface(), 2000, SEED)
    assert outcome.failed > 0 and "--surface control --seed 20 --start" in outcome.failures[0]


def test_a_coordinator_that_believes_any_era_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.core.membership.reports.is_credible", lambda state, era: True)
    session = Session(chance_of("control", SEED, 0))
    session.train()
    session.say(session.hostile[0][0], messages.Entered(2**53, 0))
    with pytest.raises((AssertionError, msgspec.DecodeError)):
        ControlSurface()._go_on(session)


def test_a_reader_that_overlooks_checksums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    surface = JournalSurface()
    try:
        # The chain of any text is what the text says.
        monkeypatch.setattr(journal, "line", lambda payload, chain: (Anything(payload), 0))
        assert any("damage went unnoticed" in failure for failure in hammer(surface, 300, SEED).failures)
    finally:
        surface.close()


class Anything(bytes):
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def test_a_newcomer_that_overlooks_checksums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing.zlib, "crc32", lambda data: 0)
    surface = HandoffSurface()
    assert any("a damaged state was taken over" in failure for failure in hammer(surface, 2000, SEED).failures)
