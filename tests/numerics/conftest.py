"""Small problems in float64."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_float64():
    """Threads of torch would fight with the threads of the group; float64 makes 1e-9 meaningful."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
