"""Which devices have a process, and what PyTorch calls them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_hosts import core_host

from rlplace.errors import InvalidValue
from rlplace.export.ranks import rank_devices
from rlplace.measure import resolve_host


def test_cores_are_ranks_and_gangs_are_not() -> None:
    assert rank_devices(core_host(3, has_gang=True), "test") == {0: "cpu", 1: "cpu", 2: "cpu"}


def test_gpus_are_ranks_and_the_cpu_beside_them_is_not() -> None:
    host = resolve_host("cpu+4xA100")
    names = [host.devices[index].name for index in rank_devices(host, "test")]
    assert len(names) == 4
    assert "cpu" not in names
    assert list(rank_devices(host, "test").values()) == [f"cuda:{index}" for index in range(4)]


def test_gpus_are_counted_on_each_machine() -> None:
    host = resolve_host("2x8xV100-25gbe")
    assert list(rank_devices(host, "test").values()) == [f"cuda:{index % 8}" for index in range(16)]


def test_parts_of_a_gpu_have_no_process_of_their_own() -> None:
    host = core_host(2)
    parts = tuple(
        replace(device, name=f"cuda:0/{index}", backend="simulated") for index, device in enumerate(host.devices)
    )
    parted = replace(
        host,
        devices=parts,
        routes=tuple(
            replace(
                route,
                source=route.source.replace("cpu:", "cuda:0/"),
                destination=route.destination.replace("cpu:", "cuda:0/"),
            )
            for route in host.routes
        ),
    )
    with pytest.raises(InvalidValue, match=r"test: device is 'cuda:0/0', expected a whole GPU"):
        rank_devices(parted, "test")
