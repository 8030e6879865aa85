"""Chaos: real workers, real faults, and what must hold afterwards."""
