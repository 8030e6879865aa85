"""Settings all tests share: hypothesis draws the same examples everywhere, so that a red run can be repeated."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "stable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stable")
