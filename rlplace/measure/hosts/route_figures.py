"""What a transfer between devices takes by the routes and links of a host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import LATENCY_S, S_PER_BYTE
from rlplace.measure.hosts.host import Host


def route_latency_s(host: Host) -> NDArray[np.float64]:
    """(D, D) float64: latency of each route in seconds; 0 on the diagonal and for hand-overs."""
    return _over_routes(host, "latency_s", max, 0.0)


def route_s_per_byte(host: Host) -> NDArray[np.float64]:
    """(D, D) float64: seconds per byte of each route; 0 on the diagonal and for hand-overs."""
    rates = _over_routes(host, "bandwidth_bytes_per_s", min, np.inf)
    return 1.0 / rates


def mean_transfer(host: Host) -> tuple[float, float]:
    """Mean latency, and seconds per byte, of the routes that copy; those of two GPUs where no route does."""
    links = {link.name: link for link in host.links}
    routes = [[links[name] for name in route.links] for route in host.routes if route.links]
    if not routes:
        return LATENCY_S, S_PER_BYTE
    latency_s = [max(link.latency_s for link in route) for route in routes]
    s_per_byte = [1.0 / min(link.bandwidth_bytes_per_s for link in route) for route in routes]
    return float(np.mean(latency_s)), float(np.mean(s_per_byte))


def _over_routes(host: Host, field: str, reduce: object, neutral: float) -> NDArray[np.float64]:
    links = {link.name: float(getattr(link, field)) for link in host.links}
    table = np.full((host.num_devices, host.num_devices), neutral)
    for route in host.routes:
        if route.links:
            source, destination = host.device_index[route.source], host.device_index[route.destination]
            table[source, destination] = reduce(links[name] for name in route.links)  # type: ignore[operator]
    return table
