"""testing: groups of real workers inside one process, for tests of scripts that use Pliant."""

from pliant.testing.together import Together, together

__all__ = ["Together", "together"]
