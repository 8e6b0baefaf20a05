"""`random_host`: hosts that weights are trained on, made of the kinds of devices and wires that presets have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import Wiring, lay_routes
from rlplace.measure.hosts.resolve import resolve_host

KINDS = ("2xK80", "4xV100-pcie", "4xA100-nvlink", "4xRTX3090-pcie", "8xH100-nvswitch", "RTX4090+RTX3060")
"""Presets whose first device is a kind that hosts are made of."""
WIRES = {"pcie3": (11.4e9, 14e-6), "pcie4": (22e9, 12e-6), "nvlink": (90e9, 2e-6), "nvswitch": (270e9, 2e-6)}
"""Bytes per second and latency in seconds between the devices of a node, as presets have them."""
COUNTS = (2, 3, 4, 6, 8, 16)
"""How many devices there may be."""
ONE_KIND, TWO_NODES, SPREAD = 0.7, 0.3, 0.15
"""Chance that all devices are of a kind, that four and more are on two nodes, and the spread of the log of a rate."""


def random_host(draw: np.random.Generator) -> Host:
    """Two to sixteen devices of one kind, or of two; on one wire, or on two nodes that InfiniBand joins."""
    count = int(draw.choice(COUNTS, p=(0.22, 0.12, 0.28, 0.1, 0.18, 0.1)))
    hosts = [resolve_host(str(name)) for name in draw.choice(KINDS, 2, replace=False)]
    first = count if draw.random() < ONE_KIND else int(draw.integers(1, count))
    kinds = [hosts[0].devices[0]] * first + [hosts[1].devices[0]] * (count - first)
    nodes = 2 if count >= 4 and draw.random() < TWO_NODES else 1
    names = [f"n{d * nodes // count}:{d}" for d in range(count)]
    rate, latency_s = WIRES[str(draw.choice(list(WIRES)))]
    rate *= float(np.exp(SPREAD * draw.normal()))
    wirings = [Wiring(f"wire-{node}", rate, latency_s, ports=(f"n{node}:*",)) for node in range(nodes)]
    wirings += [Wiring("ib", 22e9, 10e-6, ports=("*",))] * (nodes - 1)
    links, routes = lay_routes(wirings, names, "random host")
    devices = [replace(kind, name=name, dispatcher=name[:2]) for kind, name in zip(kinds, names, strict=True)]
    return replace(hosts[0], name="random", devices=tuple(devices), links=links, routes=routes, sources={})
