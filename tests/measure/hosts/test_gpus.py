"""The GPUs of machines that are made up, whole and in parts, alone and beside the CPU."""

from __future__ import annotations

import itertools

import pytest
from core_hosts import core_host

from rlplace import cuda
from rlplace.errors import InvalidValue
from rlplace.measure.hosts.detect import gpu_host, usable_bytes
from rlplace.measure.hosts.host import Host


def made_up(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_parts: int = 1, *, with_cpu: bool = False, num_cores: int = 16
) -> Host:
    monkeypatch.setattr(cuda, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, (7 << 30) - 1))
    cores = tuple(range(100, 100 + num_cores))
    return gpu_host("lab", num_parts=num_parts, with_cpu=with_cpu, cores=cores, ram_bytes=64 << 30)


def links(host: Host) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(route.source, route.destination): route.links for route in host.routes}


def test_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    host = made_up(monkeypatch, 2)
    assert [device.name for device in host.devices] == ["cuda:0", "cuda:1"]
    assert {(d.kind, d.backend, d.memory_bytes, d.memory_pool, d.context_bytes, d.cores) for d in host.devices} == {
        ("Some GPU", "cuda", usable_bytes(8 << 30), "", (1 << 30) + 1, ())
    }
    assert links(host) == {
        ("cuda:0", "cuda:1"): ("cuda:0 up", "cuda:1 down", "cuda:0->cuda:1"),
        ("cuda:1", "cuda:0"): ("cuda:1 up", "cuda:0 down", "cuda:1->cuda:0"),
    }
    assert host.corun_slowdown == ()
    assert (host.dispatch_order, host.run_ahead) == ("request", 1024)


def test_one_gpu_has_nowhere_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    host = made_up(monkeypatch, 1)
    assert (host.routes, host.links) == ((), ())


def test_parts_share_memory_and_processors_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host = made_up(monkeypatch, 2, 2)
    names = ["cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1"]
    assert [device.name for device in host.devices] == names
    assert [cuda.parse_name(name) for name in names] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(d.kind, d.memory_bytes, d.context_bytes) for d in host.devices} == {
        ("Some GPU 1/2", usable_bytes(8 << 30) // 2, (1 << 29) + 1)  # no byte of the context is forgotten
    }
    assert host.corun_slowdown == ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0))
    ways = links(host)
    assert ways["cuda:0/0", "cuda:0/1"] == ("cuda:0/0->cuda:0/1",)
    assert ways["cuda:0/1", "cuda:1/0"] == ("cuda:0 up", "cuda:1 down", "cuda:0/1->cuda:1/0")
    inner, outer = (next(link for link in host.links if link.name == ways[pair][-1]) for pair in list(ways)[:2])
    assert inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s


@pytest.mark.parametrize("num_parts", [0, -1, 17])
def test_no_more_parts_than_there_are_streams_for(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match=rf"parts of a GPU is {num_parts}, expected 1 to 16"):
        made_up(monkeypatch, 1, num_parts)


@pytest.mark.parametrize(
    ("num_gpus", "num_parts", "num_cores", "num_launching"),
    [(1, 1, 8, 1), (2, 1, 8, 2), (2, 2, 16, 4), (8, 1, 8, 4), (1, 4, 3, 1), (1, 1, 2, 1), (1, 1, 1, 0)],
)
def test_the_cpu_leaves_cores_to_the_threads_that_launch(
    num_gpus: int, num_parts: int, num_cores: int, num_launching: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_up(monkeypatch, num_gpus, num_parts, with_cpu=True, num_cores=num_cores)
    *gpus, cpu = host.devices
    cores = tuple(range(100, 100 + num_cores))
    assert {device.cores for device in gpus} == {cores[:num_launching]}
    assert (cpu.name, cpu.cores, cpu.kind) == ("cpu", cores[num_launching:], f"cpu-{num_cores - num_launching}cores")
    assert (cpu.memory_bytes, cpu.memory_pool) == (usable_bytes(64 << 30), "ram")
    assert links(host)["cpu", gpus[0].name] == ("cpu up", "cuda:0 down", f"cpu->{gpus[0].name}")


def test_hosts_of_different_words_have_different_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [
        made_up(monkeypatch, 2, num_parts, with_cpu=with_cpu)
        for num_parts, with_cpu in itertools.product((1, 2, 4), (False, True))
    ]
    assert len({host.fingerprint for host in [*hosts, core_host(2), core_host(4)]}) == len(hosts) + 2
