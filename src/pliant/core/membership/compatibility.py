"""What all workers of a group must have in common.

Question  Do these workers have the same software, kind of device, model and settings? If not, what differs?
Holds     Workers with equal terms never differ. Otherwise the first difference is reported with both values and both
          workers, in one line that says what to do.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pliant.types import WorkerId

Parameter = tuple[str, tuple[int, ...], str]
"""name, shape, dtype"""


class Terms(msgspec.Struct, frozen=True):
    """What one worker has. ``parameters`` are in the optimizer's order, ``settings`` sorted by name."""

    version: str
    parameters: tuple[Parameter, ...]
    settings: tuple[tuple[str, str], ...]
    torch: str = ""
    """major and minor version: workers with different ones may not be able to form a group"""
    python: str = ""
    """major and minor version: all workers compute the group's decisions, and must get the same bits"""
    device: str = ""
    """kind of device: a process group either sums on the host or between GPUs"""


def difference(offers: Sequence[tuple[WorkerId, Terms]]) -> str | None:
    """The first way in which a worker differs from the first one; None if all agree."""
    if not offers:
        return None
    first, terms = offers[0]
    for other, others in offers[1:]:
        if others == terms:
            continue
        software = _software_difference(first, terms, other, others)
        if software is not None:
            return software
        models = _model_difference(first, terms.parameters, other, others.parameters)
        if models is not None:
            return f"models differ: {models}; give every worker the same model"
        settings = _setting_difference(first, dict(terms.settings), other, dict(others.settings))
        if settings is not None:
            return f"settings differ: {settings}; call pliant.join with the same arguments on every worker"
        return f"{first} and {other} repeat a parameter or a setting differently; name each one once"
    return None


def _software_difference(first: WorkerId, terms: Terms, other: WorkerId, others: Terms) -> str | None:
    for name, mine, theirs in (
        ("Pliant", terms.version, others.version),
        ("torch", terms.torch, others.torch),
        ("Python", terms.python, others.python),
    ):
        if mine != theirs:
            return (
                f"versions of {name} differ: {mine} on {first} but {theirs} on {other}; "
                "install the same one for all workers"
            )
    if terms.device != others.device:
        return (
            f"devices differ: the model is on {terms.device} on {first} but on {others.device} on {other}; "
            "move it to the same kind of device on every worker"
        )
    return None


def length_difference(first: WorkerId, length: int | None, other: WorkerId, others: int | None) -> str | None:
    """How the datasets of one call differ in length; None if they agree, or if a length is not known."""
    if length is None or others is None or length == others:
        return None
    return (
        f"dataset lengths differ: {length} samples on {first} but {others} on {other}; "
        "give every worker the whole dataset"
    )


def _model_difference(
    first: WorkerId, parameters: tuple[Parameter, ...], other: WorkerId, others: tuple[Parameter, ...]
) -> str | None:
    mine = {name: (shape, dtype) for name, shape, dtype in parameters}
    theirs = {name: (shape, dtype) for name, shape, dtype in others}
    for name, (shape, dtype) in mine.items():
        if name not in theirs:
            return f"{name!r} is missing on {other} but not on {first}"
        their_shape, their_dtype = theirs[name]
        if shape != their_shape:
            return f"{name!r} is {shape} on {first} but {their_shape} on {other}"
        if dtype != their_dtype:
            return f"{name!r} is {dtype} on {first} but {their_dtype} on {other}"
    for name in theirs:
        if name not in mine:
            return f"{name!r} is missing on {first} but not on {other}"
    for (name, *_), (their_name, *_) in zip(parameters, others, strict=False):
        if name != their_name:
            return f"the optimizer's order has {name!r} on {first} where {other} has {their_name!r}"
    return None


def _setting_difference(
    first: WorkerId, settings: dict[str, str], other: WorkerId, others: dict[str, str]
) -> str | None:
    for name in sorted(settings.keys() | others.keys()):
        mine, theirs = settings.get(name, "not set"), others.get(name, "not set")
        if mine != theirs:
            return f"{name} is {mine} on {first} but {theirs} on {other}"
    return None
