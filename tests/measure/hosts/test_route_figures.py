"""Latencies and rates of routes over several links, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from random_problems import plain_host

from rlplace.graphs.grouping.groups import LATENCY_S, S_PER_BYTE
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import mean_transfer, over_routes


def test_a_route_has_the_longest_latency_and_the_lowest_rate_of_its_links() -> None:
    devices = tuple(Device(name, "Some device", "simulated", memory_bytes=1) for name in "abc")
    links = (Link("up", 10.0, 0.25), Link("down", 50.0, 0.5))
    names = {"ab": ("up", "down"), "ba": ("up",), "bc": ("down",), "cb": ("up",), "ac": ("down",), "ca": ()}
    host = Host("star", devices, links, tuple(Route(*pair, over) for pair, over in names.items()))
    assert over_routes(host, "latency_s", max, 0.0).tolist() == [[0.0, 0.5, 0.5], [0.25, 0.0, 0.5], [0.0, 0.25, 0.0]]
    assert (1.0 / over_routes(host, "bandwidth_bytes_per_s", min, np.inf)).tolist() == [
        [0.0, 0.1, 0.02],
        [0.1, 0.0, 0.02],
        [0.0, 0.1, 0.0],
    ]


def test_a_transfer_takes_what_the_routes_take_on_average() -> None:
    host = plain_host(2, bandwidth_bytes_per_s=50.0, latency_s=0.5)
    assert mean_transfer(host) == (0.5, 0.02)
    handed_over = replace(host, routes=tuple(Route(r.source, r.destination, ()) for r in host.routes))
    assert mean_transfer(handed_over) == (LATENCY_S, S_PER_BYTE)
