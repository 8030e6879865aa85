"""The scenes that seeds are drawn from.

Question  Which run with which faults does a seed stand for?
Holds     A name and a seed give one scene, whatever is added to this list later.
Source    ours.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from pliant.core.group_state import Policy
from pliant.core.tuning import delay
from pliant.core.tuning.rates import Rule
from pliant.testing.faults import OCCASIONS, Fault
from pliant.testing.simulation import Scene

NAMES: dict[str, tuple[str, ...]] = {
    "calm": (),
    "kills": ("kill",),
    "pauses": ("pause", "hang", "slow"),
    "goings": ("leave", "drain", "scale"),
    "comings": ("join", "scale"),
    "turnover": ("join", "leave", "kill", "drain"),
    "lines": ("cut", "block", "cut_agent"),
    "partitions": ("isolate", "block", "cut"),
    "coordinator": ("crash", "crash", "kill", "doze"),
    "handoffs": ("join", "kill", "leave"),
    "streams": ("join", "kill", "leave"),
    "lost": ("kill",),
    "rewinds": ("kill", "pause", "join", "leave", "crash", "cut", "drain"),
    "everything": (
        "kill", "kill", "pause", "hang", "slow", "leave", "drain", "join", "join", "scale", "cut", "cut_agent", "block",
        "isolate", "crash", "doze",
    ),
    "latecomers": ("join",),
    "drift": ("drift",),
    "drifting": ("drift", "drift", "drift", "join", "kill", "leave", "drain", "pause", "crash"),
    "walls": ("wall", "wall", "wall", "part", "join", "kill", "leave", "drain"),
    "lonely": ("join", "kill", "cut", "pause"),
    "evaluations": ("kill", "kill", "join", "leave", "drain", "pause", "cut"),
    "spares": ("kill", "kill", "join", "leave", "drain", "pause", "cut", "slow"),
    "saves": ("save", "save", "save", "hang", "kill", "join", "leave", "crash", "scale"),
}  # fmt: skip
"""scene → kinds of faults in it"""


def drawn(name: str, seed: int) -> Scene:
    """The scene of a seed."""
    chance = random.Random(f"{name}/{seed}")
    workers = chance.choice((2, 3, 3, 4))
    floating = chance.random() < 0.4
    batch = chance.choice((8, 12, 16, 24))
    policy = Policy(
        batch,
        floating=floating,
        at_most=chance.choice((None, 3 * batch)) if floating else None,
        delay=chance.choice((1, 1, delay.AUTO, 0)),
        trial=1,
        rule=Rule(chance.choice(("linear", "sqrt"))),
        momentum=chance.choice((0.0, 0.9)),
    )
    # Drawn from a generator of its own: older seeds still stand for the same run, except for the rate rule.
    if random.Random(f"{name}/{seed}/rates").random() < 0.3:
        policy = replace(policy, rule=Rule("adascale"))
    # A script that breaks does not see the update under way: the user's counter differs from then on.
    breaks = chance.choice((0.0, 0.0, 0.0, 0.01))
    epochs = chance.choice((1, 2, 3))
    length = chance.choice((30, 61, 90))
    scene = Scene(
        name,
        policy,
        workers,
        paces=tuple(chance.choice((0.001, 0.002, 0.004, 0.008)) for _ in range(5)),
        sizes=tuple(chance.choice((2, 3, 4, 6)) for _ in range(5)),
        epochs=epochs,
        length=length,
        evaluated=chance.choice((7, 20)),
        nested=chance.choice((0, 0, 2, 3)) if not breaks else 0,
        breaks=breaks,
        samples=chance.randrange(length // 2, epochs * length) if chance.random() < 0.15 else None,
        buffers=chance.choice((0, 1)),
        dead_after_s=chance.choice((0.6, 1.0, 2.0)),
        slowest_s=chance.choice((0.001, 0.005, 0.03)),
        sum_s=chance.choice((0.002, 0.01, 0.04)),
        stream_s=chance.choice((0.005, 0.05)),
        stream_breaks=0.2 if name == "handoffs" else 0.0,
    )
    # Drawn from a generator of its own, too.
    following = random.Random(f"{name}/{seed}/updates")
    if following.random() < 0.5:
        steps = following.choice((None, None, None, following.randrange(2, 12)))
        evaluates = following.choice((0, 1, 2, 3))
        scene = replace(scene, follows_updates=True, evaluates=evaluates, steps=steps)
        if following.random() < 0.3:
            # Some workers have nothing to compute, and follow.
            policy = replace(policy, batch=following.choice((2, 3)), floating=False, at_most=None)
            scene = replace(scene, policy=policy, length=30, epochs=min(2, scene.epochs), samples=None)
        saves_there = random.Random(f"{name}/{seed}/saves").random() < 0.5
        scene = replace(scene, saves_there=saves_there)
    changing = random.Random(f"{name}/{seed}/trained")
    if not breaks and changing.random() < 0.3:
        scene = replace(scene, changes=changing.choice((1, 2, 3)), grows=changing.random() < 0.5)
    sized = random.Random(f"{name}/{seed}/sizes")
    if name == "streams":
        # Newcomers come early and take longer than some rounds to fetch the state.
        large, slow_s = sized.choice((40 << 20, 24 << 20, 20 << 20)), sized.choice((0.3, 1.0, 2.0))
        late = sized.choice((0.0, 0.0, 0.5))
        scene = replace(scene, parameter_bytes=large, parameters_s=slow_s, late_heads=late, epochs=3, samples=None)
    elif sized.random() < 0.4:
        # Three parameters are fetched by one, two or three requests, over a connection that may take many rounds.
        large, slow_s = sized.choice((40 << 20, 24 << 20, 20 << 20)), sized.choice((0.05, 0.2, 0.5))
        scene = replace(scene, parameter_bytes=large, parameters_s=slow_s)
    if name in ("drift", "drifting"):
        # Long enough for a difference to be noticed, and a second one.
        watched = chance.choice((1, 1, 2))
        scene = replace(scene, policy=replace(policy, watched=watched), epochs=3, length=90, samples=None)
    if name == "evaluations":
        scene = replace(scene, nested=chance.choice((1, 2, 3)), in_a_row=chance.choice((2, 3)), breaks=0.0)
    if name == "spares":
        scene = _spares(chance, scene)
    kinds = NAMES[name]
    if name == "lost":
        faults = tuple(Fault("kill", at_s=chance.uniform(0.2, 0.5), whom=index) for index in range(5))
        return replace(scene, faults=faults, may_fail=True)
    if name == "rewinds":
        return _rewinds(chance, scene)
    if name == "latecomers":
        return _latecomers(chance, scene)
    if name == "walls":
        return _walls(chance, scene)
    if name == "lonely":
        return _lonely(chance, scene)
    count = chance.choice((1, 1, 2, 2, 3, 4)) if kinds else 0
    if name == "spares":
        count = chance.choice((0, 0, count))
    faults = tuple(_fault(chance, chance.choice(kinds), scene) for _ in range(count))
    if name == "drift" and chance.random() < 0.5:
        # The same worker again.
        faults += (replace(faults[-1], at_s=faults[-1].at_s + chance.uniform(0.1, 1.0), occasion=""),)
    if name in ("handoffs", "streams"):
        faults = (Fault("join", at_s=chance.uniform(0.2, 0.4)), *(_at_handoff(chance, fault) for fault in faults))
    may_fail = any(
        fault.what in ("kill", "leave", "drain", "pause", "hang", "save", "isolate", "block", "scale", "drift")
        for fault in faults
    )
    return replace(scene, faults=faults, may_fail=may_fail)


def _spares(chance: random.Random, scene: Scene) -> Scene:
    """Some workers have nothing to compute: they follow, also through calls in the loop body and after the loop."""
    policy = replace(scene.policy, batch=chance.choice((1, 2, 2, 3)), floating=False, at_most=None)
    return replace(
        scene,
        policy=policy,
        workers=chance.choice((3, 3, 4)),
        epochs=chance.choice((1, 2)),
        length=chance.choice((15, 30)),
        nested=0 if scene.breaks else chance.choice((0, 1, 2, 3, 5)),
        in_a_row=chance.choice((1, 1, 2)),
        tested=chance.random() < 0.5,
        samples=None,
    )


def _rewinds(chance: random.Random, scene: Scene) -> Scene:
    """All workers are lost at once, sometimes twice, with other faults. There are checkpoints, some damaged."""
    faults: list[Fault] = []
    for _ in range(chance.choice((1, 1, 2))):
        at_s = chance.uniform(0.3, 1.2)
        faults += [Fault("kill", at_s=at_s + chance.uniform(0.0, 0.01), whom=index) for index in range(6)]
    faults += [_fault(chance, chance.choice(NAMES["rewinds"]), scene) for _ in range(chance.choice((0, 0, 1, 2)))]
    return replace(
        scene,
        faults=tuple(faults),
        may_fail=True,
        checkpoint_every_s=chance.choice((0.02, 0.05, 0.1, 0.3)),
        damaged=chance.choice((0.0, 0.0, 0.2)),
    )


def _latecomers(chance: random.Random, scene: Scene) -> Scene:
    """All workers are lost at once; some return when the others have resumed from a checkpoint already."""
    at_s = chance.uniform(0.3, 1.2)
    faults = [Fault("kill", at_s=at_s + chance.uniform(0.0, 0.01), whom=index) for index in range(6)]
    for _ in range(chance.choice((1, 1, 2))):
        faults.append(Fault("join", at_s=3.0, occasion="restored", delay_s=chance.uniform(0.0, 0.1)))
    if chance.random() < 0.3:
        what = chance.choice(("kill", "crash", "cut", "doze"))
        lasts_s = {"crash": 0.3, "doze": 0.8 * scene.dead_after_s}.get(what, 0.0)
        faults.append(Fault(what, at_s=3.0, occasion="restored", delay_s=chance.uniform(0.0, 0.3), lasts_s=lasts_s))
    every_s = chance.choice((0.05, 0.1, 0.3))
    return replace(scene, faults=tuple(faults), may_fail=True, checkpoint_every_s=every_s, nested=0)


def _walls(chance: random.Random, scene: Scene) -> Scene:
    """Newcomers that cannot be reached, or members that cannot reach each other; half of the time no other fault."""
    alone = chance.random() < 0.5
    faults: list[Fault] = []
    for _ in range(chance.choice((1, 1, 2))):
        lasts_s = chance.choice((0.0, 0.0, 0.0, 1.0, 3.0))
        # Not before the first era: there all workers are newcomers.
        nth = chance.randrange(4, 40)
        faults.append(Fault("wall", at_s=3.0, occasion="settled", nth=nth, lasts_s=lasts_s, whom=chance.randrange(2)))
    if not alone:
        kinds = ("part", *NAMES["walls"][3:])
        faults += [_fault(chance, chance.choice(kinds), scene) for _ in range(chance.choice((1, 1, 2)))]
    scene = replace(scene, epochs=3, length=90, samples=None, dead_after_s=min(1.0, scene.dead_after_s))
    if alone:
        # Other reasons for the end of an era have scenes of their own.
        scene = replace(scene, follows_updates=False, evaluates=0, nested=0, changes=0)
    return replace(scene, faults=tuple(faults), unbroken=alone, may_fail=not alone)


def _lonely(chance: random.Random, scene: Scene) -> Scene:
    """All workers with the user's state die while newcomers fetch it; then a newcomer dies or loses its connection."""

    def at(occasion: str, what: str, whom: int, most_s: float, nth: int = 1, lasts_s: float = 0.0) -> Fault:
        delay_s = most_s * chance.random()
        return Fault(what, at_s=3.0, occasion=occasion, nth=nth, delay_s=delay_s, lasts_s=lasts_s, whom=whom)

    workers = chance.choice((1, 1, 2))
    nth = chance.randrange(1, 5)
    faults = [Fault("join", at_s=chance.uniform(0.1, 0.3), whom=1)]
    if chance.random() < 0.5:
        # The others wait for the last one to answer.
        faults.append(at("lacks state", "pause", workers + 1, 0.0, nth, lasts_s=chance.uniform(0.1, 0.4)))
    faults += [at("lacks state", "kill", 0, 0.08, nth) for _ in range(workers)]
    for _ in range(chance.choice((1, 2))):
        if chance.random() < 0.5:
            faults.append(at("lacking forms", chance.choice(("kill", "kill", "pause")), -2, 0.01, lasts_s=0.3))
        else:
            faults.append(at("lacking", "cut", -1, 0.03))
    scene = replace(scene, workers=workers, epochs=3, length=90, samples=None, state_s=chance.choice((0.3, 1.0)))
    # A spare asks for the state after every update that the script follows: each answer would take as long.
    scene = replace(scene, follows_updates=False, evaluates=0, nested=0, breaks=0.0)
    return replace(scene, faults=tuple(faults), may_fail=True, dead_after_s=2.0)


def _fault(chance: random.Random, what: str, scene: Scene) -> Fault:
    lasts_s = 0.0
    dead_s = scene.dead_after_s
    if what in ("pause", "hang", "isolate", "block", "slow", "save"):
        lasts_s = dead_s * chance.choice((0.1, 0.5, 0.95, 1.05, 1.5, 2.5))
    elif what == "crash":
        lasts_s = chance.choice((0.05, 0.3, 1.0))
    elif what == "doze":
        lasts_s = dead_s * chance.choice((0.3, 0.8, 1.3))
    whom = chance.choice((-1, 0, 1, 2, 3))
    if chance.random() < 0.4:
        return Fault(what, at_s=chance.uniform(0.05, 1.0), lasts_s=lasts_s, whom=whom)
    return Fault(
        what,
        at_s=3.0,
        occasion=chance.choice(OCCASIONS),
        nth=int(2 ** chance.uniform(0.0, 6.5)),
        delay_s=chance.choice((0.0, 0.0, chance.uniform(0.0, 0.01), chance.uniform(0.0, 0.2))),
        lasts_s=lasts_s,
        whom=whom,
    )


def _at_handoff(chance: random.Random, fault: Fault) -> Fault:
    occasion = chance.choice(("handoff", "handoff", "entered", "settled"))
    return replace(fault, occasion=occasion, nth=chance.randrange(1, 9), delay_s=chance.uniform(0.0, 0.02), at_s=3.0)
