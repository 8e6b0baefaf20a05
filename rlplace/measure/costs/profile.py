"""`profile_costs` and `profile_links`: what ops and copies take on this machine, from real steps and real copies."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link
from rlplace.measure.plan import Plan
from rlplace.measure.run.channels import make_channel
from rlplace.measure.run.placed_step import PlacedStep
from rlplace.measure.run.residents import Residents
from rlplace.measure.run.streams import torch_device
from rlplace.measure.run.threads import keep_freed_memory
from rlplace.measure.run.workers import Crew

SIZES_BYTES = (4096, 256 << 10, 4 << 20)


def profile_costs(
    graph: OpGraph,
    host: Host,
    *,
    num_steps: int = 12,
    warmup: int = 3,
    on_progress: Callable[[str], None] | None = None,
) -> Costs:
    """Seconds of every op on every device, traced in place from real steps with everything on one device.

    An op's figure is its median over the steps; ops of one signature share the mean of theirs, which keeps their total.
    Devices of one kind share figures.

    Args:
        graph: with its program.
        host: of this machine.
        num_steps: traced steps on each kind of device.
        warmup: steps before them.
        on_progress: told what is being profiled.
    """
    keep_freed_memory()
    crew = Crew(host.devices)
    residents = Residents(graph, host)
    op_time_s = np.zeros((graph.num_ops, host.num_devices))
    by_kind: dict[str, NDArray[np.float64]] = {}
    try:
        for device, described in enumerate(host.devices):
            if described.kind not in by_kind:
                if on_progress is not None:
                    on_progress(f"profiling {graph.num_ops} ops on {described.name} ({described.kind})")
                residents.reset()
                traced = _trace_device(graph, host, device, residents, crew, num_steps=num_steps, warmup=warmup)
                by_kind[described.kind] = share_by_signature(graph.signatures, traced)
            op_time_s[:, device] = by_kind[described.kind]
    finally:
        crew.stop()
    return Costs(op_time_s, "profiled")


def share_by_signature(signatures: tuple[str, ...], samples_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) seconds from (S, N) samples: the median over steps, then the mean over the ops of a signature.

    >>> share_by_signature(("a", "a", "b"), np.array([[1.0, 3.0, 5.0], [1.0, 3.0, 9.0], [1.0, 3.0, 6.0]])).tolist()
    [2.0, 2.0, 6.0]
    """
    own = np.median(samples_s, axis=0)
    members: dict[str, list[int]] = defaultdict(list)
    for op, name in enumerate(signatures):
        members[name].append(op)
    shared = np.empty_like(own)
    for ops in members.values():
        shared[ops] = np.mean(own[ops])
    return shared


def single_device_plan(graph: OpGraph, device: int) -> Plan:
    """Everything on one device, in index order."""
    n = graph.num_ops
    none = np.zeros(0, dtype=np.int32)
    return Plan(np.full(n, device, dtype=np.int32), none, none, np.arange(n, dtype=np.int32))


def _trace_device(
    graph: OpGraph, host: Host, device: int, residents: Residents, crew: Crew, *, num_steps: int, warmup: int
) -> NDArray[np.float64]:
    """(S, N) seconds of every op; on a GPU between events on its compute stream."""
    plan = single_device_plan(graph, device)
    step = PlacedStep(graph, host, plan, residents, crew, is_traced=True)
    samples = np.zeros((num_steps, graph.num_ops))
    for k in range(warmup + num_steps):
        step.run(k)
        timeline = step.timeline()
        if k >= warmup:
            order = np.flatnonzero(timeline.op_end_s > 0)
            starts, ends = timeline.op_start_s[order], timeline.op_end_s[order]
            if host.devices[device].backend == "cpu":
                # from the end of the op before: what the interpreter does between them is part of a step on a core
                starts[1:] = ends[:-1]
            samples[k - warmup, order] = ends - starts
    return samples


def profile_links(host: Host, *, repeats: int = 15) -> Host:
    """The host with latency and bandwidth of every link as real transfers between its devices' threads take them.

    A tensor is passed back and forth through the runner's own channels; half a round trip is one transfer, waking the
    other thread included. A line through the medians of three sizes gives latency and bandwidth. Routes between cores
    of the same two kinds share figures, and so do those between parts of the same GPUs; a link that routes with other
    figures share has the best of them, so that each is held up by its own link.
    """
    keep_freed_memory()
    devices = {device.name: device for device in host.devices}
    routes = {(route.source, route.destination): route for route in host.routes}
    measured: dict[frozenset[str], tuple[float, float]] = {}
    figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for route in host.routes:
        if not route.links or not routes[route.destination, route.source].links:
            continue
        source, destination = devices[route.source], devices[route.destination]
        pair = frozenset((_place(source), _place(destination)))
        if pair not in measured:
            measured[pair] = _line([_transfer_s(size, source, destination, repeats) for size in SIZES_BYTES])
        for link in route.links:
            figures[link].append(measured[pair])
    links = tuple(_best(link, figures[link.name]) for link in host.links)
    return dataclasses.replace(host, links=links)


def _place(device: Device) -> str:
    """What transfers to and from a device are told apart by: each GPU, and the kinds of cores."""
    return str(torch_device(device)) if device.backend == "cuda" else device.kind


def _best(link: Link, figures: list[tuple[float, float]]) -> Link:
    if not figures:
        return link
    latencies_s, bandwidths_bytes_per_s = zip(*figures, strict=True)
    return Link(link.name, max(bandwidths_bytes_per_s), min(latencies_s))


def _line(seconds: list[float]) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) from the times of `SIZES_BYTES`: the largest two give the slope."""
    per_byte = max(seconds[-1] - seconds[-2], 1e-9) / (SIZES_BYTES[-1] - SIZES_BYTES[-2])
    return max(seconds[0] - SIZES_BYTES[0] * per_byte, 0.0), 1.0 / per_byte


def _transfer_s(size: int, source: Device, destination: Device, repeats: int) -> float:
    """Median seconds of one transfer of `size` bytes."""
    crew = Crew((source, destination))
    there = make_channel(source, destination, crew.streams.copies(source, destination))
    back = make_channel(destination, source, crew.streams.copies(destination, source))
    place = torch_device(source)
    with cuda.settled(place):
        original = torch.ones(size, dtype=torch.uint8, device=place)
    samples: list[float] = []

    def throw(_: int) -> None:
        for _ in range(repeats + 3):
            begin = time.perf_counter()
            there.send(original)
            back.wait_ready()
            back.take()
            if place.type == "cuda":
                cuda.await_stream(cuda.current_stream(place))
            samples.append((time.perf_counter() - begin) / 2)

    def catch(_: int) -> None:
        for _ in range(repeats + 3):
            there.wait_ready()
            back.send(there.take())

    def give_up() -> None:
        there.abort()
        back.abort()

    try:
        crew.run([throw, catch], 0, on_error=give_up, deadline_s=600.0)
    finally:
        crew.stop()
    return float(np.median(samples[3:]))
