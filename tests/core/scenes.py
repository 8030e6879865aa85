"""Random scenes without faults: any number of workers, speeds, sizes, lengths, policies, breaks and changes."""

from __future__ import annotations

from hypothesis import strategies as st

from pliant.core.group_state import Policy
from pliant.core.tickets import Kind
from pliant.core.tuning import delay as overlap
from pliant.core.tuning.rates import RULES
from pliant.testing.steady import EarlyExit, SteadyCall, SteadyScene

SPEEDS = st.sampled_from([1.0, 3.0, 10.0, 10.0, 25.0, 40.0, 100.0, 160.0])
LENGTHS = st.one_of(st.integers(0, 12), st.integers(13, 700))


@st.composite
def policies(draw: st.DrawFn, members: int) -> Policy:
    batch = draw(st.integers(1, 96))
    delay = draw(st.sampled_from([1, 1, 0, overlap.AUTO]))
    # Of the batch, not drawn: examples stay what they were before there were so many rules.
    rule = list(RULES.values())[batch % len(RULES)]
    kind = draw(st.sampled_from(["fixed", "floating", "bounded"]))
    if kind == "fixed":
        return Policy(batch, delay=delay, trial=1, momentum=0.9, rule=rule)
    at_most = draw(st.integers(1, 8 * members)) if kind == "bounded" else None
    return Policy(batch, floating=True, at_most=at_most, delay=delay, trial=1, momentum=0.9, rule=rule)


@st.composite
def calls(draw: st.DrawFn, members: int, *, breaks: bool) -> SteadyCall:
    leaving = st.builds(EarlyExit, st.integers(0, members - 1), st.integers(1, 12), st.booleans())
    kind = draw(st.sampled_from([Kind.TRAIN, Kind.TRAIN, Kind.EVALUATE]))
    # A script cannot leave ``evaluate`` early.
    may_break = breaks and kind is Kind.TRAIN
    return SteadyCall(
        kind,
        draw(LENGTHS),
        draw(st.integers(0, 3)),
        tuple(draw(st.lists(leaving, max_size=2))) if may_break else (),
    )


@st.composite
def scenes(draw: st.DrawFn, *, breaks: bool = True, changes: bool = True) -> SteadyScene:
    members = draw(st.integers(1, 5))
    each = {"min_size": members, "max_size": members}
    change = st.tuples(st.floats(0.0, 20.0), st.integers(0, members - 1), SPEEDS)
    return SteadyScene(
        policy=draw(policies(members)),
        speeds=tuple(draw(st.lists(SPEEDS, **each))),
        sizes=tuple(draw(st.lists(st.integers(1, 32), **each))),
        script=tuple(draw(st.lists(calls(members, breaks=breaks), min_size=1, max_size=3))),
        ahead=tuple(draw(st.lists(st.sampled_from([0, 0, 2, 4, 9]), **each))),
        sum_s=draw(st.sampled_from([0.0, 0.001, 0.05, 1.0])),
        changes=tuple(draw(st.lists(change, max_size=4))) if changes else (),
        samples_limit=draw(st.one_of(st.none(), st.integers(0, 900))),
        spoiled=frozenset(draw(st.sets(st.integers(0, 600), max_size=2))),
    )
