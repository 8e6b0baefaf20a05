"""`solve_milp`: max-load as an integer program (Tarnawski et al. 2020, section 5.2), solved by HiGHS through SciPy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, coo_array, diags_array, hstack, kron

from rlplace.partitioning.objectives import UnitGraph

MOST_ENTRIES = 60_000
"""Matrix entries that a program may have; HiGHS finds nothing in a minute beyond."""


def num_entries(units: UnitGraph) -> int:
    """Entries of the matrix of the program, about."""
    return units.num_devices * (4 * units.num_units + 8 * len(units.net_sinks))


@dataclass(frozen=True, eq=False)
class IntegerSplit:
    """The result of the solver.

    Attributes:
        devices: (U,) int32; None where it found nothing in its time.
        bound_ms: no placement has a smaller max-load.
        is_optimal: whether `devices` was proved to be the best.
    """

    devices: NDArray[np.int32] | None
    bound_ms: float
    is_optimal: bool


def solve_milp(units: UnitGraph, seconds: float) -> IntegerSplit:
    """The best placement of units that HiGHS finds, and the bound that it proves.

    Variables: `x[u, d]`, 1 where unit u is on device d; `out[m, d]` and `into[m, d]`, 1 where accelerator d pays for
    net m as its source's or as a sink's; `T`, the max-load. `out[m, d] >= x[source, d] - x[sink, d]` and
    `into[m, d] >= x[sink, d] - x[source, d]` for each sink; every load is at most T; memory is at most the capacity.

    Args:
        units: the problem to place.
        seconds: wall time for the solver.
    """
    count, devices, accelerators = units.num_units, units.num_devices, units.num_accelerators
    nets, pins = len(units.net_ms), len(units.net_sinks)
    net_of_pin = np.repeat(np.arange(nets), np.diff(units.net_offsets))

    def pin_table(column: NDArray[np.integer], width: int) -> coo_array:
        """(S, width) with a 1 in each pin's column."""
        return coo_array((np.ones(pins), (np.arange(pins), column)), shape=(pins, width))

    # columns: x[u, d], out[m, d], into[m, d], T; rows: each unit once, what pins pay, loads, memory
    on_accelerator = np.eye(accelerators, devices)
    apart = kron(pin_table(units.net_sinks, count) - pin_table(units.net_source[net_of_pin], count), on_accelerator)
    pays = kron(pin_table(net_of_pin, nets), np.eye(accelerators))
    work = np.repeat(units.accelerator_ms[:, None], devices, axis=1)
    work[:, accelerators:] = units.cpu_ms[:, None]
    cost = kron(units.net_ms[None], on_accelerator.T)
    scale = max(units.capacity_bytes, 1.0)
    table = block_array(
        [
            [kron(diags_array(np.ones(count)), np.ones((1, devices))), None, None, None],
            [apart, pays, None, None],
            [-apart, None, pays, None],
            [hstack([diags_array(row) for row in work]), cost, cost, np.full((devices, 1), -1.0)],
            [kron(units.size_bytes[None] / scale, on_accelerator), None, None, None],
        ],
        format="csr",
    )
    least = np.repeat([1.0, 0.0, -np.inf], [count, 2 * pins * accelerators, devices + accelerators])
    most = np.repeat(
        [1.0, np.inf, 0.0, units.capacity_bytes / scale], [count, 2 * pins * accelerators, devices, accelerators]
    )
    width, num_x = table.shape[1], count * devices
    upper = np.append(np.ones(width - 1), np.inf)
    upper[:num_x].reshape(count, devices)[~units.supported, :accelerators] = 0.0
    answer = milp(
        np.append(np.zeros(width - 1), 1.0),
        integrality=np.arange(width) < num_x,
        bounds=Bounds(np.zeros(width), upper),
        constraints=LinearConstraint(table, least, most),
        options={"disp": False, "time_limit": max(seconds, 0.1)},
    )
    bound = getattr(answer, "mip_dual_bound", None)
    bound_ms = max(float(bound), 0.0) if bound is not None and math.isfinite(bound) else 0.0
    if answer.x is None:
        return IntegerSplit(None, bound_ms, False)
    chosen = np.argmax(answer.x[:num_x].reshape(count, devices), axis=1)
    return IntegerSplit(chosen.astype(np.int32), bound_ms, answer.status == 0)
