"""`profile_links`: what copies between devices take on this machine, from real copies."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from itertools import combinations

import numpy as np
import torch

from rlplace import cuda
from rlplace.measure.hosts.host import Device, Host, Link
from rlplace.measure.placed.channels import make_channel, torch_device
from rlplace.measure.placed.workers import Crew
from rlplace.measure.run.threads import keep_freed_memory

SIZES_BYTES = (4096, 256 << 10, 4 << 20)
"""Between cores."""
GPU_SIZES_BYTES = (4096, 1 << 20, 16 << 20, 64 << 20)
"""Where one is a GPU: its links have much latency for their bandwidth."""
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e6, 2e12
"""No link of a machine is slower or faster."""


def profile_links(host: Host, *, repeats: int = 15) -> Host:
    """The host with latency and bandwidth of every link as real transfers between its devices' threads take them.

    Tensors are passed there and back through the runner's own channels, waking the other threads included. Between
    cores the same tensor comes back, as in a step fresh from the other's cache: half a round trip is one transfer, and
    pairs of the same two kinds share figures. Where one is a GPU each ordered pair is measured, parts of one GPU for
    each other: the answer is a small tensor, and half the time of two small ones is the answer's.

    A route is as slow as its slowest link, so a link that several routes share has the best that any of them showed:
    the most bandwidth, the least latency. Where that says more of a pair than it showed, the pair needs a link of its
    own beside the shared ones (`Host.fingerprint` names links, so it is the host that must have it, from the start).
    """
    keep_freed_memory()
    devices = {device.name: device for device in host.devices}
    routes = {(route.source, route.destination): route for route in host.routes}
    measured: dict[object, tuple[float, float]] = {}
    figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for route in host.routes:
        if not route.links or not routes[route.destination, route.source].links:
            continue
        source, destination = devices[route.source], devices[route.destination]
        pair = _alike(source, destination)
        if pair not in measured:
            measured[pair] = _measure(source, destination, repeats)
        for link in route.links:
            figures[link].append(measured[pair])
    return dataclasses.replace(host, links=tuple(_best(link, figures[link.name]) for link in host.links))


def _best(link: Link, figures: list[tuple[float, float]]) -> Link:
    if not figures:
        return link
    latencies_s, bandwidths_bytes_per_s = zip(*figures, strict=True)
    return Link(link.name, max(bandwidths_bytes_per_s), min(latencies_s))


def _alike(source: Device, destination: Device) -> object:
    """Equal for pairs that share figures: GPUs differ by what is between them, cores by their kind."""
    ends = [str(torch_device(each)) if each.backend == "cuda" else each.kind for each in (source, destination)]
    return tuple(ends) if "cuda" in (source.backend, destination.backend) else frozenset(ends)


def _measure(source: Device, destination: Device, repeats: int) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of transfers from `source` to `destination`."""
    if "cuda" not in (source.backend, destination.backend):
        return line(SIZES_BYTES, [_round_s(size, size, source, destination, repeats) / 2 for size in SIZES_BYTES])
    small = GPU_SIZES_BYTES[0]
    rounds_s = [_round_s(size, small, source, destination, repeats) for size in GPU_SIZES_BYTES]
    return line(GPU_SIZES_BYTES, [seconds - rounds_s[0] / 2 for seconds in rounds_s])


def line(sizes_bytes: tuple[int, ...], seconds: list[float]) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of a line through times of transfers: the median of all slopes (Theil-Sen).

    Where that is no bandwidth of a machine, as noise is all that the times show, it is the largest size over its whole
    time, or the nearest that is one.

    >>> [float(f"{figure:.3g}") for figure in line((1000, 2000, 4000), [2e-6, 3e-6, 5e-6])]
    [1e-06, 1000000000.0]
    """
    points = list(zip(sizes_bytes, seconds, strict=True))
    per_byte = float(np.median([(t - s) / (m - n) for (n, s), (m, t) in combinations(points, 2)]))
    if not 1 / MOST_BYTES_PER_S <= per_byte <= 1 / LEAST_BYTES_PER_S:
        per_byte = float(np.clip(seconds[-1] / sizes_bytes[-1], 1 / MOST_BYTES_PER_S, 1 / LEAST_BYTES_PER_S))
    return max(seconds[0] - sizes_bytes[0] * per_byte, 0.0), 1.0 / per_byte


def _round_s(size: int, answer_size: int, source: Device, destination: Device, repeats: int) -> float:
    """Median seconds of a transfer of `size` bytes and one of `answer_size` bytes back: of the same, if as large."""
    crew = Crew((source, destination))
    there = make_channel(source, destination, crew.streams.copies(source, destination))
    back = make_channel(destination, source, crew.streams.copies(destination, source))
    place, answering = torch_device(source), torch_device(destination)
    with cuda.settled(place):
        original = torch.ones(size, dtype=torch.uint8, device=place)
    with cuda.settled(answering):
        answer = torch.ones(answer_size, dtype=torch.uint8, device=answering)
    samples: list[float] = []

    def throw(_: int) -> None:
        for _ in range(repeats + 3):
            begin = time.perf_counter()
            there.send(original)
            back.wait_ready()
            back.take()
            back.wait_arrived()
            if place.type == "cuda":
                cuda.await_stream(cuda.current_stream(place))
            samples.append(time.perf_counter() - begin)

    def catch(_: int) -> None:
        for _ in range(repeats + 3):
            there.wait_ready()
            taken = there.take()
            there.wait_arrived()  # on a GPU the answer is sent after it: both on one stream
            back.send(taken if answer_size == size else answer)

    def give_up() -> None:
        there.abort()
        back.abort()

    try:
        crew.run([throw, catch], 0, on_error=give_up, deadline_s=600.0)
    finally:
        crew.stop()
    return float(np.median(samples[3:]))
