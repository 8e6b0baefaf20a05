"""`HostResources`: devices and links of a host, and what ops and transfers hold of them while they run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlplace.jit import Floats, Ints
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import Compiled, compile_problem
from rlplace.measure.simulate.host_tables import JOB


class HostResources(NamedTuple):
    """What ops and transfers hold while they run. Resources are devices 0..D-1, then links.

    Attributes:
        latency_s, s_per_byte: (D, D) float64, of each route.
        device_offsets, device_holds: CSR over devices: what an op on it holds (a gang: its members).
        route_offsets, route_holds: CSR over source * D + destination: links, and the devices that a copy blocks.
        num_resources: devices and links.
        account: (D,) int32, the memory of each device (its own, or its pool's).
        room_bytes: (accounts,) float64, capacity less what is held from the start.
    """

    latency_s: Floats
    s_per_byte: Floats
    device_offsets: Ints
    device_holds: Ints
    route_offsets: Ints
    route_holds: Ints
    num_resources: int
    account: Ints
    room_bytes: Floats


def host_resources(problem: Problem) -> HostResources:
    """The host's devices and routes as resources that are held.

    Raises:
        InvalidValue: a host that cannot be simulated.
    """
    compiled = compile_problem(problem)
    num_devices = compiled.num_devices
    atoms = [[a for a in range(num_devices) if int(mask) >> a & 1] for mask in compiled.atoms]
    holds = [_route_holds(compiled, atoms, pair) for pair in range(num_devices * num_devices)]
    account = np.where(compiled.pool >= 0, compiled.pool, np.arange(num_devices)).astype(np.int32)
    room = compiled.capacity_bytes.astype(np.float64)
    np.subtract.at(room, account, compiled.context_bytes)
    return HostResources(
        latency_s=problem.transfer_latency_s,
        s_per_byte=problem.transfer_s_per_byte,
        device_offsets=np.cumsum([0, *map(len, atoms)]).astype(np.int32),
        device_holds=np.array([a for device in atoms for a in device], dtype=np.int32),
        route_offsets=np.cumsum([0, *map(len, holds)]).astype(np.int32),
        route_holds=np.array([resource for route in holds for resource in route], dtype=np.int32),
        num_resources=num_devices + compiled.num_links,
        account=account,
        room_bytes=room,
    )


def _route_holds(compiled: Compiled, atoms: list[list[int]], pair: int) -> list[int]:
    source, destination = divmod(pair, compiled.num_devices)
    links = compiled.route_links[compiled.route_offsets[pair] : compiled.route_offsets[pair + 1]]
    held = {compiled.num_devices + link for link in links.tolist()}
    if compiled.route_kind[pair] == JOB:
        held |= set(atoms[destination])
    if compiled.route_blocks_source[pair]:
        held |= set(atoms[source])
    return sorted(held)
