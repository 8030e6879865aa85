"""What can be checked of the CUDA group without a GPU: when it is chosen, and what it says where it cannot work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pliant.core.group import Policy
from pliant.errors import UsageError
from pliant.runtime.membership import Offer, formed
from pliant.tensors import cuda
from pliant.tensors import group as groups


class Nowhere:
    """A channel on which nothing may be said."""

    def put(self, attempt: int, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        raise AssertionError(key)


def test_a_torch_without_nccl_is_refused_before_anybody_is_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(UsageError, match="has no NCCL: install a CUDA build"):
        cuda.Nccl(Nowhere(), attempt=1, place=0, members=2, address="127.0.0.1", device=torch.device("cuda"))


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "Gloo"), ("meta", "Gloo"), ("cuda", "Nccl")])
def test_the_group_follows_the_models_device(monkeypatch: pytest.MonkeyPatch, device: str, chosen: str) -> None:
    made: list[str] = []
    monkeypatch.setattr(groups, "Gloo", lambda *_, **__: made.append("Gloo"))
    monkeypatch.setattr(cuda, "Nccl", lambda *_, **__: made.append("Nccl"))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Elsewhere:
        """Stands for a parameter on a device that this machine may not have."""

        device: torch.device

    parameter = Elsewhere()
    parameter.device = torch.device(device)
    optimizer.param_groups[0]["params"] = [parameter]
    offer = Offer(model, optimizer, Policy(8), {}, {}, lambda members: None)  # type: ignore[arg-type,return-value]
    formed(Nowhere(), 1, 0, 2, "127.0.0.1", offer)
    assert made == [chosen]
