"""Links from real copies: what is done with the figures, not what they are."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host, process_host

from rlplace import cuda
from rlplace.measure.execute.shared_memory import SharedChannel
from rlplace.measure.hosts.detect import gpu_host
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.profiling import profile as links
from rlplace.measure.profiling.profile import GPU_SIZES_BYTES, SIZES_BYTES, line, profile_links


class Wires:
    """Transfers between two devices take `latency_s`, and a second for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bandwidth: dict[tuple[str, str], float] | float) -> None:
        self.bandwidth, self.latency_s = bandwidth, 5e-6
        self.asked: list[tuple[str, str, int]] = []
        self.by_slots: set[bool] = set()
        monkeypatch.setattr(links, "_round_s", self.round_s)

    def one_way_s(self, size: int, source: str, destination: str) -> float:
        rate = self.bandwidth if isinstance(self.bandwidth, float) else self.bandwidth[source, destination]
        return self.latency_s + size / rate

    def round_s(
        self, size: int, answer_size: int, source: Device, destination: Device, repeats: int, *, by_slots: bool = False
    ) -> float:
        self.by_slots.add(by_slots)
        self.asked.append((source.name, destination.name, size))
        there = self.one_way_s(size, source.name, destination.name)
        return there + self.one_way_s(answer_size, destination.name, source.name)


def test_a_line_through_the_sizes_gives_latency_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    wires = Wires(monkeypatch, 2e9)
    before = core_host(3)
    host = profile_links(before)
    assert [link.name for link in host.links] == [link.name for link in before.links]
    for link in host.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
        assert link.latency_s == pytest.approx(5e-6)
    assert wires.asked == [("cpu:0", "cpu:1", size) for size in SIZES_BYTES], "one pair of kinds is measured once"
    assert wires.by_slots == {False}
    assert host.fingerprint == before.fingerprint
    assert host.routes == before.routes


def test_hand_overs_have_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    Wires(monkeypatch, 1e9)
    host = profile_links(core_host(2, has_gang=True))
    assert len(host.links) == 2
    assert [route.links for route in host.routes if "cpu:all" in (route.source, route.destination)] == [()] * 4


def test_real_copies_give_usable_figures() -> None:
    for link in profile_links(core_host(2), repeats=2).links:
        assert np.isfinite(link.bandwidth_bytes_per_s)
        assert 1e6 <= link.bandwidth_bytes_per_s <= 2e12
        assert link.latency_s >= 0


def test_tensors_between_processes_go_through_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent by the threads of both devices, in turn, from the source's own memory into the slot of its way."""
    sent: list[tuple[str, int]] = []
    taken: list[bool] = []
    send, take = SharedChannel.send, SharedChannel.take

    def watched_send(self: SharedChannel, tensor: torch.Tensor) -> None:
        sent.append((threading.current_thread().name, tensor.numel()))
        send(self, tensor)

    def watched_take(self: SharedChannel) -> torch.Tensor:
        found = take(self)
        taken.append(bool((found == 1).all()))
        return found

    monkeypatch.setattr(SharedChannel, "send", watched_send)
    monkeypatch.setattr(SharedChannel, "take", watched_take)
    before = process_host(2)
    host = profile_links(before, repeats=2)
    assert sent == [(f"rlplace cpu:{k % 2}", size) for size in SIZES_BYTES for k in range(2 * (2 + 3))]
    assert len(taken) == len(sent)
    assert all(taken)
    assert host.fingerprint == before.fingerprint
    for link in host.links:
        assert 1e6 <= link.bandwidth_bytes_per_s <= 2e12
    sent.clear()
    profile_links(core_host(2), repeats=2)
    assert not sent, "threads pass them without slots"


NVLINK = {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")}


def gpus(*, has_own_links: bool) -> Host:
    """Three GPUs on one switch; with links of their own, one for each ordered pair."""
    host = plain_gpus.gpu_host(3, 1 << 30)
    shared = tuple(Link(f"{device.name} {way}", 1.0) for device in host.devices for way in ("up", "down"))
    routes = tuple(
        Route(
            each.source,
            each.destination,
            (f"{each.source} up", f"{each.destination} down", *(each.links if has_own_links else ())),
        )
        for each in host.routes
    )
    return dataclasses.replace(host, links=(*shared, *(host.links if has_own_links else ())), routes=routes)


def planned(host: Host) -> dict[tuple[str, str], float]:
    """Bandwidth of each pair, as plans see it."""
    of = {link.name: link.bandwidth_bytes_per_s for link in host.links}
    return {(route.source, route.destination): min(of[name] for name in route.links) for route in host.routes}


def test_every_ordered_pair_of_gpus_is_measured_with_large_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up is faster than down for the last one."""
    names = ("cuda:0", "cuda:1", "cuda:2")
    bandwidth = {
        (one, other): 200e9 if (one, other) in NVLINK else 8e9 if other == "cuda:2" else 12e9
        for one in names
        for other in names
        if one != other
    }
    wires = Wires(monkeypatch, bandwidth)
    host = profile_links(gpus(has_own_links=True))
    assert wires.asked == [(*pair, size) for pair in planned(host) for size in GPU_SIZES_BYTES]
    assert max(GPU_SIZES_BYTES) == 64 << 20
    assert planned(host) == pytest.approx(bandwidth)
    shared = profile_links(gpus(has_own_links=False))
    found = {link.name: link.bandwidth_bytes_per_s for link in shared.links}
    assert found["cuda:0 up"] == pytest.approx(200e9), "the best that any route over it showed"
    assert found["cuda:2 down"] == pytest.approx(8e9)
    assert found["cuda:2 up"] == pytest.approx(12e9)
    assert all(planned(shared)[pair] >= rate * 0.999 for pair, rate in bandwidth.items())


def test_parts_of_the_same_gpus_share_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    host = plain_gpus.gpu_host(4, 1 << 30)
    parts = dict(zip((device.name for device in host.devices), ("cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1")))
    host = dataclasses.replace(
        host,
        devices=tuple(dataclasses.replace(each, name=parts[each.name]) for each in host.devices),
        routes=tuple(
            dataclasses.replace(each, source=parts[each.source], destination=parts[each.destination])
            for each in host.routes
        ),
    )
    wires = Wires(monkeypatch, 1e10)
    profile_links(host)
    pairs = list(dict.fromkeys((one, other) for one, other, _ in wires.asked))
    assert pairs == [
        ("cuda:0/0", "cuda:0/1"),
        ("cuda:0/0", "cuda:1/0"),
        ("cuda:1/0", "cuda:0/0"),
        ("cuda:1/0", "cuda:1/1"),
    ]


def test_one_disturbed_size_does_not_bend_the_line() -> None:
    seconds = [10e-6 + size / 1e10 for size in GPU_SIZES_BYTES]
    seconds[2] *= 20
    latency_s, bandwidth = line(GPU_SIZES_BYTES, seconds)
    assert bandwidth == pytest.approx(1e10, rel=0.2)
    assert latency_s == pytest.approx(10e-6, rel=0.2)


@pytest.mark.parametrize(
    ("seconds", "bandwidth"),
    [
        ([1e-3, 1e-3, 1e-3, 1e-3], (64 << 20) / 1e-3),  # no slope: the largest size over its whole time
        ([4e-3, 3e-3, 2e-3, 1e-3], (64 << 20) / 1e-3),
        ([0.0, 0.0, 0.0, 0.0], 2e12),
        ([0.0, 1e3, 1e4, 1e5], 1e6),
    ],
)
def test_what_is_no_bandwidth_of_a_machine_falls_back(seconds: list[float], bandwidth: float) -> None:
    latency_s, found = line(GPU_SIZES_BYTES, seconds)
    assert found == pytest.approx(bandwidth)
    assert 0.0 <= latency_s <= seconds[0]


def test_each_pair_of_gpus_has_its_own_figures_and_their_parts_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with the CPU and parts of GPUs: no route is held up by a link that others share with it."""
    one, other = 4e9, 2e9
    rates: dict[tuple[str, str], float] = {}
    names = ("cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1", "cpu")
    for source in names:
        for destination in names:
            ends = {source.split("/")[0], destination.split("/")[0]}
            rate = 1e9 if "cpu" in ends else 9e9 if len(ends) == 1 else one if source < destination else other
            rates[source, destination] = rate
    wires = Wires(monkeypatch, rates)
    monkeypatch.setattr(cuda, "num_gpus", lambda: 2)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, 7 << 30))
    host = profile_links(gpu_host("lab", num_parts=2, with_cpu=True, cores=(0, 1), ram_bytes=1 << 30))
    pairs = {(source, destination) for source, destination, _ in wires.asked}
    assert len(pairs) == 8, "both GPUs in themselves, both ways between them, both ways between each and the CPU"
    by_name = {link.name: link for link in host.links}
    for route in host.routes:
        used = [by_name[name] for name in route.links]
        assert min(link.bandwidth_bytes_per_s for link in used) == pytest.approx(rates[route.source, route.destination])
        assert max(link.latency_s for link in used) == pytest.approx(5e-6, rel=0.2)  # half of two small ones each
