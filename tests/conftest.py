"""Settings all tests share: hypothesis draws the same examples everywhere, so that a red run can be repeated.

Long searches (``@pytest.mark.soak``) run where they are asked for: ``make soak``, ``pytest -m soak``.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "stable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long searches out, whatever other marks are chosen."""
    if "soak" in str(config.getoption("markexpr")):
        return
    searches = [item for item in items if item.get_closest_marker("soak")]
    if searches:
        config.hook.pytest_deselected(items=searches)
        items[:] = [item for item in items if item not in searches]
