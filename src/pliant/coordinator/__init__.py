"""The coordinator's process: what it keeps of a run, and where."""
