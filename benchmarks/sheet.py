"""A table before it is shown anywhere."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as plain text cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
