"""Measurements of Pliant against its rivals: ratios in one run on one machine, judged by targets.toml."""
