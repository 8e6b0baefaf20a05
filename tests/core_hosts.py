"""Hosts of CPU devices that are pinned nowhere, so that tests need no particular number of cores."""

from __future__ import annotations

from rlplace.measure.hosts.host import Device, Host, Link, Route


def core_host(num_devices: int = 2, *, has_gang: bool = False) -> Host:
    """`cpu:0`, `cpu:1`, ... with a link for each ordered pair; with a gang, `cpu:all` over all of them as the last."""
    devices = [core_device(f"cpu:{index}") for index in range(num_devices)]
    if has_gang:
        devices.append(core_device("cpu:all", members=tuple(device.name for device in devices)))
    links, routes = [], []
    for source in devices:
        for destination in devices:
            if source is destination:
                continue
            is_handover = bool(source.members or destination.members)
            name = f"{source.name}->{destination.name}"
            routes.append(Route(source.name, destination.name, () if is_handover else (name,)))
            if not is_handover:
                links.append(Link(name, bandwidth_bytes_per_s=1e9, latency_s=1e-6))
    return Host("cores", tuple(devices), tuple(links), tuple(routes), dispatch_order="request", run_ahead=1)


def process_host(num_devices: int = 2) -> Host:
    """The same cores, each with a process and a launcher of its own."""
    return core_host(num_devices).as_processes("procs")


def core_device(name: str, *, members: tuple[str, ...] = (), cores: tuple[int, ...] = ()) -> Device:
    """One device of the CPU, unpinned by default."""
    kind = "cpu-gang" if members else "cpu-core"
    return Device(
        name,
        kind,
        "cpu",
        memory_bytes=1 << 34,
        memory_pool="ram",
        dispatcher="interpreter",
        cores=cores,
        members=members,
    )
