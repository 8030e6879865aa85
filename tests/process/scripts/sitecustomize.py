"""Python loads this at the start of every process that has this directory in its PYTHONPATH."""

import quick  # noqa: F401
