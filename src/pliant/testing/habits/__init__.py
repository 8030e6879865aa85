"""testing.habits: whole training scripts as drawn values, and what must come of them.

``values`` says what a script does, ``kit`` makes what it trains, ``script`` does it. ``threads`` runs it in one process
and compares the outcome with ``reference``, a plain PyTorch loop; ``processes`` runs it as a user would, with faults.
``python -m pliant.testing habits --scripts 1000`` draws them.
"""

from pliant.testing.habits.values import Event, Habits, WorkerFault, packed, unpacked

__all__ = ["Event", "Habits", "WorkerFault", "packed", "unpacked"]
