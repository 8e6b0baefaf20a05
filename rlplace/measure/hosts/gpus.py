"""The GPUs of this machine as a `Host`: each as one device or as several, the CPU beside them or not."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace import cuda
from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.usable import usable_bytes

MOST_PARTS = 16
"""Of one GPU: each has a stream of its own, and PyTorch has 32 to compute on."""
PARTS_SLOWDOWN = 1.0
"""`Host.corun_slowdown` between parts of one GPU: two that run at once run at half speed each, as if every op filled
the GPU. Small ops do not, so it is a prior: calibration replaces it."""

COPY_BYTES_PER_S = 12e9
COPY_LATENCY_S = 15e-6
"""Link figures until `profile_links` has measured them."""
INNER_COPY_BYTES_PER_S = 500e9
INNER_COPY_LATENCY_S = 10e-6
"""The same between parts of one GPU."""


def gpu_host(name: str, *, num_parts: int = 1, with_cpu: bool = False, cores: tuple[int, ...], ram_bytes: int) -> Host:
    """All GPUs of this machine, of which there is one at least.

    With the CPU as one more device, as many cores as there are other devices, at most half of all, are left to the
    threads that launch the GPUs' kernels; the CPU device has the others.

    Args:
        name: of the host.
        num_parts: each GPU is so many devices, `cuda:0/0`, `cuda:0/1`, ..., with equal shares of its memory.
        with_cpu: the CPU joins as one more device, `cpu`.
        cores: that this process may use.
        ram_bytes: memory of the machine.

    Raises:
        InvalidValue: more than 16 parts.
    """
    if not 1 <= num_parts <= MOST_PARTS:
        hint = "Every part computes on a stream of its own."
        raise InvalidValue("parts of a GPU", num_parts, f"1 to {MOST_PARTS}", where=f"host {name!r}", hint=hint)
    count = cuda.num_gpus()
    launching = cores[: min(count * num_parts, len(cores) // 2)] if with_cpu else ()
    devices = [part for index in range(count) for part in _parts(index, num_parts, launching)]
    if with_cpu:
        devices.append(_cpu(cores[len(launching) :], ram_bytes))
    routes = tuple(_routes(devices))
    return Host(
        name=name,
        devices=tuple(devices),
        links=tuple(_links(routes)),
        routes=routes,
        dispatch_order="request",
        run_ahead=1024,
        corun_slowdown=_slowdown(devices) if num_parts > 1 else (),
    )


def _parts(index: int, num_parts: int, launching: tuple[int, ...]) -> Iterator[Device]:
    gpu = cuda.gpu(index)
    for part in range(num_parts):
        yield Device(
            name=f"cuda:{index}/{part}" if num_parts > 1 else f"cuda:{index}",
            kind=f"{gpu.name} 1/{num_parts}" if num_parts > 1 else gpu.name,
            backend="cuda",
            memory_bytes=usable_bytes(gpu.memory_bytes) // num_parts,
            context_bytes=-(-(gpu.memory_bytes - gpu.free_bytes) // num_parts),
            memory_granularity_bytes=512,
            dispatcher="interpreter",
            cores=launching,
        )


def _cpu(cores: tuple[int, ...], ram_bytes: int) -> Device:
    return Device(
        name="cpu",
        kind=f"cpu-{len(cores)}cores",
        backend="cpu",
        memory_bytes=usable_bytes(ram_bytes),
        memory_pool="ram",
        dispatcher="interpreter",
        cores=cores,
    )


def _routes(devices: list[Device]) -> Iterator[Route]:
    """A link for each pair holds the pair's own figures; those that copies share make them wait for each other."""
    for source in devices:
        for destination in devices:
            if source is destination:
                continue
            own = f"{source.name}->{destination.name}"
            here, there = _port(source), _port(destination)
            yield Route(
                source.name, destination.name, (own,) if here == there else (f"{here} up", f"{there} down", own)
            )


def _port(device: Device) -> str:
    """What all copies from and to a device go through: its GPU, or the CPU."""
    return device.name.partition("/")[0]


def _links(routes: tuple[Route, ...]) -> Iterator[Link]:
    for name in dict.fromkeys(name for route in routes if len(route.links) > 1 for name in route.links):
        yield Link(name, COPY_BYTES_PER_S, COPY_LATENCY_S)
    for route in routes:
        if len(route.links) == 1:
            yield Link(route.links[0], INNER_COPY_BYTES_PER_S, INNER_COPY_LATENCY_S)


def _slowdown(devices: list[Device]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(PARTS_SLOWDOWN if one is not other and _port(one) == _port(other) else 0.0 for other in devices)
        for one in devices
    )
