"""Hosts of several machines: devices of one machine have a link for each pair, machines a way up and a way down."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
from core_hosts import process_host
from random_problems import BIG

from rlplace.measure.hosts.host import Device, Host, Link, Route


def simulated_machines(machines: str = "aabb", **options: object) -> Host:
    """`a/0`, `a/1`, `b/0`, ...: 100 B/s and 1 s between machines, 1,000 B/s within one."""
    places = [(machine, machines[:index].count(machine)) for index, machine in enumerate(machines)]
    devices = tuple(Device(f"{m}/{k}", "any", "simulated", BIG, machine=m) for m, k in places)
    links = {f"{machine} {way}": Link(f"{machine} {way}", 100.0, 1.0) for machine in machines for way in ("up", "down")}
    routes = []
    for one, other in permutations(devices, 2):
        own = f"{one.name}>{other.name}"
        is_near = one.machine == other.machine
        links |= {own: Link(own, 1000.0)} if is_near else {}
        used = (own,) if is_near else (f"{one.machine} up", f"{other.machine} down")
        routes.append(Route(one.name, other.name, used))
    return Host("machines", devices, tuple(links.values()), tuple(routes), processes=True, **options)  # type: ignore[arg-type]


def core_machines(machines: str) -> Host:
    """Cores of this machine that count as those of several, which have no memory in common."""
    host = process_host(len(machines))
    apart = (replace(d, machine=m, memory_pool=f"ram of {m}") for d, m in zip(host.devices, machines, strict=True))
    return replace(host, devices=tuple(apart))


def crossings(host: Host, tensors: np.ndarray, sources: np.ndarray, destinations: np.ndarray) -> list[tuple[int, str]]:
    """Each tensor and the machine that it comes to, for each transfer from another machine."""
    names = [device.machine for device in host.devices]
    ends = zip(tensors.tolist(), sources.tolist(), destinations.tolist(), strict=True)
    return [(tensor, names[to]) for tensor, source, to in ends if names[source] != names[to]]
