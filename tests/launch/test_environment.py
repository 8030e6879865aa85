"""What the environment tells a worker of its job: pliant.environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.environment import Job, environment_of, job_from
from pliant.errors import UsageError


@given(
    st.builds(
        Job,
        st.just("127.0.0.1:1"),
        st.text(min_size=1),
        st.just("w0"),
        st.floats(0.001, 1.0),
        st.none() | st.integers(1, 10**6),
    )
)
def test_a_job_survives_the_environment(job: Job) -> None:
    assert job_from(environment_of(job)) == job


def test_no_job_in_the_environment() -> None:
    assert job_from({"PLIANT_PACE": "0.5"}) is None


@pytest.mark.parametrize(
    "changed", [{"PLIANT_TOKEN": ""}, {"PLIANT_PACE": "2"}, {"PLIANT_PACE": "x"}, {"PLIANT_SIZE": "0"}]
)
def test_a_broken_environment_is_refused(changed: dict[str, str]) -> None:
    environment = environment_of(Job("127.0.0.1:1", "secret", "w0"))
    with pytest.raises(UsageError) as caught:
        job_from({**environment, **changed})
    assert next(iter(changed)) in str(caught.value) and "secret" not in str(caught.value)
