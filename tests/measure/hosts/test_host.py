"""`Host` and its parts: what they check, and what their fingerprint covers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.hosts.host import Device, Host, Link, Route

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
        ({"name": ""}, "name"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_granularity_bytes": 0}, "memory_granularity_bytes"),
        ({"context_bytes": -1}, "context_bytes"),
        ({"launch_s": float("nan")}, "launch_s"),
        ({"memory_bandwidth_bytes_per_s": float("inf")}, "memory_bandwidth_bytes_per_s"),
        ({"peak_flops_per_s": {"float32": -1.0}}, "peak_flops_per_s.float32"),
    ],
)
def test_refuses_impossible_devices(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        replace(A, **change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
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
def test_refuses_impossible_hosts(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        replace(HOST, **change)
    assert caught.value.field == field


def test_refuses_links_without_bandwidth() -> None:
    for bandwidth in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidValue, match="bandwidth_bytes_per_s"):
            Link("wire", bandwidth)


def test_names_the_pair_without_a_route() -> None:
    with pytest.raises(InvalidValue, match="nothing from 'b' to 'a'"):
        replace(HOST, routes=ROUTES[:1])


def test_refuses_routes_over_unknown_names() -> None:
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
