"""`Host` and its parts: what they check, what their fingerprint covers, and the presets."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import permutations

import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.hosts.resolve import PRESETS, list_presets, resolve_host

A = Device("a", "gpu", "simulated", memory_bytes=100)
B = replace(A, name="b")
LINKS = (Link("up", 10.0, 1e-6), Link("down", 20.0))
ROUTES = (Route("a", "b", ("up",)), Route("b", "a", ("down",)))
HOST = Host("pair", (A, B), LINKS, ROUTES)


def test_looks_devices_up_by_name() -> None:
    assert HOST.num_devices == 2
    assert HOST.device("b") is B
    assert HOST.device_index == {"a": 0, "b": 1}
    assert HOST.is_simulated
    with pytest.raises(UnknownName, match="unknown device 'c'"):
        HOST.device("c")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        # of a device
        ({"name": ""}, "name"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_granularity_bytes": 0}, "memory_granularity_bytes"),
        ({"context_bytes": -1}, "context_bytes"),
        ({"launch_s": float("nan")}, "launch_s"),
        ({"memory_bandwidth_bytes_per_s": float("inf")}, "memory_bandwidth_bytes_per_s"),
        ({"peak_flops_per_s": {"float32": -1.0}}, "peak_flops_per_s.float32"),
        # of the host
        ({"devices": ()}, "devices"),
        ({"devices": (A, A)}, "devices"),
        ({"links": (*LINKS, LINKS[0])}, "links"),
        ({"routes": ROUTES[:1]}, "routes"),
        ({"routes": (*ROUTES, ROUTES[0])}, "routes"),
        ({"dispatch_s": -1.0}, "dispatch_s"),
        ({"run_ahead": 0}, "run_ahead"),
        ({"corun_slowdown": ((0.0, 1.0),)}, "corun_slowdown"),
        ({"processes": True, "devices": tuple(replace(each, dispatcher="one") for each in (A, B))}, "dispatcher"),
        ({"processes": True, "devices": (A, replace(B, members=("a",)))}, "devices"),
        ({"corun_slowdown": ((0.0, -1.0), (0.0, 0.0))}, "corun_slowdown[0][1]"),
    ],
)
def test_refuses_impossible_devices_and_hosts(change: dict[str, object], field: str) -> None:
    made = A if set(change) <= {each.name for each in fields(A)} else HOST
    with pytest.raises(InvalidValue) as caught:
        replace(made, **change)
    assert caught.value.field == field


def test_refuses_links_without_bandwidth_and_routes_that_are_missing_or_over_unknown_names() -> None:
    for bandwidth in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidValue, match="bandwidth_bytes_per_s"):
            Link("wire", bandwidth)
    with pytest.raises(InvalidValue, match="nothing from 'b' to 'a'"):
        replace(HOST, routes=ROUTES[:1])
    with pytest.raises(UnknownName, match=r"unknown link in routes\[1\].links 'dwn': did you mean 'down'"):
        replace(HOST, routes=(ROUTES[0], Route("b", "a", ("dwn",))))
    with pytest.raises(UnknownName, match=r"unknown device in routes.*'c'"):
        replace(HOST, routes=(*ROUTES, Route("a", "c", ("up",))))


def test_fingerprint_covers_structure_and_no_measured_figure() -> None:
    slower = replace(HOST, links=(Link("up", 1.0), Link("down", 1.0)), dispatch_s=1.0, sources={"up": "measured"})
    assert slower.fingerprint == HOST.fingerprint
    assert replace(HOST, processes=True).fingerprint != HOST.fingerprint
    assert replace(HOST, devices=(A, replace(B, kind="cpu"))).fingerprint != HOST.fingerprint
    assert replace(HOST, routes=(ROUTES[0], Route("b", "a", ("up",)))).fingerprint != HOST.fingerprint


EXPECTED = (
    "16x1xV100-10gbe", "16x1xV100-25gbe", "2x8xA100-ib", "2x8xV100-25gbe", "2xK80", "4xA100-nvlink", "4xK80",
    "4xRTX3090-pcie", "4xV100-pcie", "8xH100-nvswitch",
    "8xV100-dgx1", "RTX4090+RTX3060", "cpu+4xA100",
)  # fmt: skip

DEVICE_FIGURES = (
    "memory_bytes", "memory_granularity_bytes", "context_bytes", "peak_flops_per_s", "memory_bandwidth_bytes_per_s",
    "launch_s",
)  # fmt: skip


def figures(host: Host) -> set[str]:
    """The keys under which a preset cites its sources: `KIND.FIELD`, `LINKS.FIELD`, and fields of the host."""
    devices = {f"{d.kind}.{field}" for d in host.devices for field in DEVICE_FIGURES if getattr(d, field)}
    names = {link.name.partition(":")[0] for link in host.links}
    links = {f"{name}.{field}" for name in names for field in ("bandwidth_bytes_per_s", "latency_s")}
    return devices | links | {"dispatch_s", "copy_dispatch_s", "run_ahead"}


def route(host: Host, source: str, destination: str) -> Route:
    (found,) = (route for route in host.routes if (route.source, route.destination) == (source, destination))
    return found


def bandwidth(host: Host, source: str, destination: str) -> float:
    links: dict[str, Link] = {link.name: link for link in host.links}
    return min(links[name].bandwidth_bytes_per_s for name in route(host, source, destination).links)


def test_lists_all_presets_whose_fingerprints_differ() -> None:
    assert list_presets() == tuple(sorted(EXPECTED))
    assert len({resolve_host(name).fingerprint for name in EXPECTED}) == len(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_is_whole_and_names_the_source_of_every_figure(name: str) -> None:
    host = resolve_host(name)
    assert host.name == name
    assert {device.backend for device in host.devices} == {"simulated"}
    assert all(device.dispatcher and device.launch_s and device.peak_flops_per_s["float32"] for device in host.devices)
    assert len(host.routes) == host.num_devices * (host.num_devices - 1)
    assert {link.name for link in host.links} == {name for route in host.routes for name in route.links}
    assert host_from_dict(json.loads(json.dumps(host.to_dict())), "run folder") == host
    assert set(host.sources) - {"devices", "topology"} == figures(host)
    assert all(len(source) >= len("as nvswitch0") for source in host.sources.values())
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


NVLINKS = """
    X 1 1 2 2 0 0 0
    1 X 2 1 0 2 0 0
    1 2 X 2 0 0 1 0
    2 1 2 X 0 0 0 1
    2 0 0 0 X 1 1 2
    0 2 0 0 1 X 2 1
    0 0 1 0 1 2 X 2
    0 0 0 1 2 1 2 X
"""
"""NVLinks between the GPUs of a DGX-1, as `nvidia-smi topo -m` prints them (NV1, NV2, else SYS)."""


def test_dgx1_has_the_hybrid_cube_mesh_and_pairs_share_an_uplink() -> None:
    host = resolve_host("8xV100-dgx1")
    matrix = [line.split() for line in NVLINKS.split("\n") if line.strip()]
    for a, b in permutations(range(8), 2):
        links = route(host, f"cuda:{a}", f"cuda:{b}").links
        if matrix[a][b] == "0":
            up, down = (
                f"pcie:cuda:{a - a % 2}+cuda:{a - a % 2 + 1}:up",
                f"pcie:cuda:{b - b % 2}+cuda:{b - b % 2 + 1}:down",
            )
            assert links == (up, down)
        else:
            assert links == (f"nvlink{matrix[a][b]}:cuda:{a}>cuda:{b}",)
    assert bandwidth(host, "cuda:0", "cuda:3") == 2 * bandwidth(host, "cuda:0", "cuda:1") == 48e9
    assert bandwidth(host, "cuda:0", "cuda:7") == 11.4e9
    assert route(host, "cuda:0", "cuda:5").links[0] == route(host, "cuda:1", "cuda:4").links[0]
    assert not set(route(host, "cuda:0", "cuda:5").links) & set(route(host, "cuda:2", "cuda:7").links)


def test_k80_board_has_one_uplink_for_both_gpus() -> None:
    small, large = resolve_host("2xK80"), resolve_host("4xK80")
    assert set(route(small, "cuda:0", "cuda:1").links) == set(route(small, "cuda:1", "cuda:0").links)
    assert route(large, "cuda:0", "cuda:2").links[0] == route(large, "cuda:1", "cuda:3").links[0]
    assert not set(route(large, "cuda:0", "cuda:1").links) & set(route(large, "cuda:2", "cuda:3").links)


@pytest.mark.parametrize("name", ["4xV100-pcie", "4xRTX3090-pcie", "8xH100-nvswitch"])
def test_gpus_of_a_switch_have_one_link_up_and_one_down(name: str) -> None:
    host = resolve_host(name)
    assert len(host.links) == 2 * host.num_devices
    for a, b in permutations(host.device_index, 2):
        (up, down) = route(host, a, b).links
        assert up.endswith(f":{a}:up")
        assert down.endswith(f":{b}:down")


def test_a100_pairs_have_wires_of_their_own() -> None:
    host = resolve_host("4xA100-nvlink")
    assert len(host.links) == 12
    assert all(len(route.links) == 1 for route in host.routes)


def test_two_nodes_are_joined_by_one_slow_card_a_gpu() -> None:
    host = resolve_host("2x8xA100-ib")
    inside, across = ("node0/cuda:0", "node0/cuda:7"), ("node0/cuda:0", "node1/cuda:7")
    assert route(host, *inside).links == ("nvswitch0:node0/cuda:0:up", "nvswitch0:node0/cuda:7:down")
    assert route(host, *across).links == ("infiniband:node0/cuda:0:up", "infiniband:node1/cuda:7:down")
    assert bandwidth(host, *inside) > 10 * bandwidth(host, *across)
    assert [device.dispatcher for device in host.devices] == ["node0"] * 8 + ["node1"] * 8


def test_gpus_of_a_server_share_its_card_in_both_directions() -> None:
    """DAPPLE's configuration A: NVLink inside, one Ethernet card a server."""
    host = resolve_host("2x8xV100-25gbe")
    ways = {route(host, f"node0/cuda:{a}", f"node1/cuda:{b}").links for a in range(8) for b in range(8)}
    back = {route(host, f"node1/cuda:{b}", f"node0/cuda:{a}").links for a in range(8) for b in range(8)}
    assert len(ways) == len(back) == 1
    assert not set(*ways) & set(*back)
    assert bandwidth(host, "node0/cuda:0", "node1/cuda:0") == 2.94e9
    dgx1 = resolve_host("8xV100-dgx1")
    for a, b in permutations(range(8), 2):
        inside = bandwidth(dgx1, f"cuda:{a}", f"cuda:{b}")
        assert bandwidth(host, f"node1/cuda:{a}", f"node1/cuda:{b}") == inside


@pytest.mark.parametrize(("name", "rate"), [("16x1xV100-25gbe", 2.94e9), ("16x1xV100-10gbe", 1.18e9)])
def test_servers_of_one_gpu_have_a_card_each(name: str, rate: float) -> None:
    host = resolve_host(name)
    assert len(host.links) == 2 * host.num_devices == 32
    assert {bandwidth(host, a, b) for a, b in permutations(host.device_index, 2)} == {rate}
    assert len({device.dispatcher for device in host.devices}) == 16


def test_the_cpu_is_slow_and_large() -> None:
    host = resolve_host("cpu+4xA100")
    cpu, gpu = host.device("cpu"), host.device("cuda:0")
    assert cpu.memory_bytes > 10 * gpu.memory_bytes
    assert 4 * cpu.peak_flops_per_s["float32"] < gpu.peak_flops_per_s["float32"]
    assert route(host, "cpu", "cuda:2").links == ("pcie:cuda:2:down",)
    assert route(host, "cuda:2", "cpu").links == ("pcie:cuda:2:up",)
    assert route(host, "cuda:1", "cuda:2").links == ("nvlink:cuda:1>cuda:2",)


def test_unequal_gpus_differ_in_all_that_counts() -> None:
    fast, slow = resolve_host("RTX4090+RTX3060").devices
    assert fast.peak_flops_per_s["float32"] > 6 * slow.peak_flops_per_s["float32"]
    assert fast.memory_bandwidth_bytes_per_s > 2 * slow.memory_bandwidth_bytes_per_s
    assert fast.memory_bytes > 2 * slow.memory_bytes
