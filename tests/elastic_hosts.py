"""Hosts of a few simulated devices with the figures that estimates need, and fewer devices of a host."""

from __future__ import annotations

import dataclasses

from rlplace.measure.hosts.host import Device, Host, Link, Route

KINDS = {"fast": (2e13, 8e11), "slow": (4e12, 2e11)}
"""FLOP/s and bytes/s of each kind."""


def simulated_host(*kinds: str, name: str = "made up", memory_bytes: int = 1 << 34) -> Host:
    """Devices `gpu:0`, `gpu:1`, ... of these kinds, each with a way up and a way down that its copies share."""
    devices = tuple(
        Device(
            f"gpu:{index}",
            kind,
            "simulated",
            memory_bytes,
            peak_flops_per_s={"float32": KINDS[kind][0]},
            memory_bandwidth_bytes_per_s=KINDS[kind][1],
            launch_s=5e-6,
        )
        for index, kind in enumerate(kinds)
    )
    links = tuple(Link(f"{device.name} {way}", 1.2e10, 1e-5) for device in devices for way in ("up", "down"))
    routes = tuple(
        Route(one.name, other.name, (f"{one.name} up", f"{other.name} down"))
        for one in devices
        for other in devices
        if one is not other
    )
    return Host(name, devices, links, routes)


def without(host: Host, *names: str) -> Host:
    """The host, but for the devices of these names."""
    devices = tuple(device for device in host.devices if device.name not in names)
    routes = tuple(route for route in host.routes if not {route.source, route.destination} & set(names))
    used = {link for route in routes for link in route.links}
    links = tuple(link for link in host.links if link.name in used)
    return dataclasses.replace(host, devices=devices, routes=routes, links=links, corun_slowdown=())
