"""`milp`: max-load as an integer program (Tarnawski et al. 2020, section 5.2), solved by HiGHS through SciPy."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rlplace.partitioning.problem import UnitGraph

MOST_ENTRIES = 60_000
"""Matrix entries that a program may have; HiGHS finds nothing in a minute beyond."""
MOST_NODES = 50
"""Nodes of the tree where evaluations are the budget: they take seconds each in the larger programs."""


@dataclass(frozen=True, eq=False)
class IntegerSplit:
    """What the solver found.

    Attributes:
        devices: (U,) int32; None where it found nothing in its time.
        bound_ms: no placement has a smaller max-load.
        is_optimal: whether `devices` was proved to be the best.
    """

    devices: NDArray[np.int32] | None
    bound_ms: float
    is_optimal: bool


def count_entries(units: UnitGraph) -> int:
    """Matrix entries of the program, to tell whether it is worth starting."""
    count = units.record.num_devices
    return count * (4 * units.num_units + 8 * len(units.net_sinks))


def solve_milp(units: UnitGraph, *, seconds: float = math.inf, nodes: int | None = None) -> IntegerSplit:
    """The best placement of units that HiGHS finds, and the bound that it proves.

    Variables: `x[u, d]`, 1 where unit u is on device d; `out[m, d]` and `into[m, d]`, 1 where accelerator d pays for
    net m as its source's or as a sink's; `T`, the max-load. `out[m, d] >= x[source, d] - x[sink, d]` and
    `into[m, d] >= x[sink, d] - x[source, d]` for each sink; every load is at most T; memory is at most the capacity.

    Args:
        units: what is placed.
        seconds: wall time for the solver.
        nodes: of the branch-and-bound tree; the same number gives the same result.
    """
    record = units.record
    count, devices, accelerators = units.num_units, record.num_devices, record.num_accelerators
    nets, pins = len(units.net_ms), len(units.net_sinks)
    x = np.arange(count * devices).reshape(count, devices)
    out = count * devices + np.arange(nets * accelerators).reshape(nets, accelerators)
    into = out + nets * accelerators
    largest = count * devices + 2 * nets * accelerators
    rows: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    low: list[NDArray[np.float64]] = []
    high: list[NDArray[np.float64]] = []
    height = 0

    def add(
        entries: list[tuple[NDArray[np.int64], NDArray[np.int64], float | NDArray[np.float64]]],
        size: int,
        at_least: float,
        at_most: float,
    ) -> None:
        nonlocal height
        for row, column, value in entries:
            rows.append(height + row.ravel())
            columns.append(column.ravel())
            values.append(np.broadcast_to(np.asarray(value, dtype=np.float64), row.shape).ravel())
        low.append(np.full(size, at_least))
        high.append(np.full(size, at_most))
        height += size

    each = np.repeat(np.arange(count)[:, None], devices, axis=1)
    add([(each, x, 1.0)], count, 1.0, 1.0)
    pin_net = np.repeat(np.arange(nets), np.diff(units.net_offsets))
    pin = np.arange(pins * accelerators).reshape(pins, accelerators)
    at_source, at_sink = x[units.net_source[pin_net]][:, :accelerators], x[units.net_sinks][:, :accelerators]
    add([(pin, out[pin_net], 1.0), (pin, at_source, -1.0), (pin, at_sink, 1.0)], pin.size, 0.0, np.inf)
    add([(pin, into[pin_net], 1.0), (pin, at_sink, -1.0), (pin, at_source, 1.0)], pin.size, 0.0, np.inf)
    at = np.repeat(np.arange(devices)[None], count, axis=0)
    work = np.repeat(units.accelerator_ms[:, None], devices, axis=1)
    work[:, accelerators:] = units.cpu_ms[:, None]
    paid = np.repeat(np.arange(accelerators)[None], nets, axis=0)
    cost = np.repeat(units.net_ms[:, None], accelerators, axis=1)
    device = np.arange(devices)
    add(
        [(at, x, work), (paid, out, cost), (paid, into, cost), (device, np.full(devices, largest), -1.0)],
        devices,
        -np.inf,
        0.0,
    )
    held, size = at[:, :accelerators], np.repeat(units.size_bytes[:, None], accelerators, axis=1)
    scale = max(record.capacity_bytes, 1.0)
    add([(held, x[:, :accelerators], size / scale)], accelerators, -np.inf, record.capacity_bytes / scale)

    upper = np.ones(largest + 1)
    upper[x[~units.supported][:, :accelerators].ravel()] = 0.0
    upper[largest] = np.inf
    whole = np.zeros(largest + 1)
    whole[: count * devices] = 1
    objective = np.zeros(largest + 1)
    objective[largest] = 1.0
    table = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(height, largest + 1)
    ).tocsr()
    options: dict[str, float | int | bool] = {"disp": False}
    if math.isfinite(seconds):
        options["time_limit"] = max(seconds, 0.1)
    if nodes is not None:
        options["node_limit"] = nodes
    with _mute_solver():
        answer = milp(
            objective,
            integrality=whole,
            bounds=Bounds(np.zeros(largest + 1), upper),
            constraints=LinearConstraint(table, np.concatenate(low), np.concatenate(high)),
            options=options,
        )
    bound = getattr(answer, "mip_dual_bound", None)
    bound_ms = float(bound) if bound is not None and math.isfinite(bound) else 0.0
    if answer.x is None:
        return IntegerSplit(None, max(bound_ms, 0.0), False)
    chosen = np.argmax(answer.x[x], axis=1).astype(np.int32)
    return IntegerSplit(chosen, max(bound_ms, 0.0), answer.status == 0)


@contextmanager
def _mute_solver() -> Iterator[None]:
    """Nothing that the solver's C++ prints reaches standard output, which may carry our JSON.

    HiGHS has a stray message that no option turns off; it goes through C's own buffer to descriptor 1.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        _flush_c()
        os.dup2(nowhere, 1)
        yield
    finally:
        _flush_c()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _flush_c() -> None:
    with suppress(OSError, AttributeError, TypeError):  # no C library by that name, as on Windows
        ctypes.CDLL(None).fflush(None)
