"""Link figures between machines: `measured_links` has ranks of torchrun pass tensors as steps do.

Ranks of one machine that share its memory pass them through slots, all others by wires.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.measure.execute.distributed import Wire, Wires, connect
from rlplace.measure.hosts.detect import nodes_host
from rlplace.measure.hosts.fresh_ranks import LOST_AFTER_S, FreshRanks
from rlplace.measure.hosts.host import Device
from rlplace.measure.hosts.nodes import Nodes, join
from rlplace.measure.timing.threads import keep_freed_memory, pin_current_thread

NET_SIZES_BYTES = (4096, 256 << 10, 4 << 20)
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e6, 2e12
"""No link of a machine is slower or faster."""
ENOUGH_S, LONGEST_S = 0.5, 1.0
"""Tensors of one size are passed for about so long; a size that takes longer once is left out."""
LEAST_ROUNDS, MOST_ROUNDS, WARMUP = 3, 100, 2
IS_DUPLEX = 0.75
"""Share of the bandwidth that is left where both directions are used at once, from which on it counts as undivided."""
WITHIN_S = 600.0
_LOST_AFTER = timedelta(seconds=LOST_AFTER_S)
"""A message that takes longer is lost: `LONGEST_S` says how long one takes."""


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


class Figures(NamedTuple):
    """Of transfers from one machine to another."""

    latency_s: float
    bandwidth_bytes_per_s: float
    """Of one direction, while the other is idle."""
    both_bytes_per_s: float
    """Of one direction, while the other is used as well."""

    @property
    def as_link(self) -> tuple[float, float]:
        """Latency and bandwidth of a link; of a medium that both directions share, each has what is left for it.

        >>> Figures(1e-4, 100e6, 98e6).as_link, Figures(1e-4, 100e6, 50e6).as_link
        ((0.0001, 100000000.0), (0.0001, 50000000.0))
        """
        is_duplex = self.both_bytes_per_s >= IS_DUPLEX * self.bandwidth_bytes_per_s
        return self.latency_s, self.bandwidth_bytes_per_s if is_duplex else self.both_bytes_per_s


def measured_links(nodes: Nodes, *, has_slots: bool = True) -> dict[tuple[str, str], Figures]:
    """By source and destination, figures of each two machines, and of ranks within one; called by rank 0.

    Args:
        nodes: of rank 0.
        has_slots: whether cores of one machine share its memory; else tensors between them go by wires.

    Raises:
        RunnerError: a rank failed.
    """
    with contextlib.closing(FreshRanks(nodes, "links", {"has_slots": has_slots})) as ranks:
        rows = ranks.answer(WITHIN_S)
    return {(source, destination): Figures(*each) for source, destination, *each in rows}


def main(answers: TextIO, by_slots: Callable[[Device, Device], tuple[float, float]] | None) -> None:
    """One rank's part; rank 0 answers with the figures of all.

    Args:
        answers: where they are written.
        by_slots: latency and bandwidth between two devices that share a memory, as this process measures them; None
            where they go by wires.

    Raises:
        RunnerError: two ranks cannot reach each other.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    nodes = join()
    pin_current_thread(nodes.facts[nodes.rank].cores)
    host, own = nodes_host(nodes.facts), list[tuple[Any, ...]]()
    where, machines = "all machines", [each.machine for each in nodes.facts]
    try:
        options: dict[str, Any] = {
            "interface": nodes.interface,
            "is_sparse": by_slots is not None,
            "within": _LOST_AFTER,
        }
        wires = connect(host, nodes.rank, nodes.store, **options)
        for a, b in measured_pairs(nodes):
            where = f"{machines[a]!r} and {machines[b]!r}"
            if by_slots is not None and host.shares_memory[a, b]:
                if nodes.rank == a:
                    latency_s, bandwidth = by_slots(host.devices[a], host.devices[b])
                    own.append((machines[a], machines[b], latency_s, bandwidth, bandwidth))
            elif nodes.rank in (a, b):
                nodes.store.set(f"pair {a} {b}/{nodes.rank}", "1")
                nodes.store.get(f"pair {a} {b}/{a + b - nodes.rank}")  # it may be at work with a third one
                found = _measure(nodes.rank, (a, b), wires)
                own += ((machines[source], machines[to], *figures) for (source, to), figures in found.items())
    except (RuntimeError, TimeoutError) as error:
        first = str(error).strip().partition("\n")[0].rpartition("] ")[2]  # behind a file of PyTorch's
        raise RunnerError(f"tensors do not pass between {where} ({LOST_AFTER_S:g} s are allowed): {first}") from error
    rows = nodes.gather("figures", own)
    if nodes.rank == 0:
        print(json.dumps([row for each in rows for row in each]), file=answers, flush=True)
    nodes.gather("done", 1)  # a rank whose groups are gone would break the others' connections


def measured_pairs(nodes: Nodes) -> list[tuple[int, int]]:
    """Ranks that stand for all others: the first of each two machines, the first two of a machine."""
    ranks = [nodes.ranks_of(machine) for machine in nodes.machines]
    within = [(each[0], each[1]) for each in ranks if len(each) > 1]
    return [(a[0], b[0]) for a, b in combinations(ranks, 2)] + within


def _measure(rank: int, pair: tuple[int, int], wires: Wires) -> dict[tuple[int, int], Figures]:
    """What the first rank of the pair found; the other one answers, and finds nothing."""
    a, b = pair
    if rank == b:
        _answer(_Ends(wires[b, a], wires[a, b]))
        return {}
    ends = _Ends(wires[a, b], wires[b, a])
    there, back, both = (dict(_rounds(ends, mode)) for mode in (_THERE, _BACK, _BOTH))
    ends.tell(0, 0, 0)
    small_s = min(there[NET_SIZES_BYTES[0]], back[NET_SIZES_BYTES[0]]) / 2  # of one small message, undisturbed
    shared = line(tuple(both), list(both.values()))[1]
    found = {}
    for way, rounds in ((pair, there), ((b, a), back)):
        seconds = [small_s, *(each - small_s for each in list(rounds.values())[1:])]
        latency_s, bandwidth = line(tuple(rounds), seconds)
        found[way] = Figures(latency_s, bandwidth, min(shared, bandwidth))
    return found


_THERE, _BACK, _BOTH = range(3)


@dataclass(frozen=True)
class _Ends:
    """Both wires of a pair of ranks, at one end."""

    out: Wire
    back: Wire

    def tell(self, size: int, mode: int, count: int) -> None:
        self.exchange(torch.tensor([size, mode, count], device=self.out.place).view(torch.uint8), None)

    def hear(self) -> list[int]:
        told = torch.zeros(3, dtype=torch.int64, device=self.back.place)
        self.exchange(None, told.view(torch.uint8))
        return [int(each) for each in told.tolist()]

    def exchange(self, sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
        """Sends one tensor, and receives the other; returns when this end has done both."""
        under_way: list[tuple[Wire, Any]] = []
        if received is not None:
            with self.back.using():
                under_way.append((self.back, self.back.receive(received)))
        if sent is not None:
            with self.out.using():
                under_way.append((self.out, self.out.send(sent)))
        for wire, work in under_way:
            if wire.stream is None:
                work.wait(_LOST_AFTER)
            until_s = time.monotonic() + _LOST_AFTER.total_seconds()
            while wire.stream is not None and not cuda.is_done(wire.stream):
                if time.monotonic() > until_s:
                    raise TimeoutError("no answer")


def _turns(ends: _Ends, size: int, mode: int, *, asks: bool) -> Iterator[None]:
    """One round after the other, as the rank that asks has them, or the other one."""
    small = NET_SIZES_BYTES[0]
    out, back = (size if mode != _BACK else small), (size if mode != _THERE else small)
    if not asks:
        out, back = back, out
    sent, received = (torch.ones(each, dtype=torch.uint8, device=ends.out.place) for each in (out, back))
    while True:
        if mode == _BOTH:
            ends.exchange(sent, received)
        elif asks:
            ends.exchange(sent, None)
            ends.exchange(None, received)
        else:
            ends.exchange(None, received)
            ends.exchange(sent, None)
        yield


def _rounds(ends: _Ends, mode: int) -> Iterator[tuple[int, float]]:
    """By size, the median seconds of a round."""
    expected_s = 0.0
    for index, size in enumerate(NET_SIZES_BYTES):
        if index > 1 and expected_s > LONGEST_S:
            return
        count = int(np.clip(ENOUGH_S / max(expected_s, 1e-9), LEAST_ROUNDS, MOST_ROUNDS)) + WARMUP
        ends.tell(size, mode, count)
        turns, samples = _turns(ends, size, mode, asks=True), []
        for _ in range(count):
            begin = time.perf_counter()
            next(turns)
            samples.append(time.perf_counter() - begin)
        seconds = float(np.median(samples[WARMUP:]))
        yield size, seconds
        if index + 1 < len(NET_SIZES_BYTES):
            expected_s = seconds * NET_SIZES_BYTES[index + 1] / size


def _answer(ends: _Ends) -> None:
    while (told := ends.hear())[2]:
        size, mode, count = told
        turns = _turns(ends, size, mode, asks=False)
        for _ in range(count):
            next(turns)
