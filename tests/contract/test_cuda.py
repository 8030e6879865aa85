"""What can be checked of the CUDA group without a GPU: when it is chosen, and what it says where it cannot work."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pliant.core.group_state import Policy
from pliant.errors import UsageError
from pliant.tensors.process_group import gloo as groups
from pliant.tensors.process_group import nccl
from pliant.testing.threads import MemoryStore
from pliant.worker.elastic.signature import check_device, signature
from pliant.worker.session import JoinRequest, formed


class Nowhere:
    """A channel on which nothing may be said."""

    def put(self, attempt: int, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        raise AssertionError(key)


def test_a_torch_without_nccl_is_refused_before_anybody_is_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(UsageError, match="has no NCCL: install a CUDA build"):
        nccl.Nccl(Nowhere(), attempt=1, place=0, members=2, address="127.0.0.1", device=torch.device("cuda"))


def on(device: str) -> torch.optim.Optimizer:
    """An optimizer of a parameter on a device that this machine may not have."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = [SimpleNamespace(device=torch.device(device), requires_grad=False)]
    return optimizer


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu", "meta"])
def test_a_device_where_no_group_can_be_formed_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=rf"the model is on '{device}', .*: move it to the CPU or to CUDA"):
        check_device(on(device))


def test_the_kind_of_device_and_the_software_are_told() -> None:
    for device in ("cpu", "cuda:1"):
        check_device(on(device))
        told = signature(nn.Linear(1, 1), on(device), {})
        assert told.device == device.partition(":")[0]
        assert torch.__version__.startswith(f"{told.torch}.") and told.torch.count(".") == 1
        assert sys.version.startswith(f"{told.python}.") and told.python.count(".") == 1


def asked(device: str) -> JoinRequest:
    """What a script brings whose model is on that device."""
    return JoinRequest(nn.Linear(1, 1), on(device), Policy(8), {}, {}, lambda members: None)  # type: ignore[arg-type,return-value]


def test_a_model_on_the_cpu_gets_a_gloo_group() -> None:
    store = MemoryStore()

    def joined(place: int) -> groups.Gloo:
        return formed(store, 1, place, 2, "127.0.0.1", asked("cpu"))

    with ThreadPoolExecutor(2) as pool:
        members = list(pool.map(joined, range(2)))
    try:
        summations = [member.gather(b"%d" % member.place) for member in members]
        assert all(summation.wait(30.0) for summation in summations)
        assert [summation.tickets() for summation in summations] == [[b"0", b"1"]] * 2
        assert {type(member) for member in members} == {groups.Gloo}
    finally:
        for member in members:
            member.leave()


def test_a_model_on_cuda_gets_no_gloo_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NCCL it gets none at all: a gloo group would put its address on the channel first."""
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(UsageError, match="has no NCCL: install a CUDA build"):
        formed(Nowhere(), 1, 0, 2, "127.0.0.1", asked("cuda"))
