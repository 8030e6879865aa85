"""testing: groups of real workers inside one process, and whole runs in virtual time from a seed.

``together`` runs scripts that use Pliant, each in a thread of one process. ``Simulation`` runs the real coordinator and
the real workers' loops over a virtual network, clock and disk: ``python -m pliant.testing --seeds 1000``.
"""

from pliant.testing.faults import Fault
from pliant.testing.scenes import drawn
from pliant.testing.simulation import Outcome, Scene, Simulation
from pliant.testing.threads import Together, together

__all__ = ["Fault", "Outcome", "Scene", "Simulation", "Together", "drawn", "together"]
