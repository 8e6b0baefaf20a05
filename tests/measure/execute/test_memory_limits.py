"""A GPU has no more memory for this process than its host says."""

from __future__ import annotations

import dataclasses

import plain_gpus
import pytest
import torch
from core_hosts import core_host

from rlplace import cuda
from rlplace.measure.execute.residents import gpu_capacities, limited_memory
from rlplace.measure.hosts.host import Host


def parts() -> Host:
    devices = plain_gpus.gpu_host(3, 1000).devices
    named = zip(devices, ("cuda:0/0", "cuda:0/1", "cuda:1/0"), (100, 150, 0), strict=True)
    host = core_host(3)
    names = {f"cpu:{k}": device for k, device in enumerate(("cuda:0/0", "cuda:0/1", "cuda:1/0"))}
    return dataclasses.replace(
        host,
        devices=tuple(dataclasses.replace(each, name=name, context_bytes=held) for each, name, held in named),
        routes=tuple(
            dataclasses.replace(route, source=names[route.source], destination=names[route.destination])
            for route in host.routes
        ),
    )


def test_parts_of_a_gpu_add_up() -> None:
    assert gpu_capacities(parts()) == {torch.device("cuda", 0): 900 + 850, torch.device("cuda", 1): 1000}
    assert gpu_capacities(core_host(2)) == {}


def test_limits_end_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plain_gpus.install(monkeypatch)
    limits = limited_memory(parts())
    limits.__enter__()
    assert calls.limits == [("cuda:0", 1750), ("cuda:1", 1000)]
    assert limits.__exit__(ValueError, ValueError("boom"), None) is False
    assert calls.limits[2:] == [("cuda:0", cuda.UNLIMITED), ("cuda:1", cuda.UNLIMITED)]


def test_a_lost_gpu_does_not_hide_what_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks a GPU how much memory it has when its limit changes, and a lost one answers nothing."""

    def limit(_: torch.device, num_bytes: int) -> None:
        if num_bytes == cuda.UNLIMITED:
            raise RuntimeError(says)

    monkeypatch.setattr(cuda, "limit_memory", limit)
    says = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(ValueError, match="boom"), limited_memory(parts()):
        raise ValueError("boom")
    says = "invalid device ordinal"
    with pytest.raises(RuntimeError, match="ordinal"), limited_memory(parts()):
        pass
