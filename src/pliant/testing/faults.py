"""Faults that are injected into a run.

Question  What can go wrong, where, and when?
Holds     A fault strikes at a fixed time, or on an occasion: the n-th note of a kind, so that every phase of the
          protocol is hit, however short it is. Each fault has an end; after the last one the run must go on by
          itself.
Source    ours; DESIGN, "Tests".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pliant.core.group_state import Standing

if TYPE_CHECKING:
    from pliant.testing.clock import Process
    from pliant.testing.simulation import Simulation, VirtualScript

OCCASIONS = (
    "settled",
    "opened",
    "entered",
    "stopped",
    "forming",
    "handoff",
    "farewell",
    "heard",
    "start",
    "cut",
    "reconnected",
)
"""kinds of notes at which a fault may strike"""


class Fault(msgspec.Struct, frozen=True):
    """``what`` happens to one process ``at_s``, or ``delay_s`` after the ``nth`` note of the kind ``occasion``."""

    what: str
    at_s: float = 0.0
    occasion: str = ""
    nth: int = 1
    delay_s: float = 0.0
    lasts_s: float = 0.0
    whom: int = 0
    """index among the living processes; -1: the one that the note is about; -2: the last of the others"""

    def plan(self, simulation: Simulation) -> None:
        """Plan the event."""
        world = simulation.world
        # Until it has struck, the run need not recover.
        simulation.pending += 1
        if not self.occasion:
            world.at(self.at_s, lambda: self._strike(simulation, None))
            return
        note, seen = world.note, [0]

        def watching(kind: str, *what: Any) -> None:
            note(kind, *what)
            if kind == self.occasion:
                seen[0] += 1
                if seen[0] == self.nth:
                    about = str(what[0]) if what else ""
                    world.after(self.delay_s, lambda: self._strike(simulation, about))

        world.note = watching  # type: ignore[method-assign]
        world.at(self.at_s or 4.0, lambda: self._expire(simulation, seen))

    def _expire(self, simulation: Simulation, seen: list[int]) -> None:
        """Drop the fault: its occasion has not come."""
        if seen[0] < self.nth:
            seen[0] = 1 << 30
            simulation.pending -= 1

    def _strike(self, simulation: Simulation, about: str | None) -> None:
        world = simulation.world
        simulation.pending -= 1
        simulation.quiet_s = max(simulation.quiet_s, world.now_s + self.lasts_s)
        if simulation.host.end is not None:
            return
        simulation.struck = True
        world.note("fault", self.what, round(self.lasts_s, 3))
        _DOES[self.what](simulation, self, about)


def _impaired(simulation: Simulation, script: VirtualScript, until_s: float) -> None:
    """Note that the process may be given up for lost during this time."""
    script.impaired_until_s = max(script.impaired_until_s, until_s)
    simulation.judge()


def _victim(simulation: Simulation, fault: Fault, about: str | None) -> tuple[Process, VirtualScript] | None:
    living = [(process, script) for process, script in simulation.scripts.items() if process.alive]
    if fault.whom < 0 and about:
        own = fault.whom == -1
        living = [pair for pair in living if (about.partition(".")[0] == pair[0].name) is own] or living
    return living[fault.whom % len(living)] if living else None


def _kill(simulation: Simulation, fault: Fault, about: str | None) -> None:
    victim = _victim(simulation, fault, about)
    if victim is not None:
        victim[0].kill(-9)


def _pause(simulation: Simulation, fault: Fault, about: str | None) -> None:
    victim = _victim(simulation, fault, about)
    if victim is not None:
        _impaired(simulation, victim[1], simulation.world.now_s + fault.lasts_s)
        simulation.world.note("paused", victim[0].name)
        victim[0].pause()
        simulation.world.after(fault.lasts_s, victim[0].resume)


def _hang(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """The main loop stands still; the link's threads go on."""
    victim = _victim(simulation, fault, about)
    if victim is not None:
        _impaired(simulation, victim[1], simulation.world.now_s + fault.lasts_s)
        simulation.world.note("hangs", victim[0].name)
        victim[0].hung_until_s = simulation.world.now_s + fault.lasts_s


def _save(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """The script is busy with something else for a while, the next time that it is in its loop."""
    victim = _victim(simulation, fault, about)
    if victim is not None:
        _impaired(simulation, victim[1], simulation.world.now_s + 2 * fault.lasts_s)
        simulation.quiet_s = max(simulation.quiet_s, simulation.world.now_s + 2 * fault.lasts_s)
        victim[1].saves_s, victim[1].says_so = fault.lasts_s, simulation.world.chance(0.5)


def _slow(simulation: Simulation, fault: Fault, about: str | None) -> None:
    victim = _victim(simulation, fault, about)
    if victim is not None:
        victim[1].slowness = 4.0

        def faster() -> None:
            victim[1].slowness = 1.0

        simulation.world.after(fault.lasts_s, faster)


def _terminate(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """SIGTERM from the system, not from the launcher: the worker leaves in an orderly way."""
    victim = _victim(simulation, fault, about)
    if victim is not None:
        simulation.world.note("sigterm", victim[0].name)
        victim[1].terminated(victim[0])


def _drain(simulation: Simulation, fault: Fault, about: str | None) -> None:
    victim, coordinator = _victim(simulation, fault, about), simulation.host.coordinator
    if victim is not None and coordinator is not None:
        coordinator.drain(victim[1].name)


def _join(simulation: Simulation, fault: Fault, about: str | None) -> None:
    simulation.join(1 + fault.whom % 2)


def _scale(simulation: Simulation, fault: Fault, about: str | None) -> None:
    coordinator = simulation.host.coordinator
    if coordinator is not None:
        coordinator.scale(1 + abs(fault.whom) % 5)


def _cut(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """The connection to the coordinator breaks; messages on their way are lost."""
    victim, world = _victim(simulation, fault, about), simulation.world
    if victim is not None:
        for wire in simulation.network.of(victim[0]):
            wire.break_off(near_s=world.between(0.0, 0.05), far_s=world.between(0.0, 0.3))


def _cut_agent(simulation: Simulation, fault: Fault, about: str | None) -> None:
    world = simulation.world
    for wire in simulation.network.of(simulation.launcher):
        wire.break_off(near_s=world.between(0.0, 0.05), far_s=world.between(0.0, 0.3))


def _block(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """Messages between one worker and the coordinator are delayed, in one direction or in both."""
    victim, world = _victim(simulation, fault, about), simulation.world
    if victim is None:
        return
    until_s = world.now_s + fault.lasts_s
    _impaired(simulation, victim[1], until_s)
    side = world.random.randrange(3)
    for wire in simulation.network.of(victim[0]):
        if side != 0:
            wire.near.blocked_until_s = until_s
        if side != 1:
            wire.far.blocked_until_s = until_s
    if side == 2:
        simulation.network.closed_until_s[id(victim[0])] = until_s


def _isolate(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """The worker's data ports are cut off, perhaps its connection to the coordinator too."""
    victim, world = _victim(simulation, fault, about), simulation.world
    if victim is None:
        return
    process = victim[0]
    _impaired(simulation, victim[1], world.now_s + fault.lasts_s)
    world.note("isolated", process.name)
    process.cut_off(True)
    world.after(fault.lasts_s, lambda: process.cut_off(False))
    if world.chance(0.5):
        _block(simulation, fault, about)


def _crash(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """The coordinator dies and is restarted a little later."""
    simulation.host.crash(fault.lasts_s)


def _doze(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """The coordinator's machine stands still for a while."""
    simulation.host.sleep(fault.lasts_s)


def _wall(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """Workers join whose data ports cannot be reached, or that cannot reach others': for a while, or for ever."""
    walled = simulation.world.random.choice(("in", "in", "out"))
    before = len(simulation.launchers)
    simulation.join(1 + fault.whom % 2, walled)
    launcher = simulation.launchers[before]
    if fault.lasts_s:

        def open_up() -> None:
            for process in launcher.processes.values():
                process.walled = ""

        simulation.world.after(fault.lasts_s, open_up)


def _part(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """Two workers cannot reach each other's data ports, or one cannot reach the other's; all reach the coordinator."""
    victim = _victim(simulation, fault, about)
    others = [process for process in simulation.scripts if process.alive and victim and process is not victim[0]]
    if victim is None or not others:
        return
    one, other = victim[0], simulation.world.random.choice(others)
    simulation.world.note("parted", one.name, other.name)
    simulation.meetings.part(one, other)
    one.parted.add(other.name)
    if simulation.world.chance(0.5):
        other.parted.add(one.name)


def _drift(simulation: Simulation, fault: Fault, about: str | None) -> None:
    """A bit flips in one worker's weights."""
    holding = [
        script
        for script in simulation.living
        if script.worker is not None
        and script.worker.group.era > 0
        and script.worker.standing is Standing.ACTIVE
        and script.worker.group.round > 0
        and script.training.held is None
    ]
    if fault.whom < 0 and about:
        holding = [script for script in holding if about.partition(".")[0] == script.slot] or holding
    if not holding:
        return
    victim = holding[fault.whom % len(holding)]
    assert victim.worker is not None
    numbers: Any = victim.training.parameters
    with victim.training.plain():
        number = numbers[simulation.world.random.randrange(len(numbers))]
        number.value ^= 1 << simulation.world.random.randrange(60)
    simulation.world.note("flipped", victim.name)
    simulation.checker.struck(victim.name, victim.worker.group)


_DOES: dict[str, Callable[[Simulation, Fault, str | None], None]] = {
    "kill": _kill,
    "pause": _pause,
    "hang": _hang,
    "save": _save,
    "slow": _slow,
    "leave": _terminate,
    "drain": _drain,
    "join": _join,
    "scale": _scale,
    "cut": _cut,
    "cut_agent": _cut_agent,
    "block": _block,
    "isolate": _isolate,
    "crash": _crash,
    "doze": _doze,
    "drift": _drift,
    "wall": _wall,
    "part": _part,
}
