"""`op_type_factors`: what measured op times say of op types on devices that nobody has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import estimate_costs
from rlplace.measure.hosts.host import Device, Host

ENDLESS = 1e30
"""FLOP/s or bytes/s of a device that never waits for them."""
LEAST_S = 1e-9
"""Shorter op times than this say nothing."""


def op_type_factors(graph: OpGraph, measured_s: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """(N,) factors on a roofline's estimate of each op, from measured times on other kinds of devices.

    A roofline is fitted to each kind: its FLOP/s, bytes/s and least time of an op, with the efficiencies of
    `estimate_costs`. What an op type takes over that is partly its own (its formula counts too few bytes) and partly
    the kind's. Taking both for normal with equal variances, the best guess for another kind from K of them is the sum
    of the K logarithms over K + 1. An op of a type that was never measured has the factor 1.

    Args:
        graph: N ops.
        measured_s: (N,) seconds for each kind.
    """
    types, type_of = np.unique(np.asarray(graph.targets, dtype=str), return_inverse=True)
    flops_s, bytes_s = _unit_times(graph, is_compute=True), _unit_times(graph, is_compute=False)
    total = np.zeros(len(types))
    for seconds in measured_s:
        took = (seconds > LEAST_S) & ~graph.is_source
        if not took.any():
            continue
        said_s = _fitted(flops_s[took], bytes_s[took], seconds[took])
        weight = np.bincount(type_of[took], weights=seconds[took], minlength=len(types))
        missed = np.bincount(
            type_of[took], weights=seconds[took] * np.log(seconds[took] / said_s), minlength=len(types)
        )
        total += missed / np.maximum(weight, LEAST_S)
    factors: NDArray[np.float64] = np.exp(total / (len(measured_s) + 1))[type_of]
    return factors


def _unit_times(graph: OpGraph, *, is_compute: bool) -> NDArray[np.float64]:
    """(N,) seconds at 1 FLOP/s, or at 1 byte/s, with everything else free."""
    peaks = {"float32": 1.0 if is_compute else ENDLESS}
    bandwidth = ENDLESS if is_compute else 1.0
    device = Device("unit", "unit", "simulated", 1, peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=bandwidth)
    seconds: NDArray[np.float64] = estimate_costs(graph, Host("unit", (device,))).op_time_s[:, 0]
    return seconds


def _fitted(
    flops_s: NDArray[np.float64], bytes_s: NDArray[np.float64], measured_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(M,) seconds of the roofline that explains measured times best: least mean |log ratio|, weighted by time."""
    from scipy.optimize import minimize

    whole_s = float(measured_s.sum())
    weight = measured_s / whole_s
    start = np.log(
        [
            max(float(flops_s.sum()), LEAST_S) / whole_s,
            max(float(bytes_s.sum()), LEAST_S) / whole_s,
            max(float(np.quantile(measured_s, 0.1)), LEAST_S),
        ]
    )

    def said_s(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        rate, bandwidth, least_s = (math.exp(min(max(value, -60.0), 60.0)) for value in logs.tolist())
        roofline: NDArray[np.float64] = np.maximum(np.maximum(flops_s / rate, bytes_s / bandwidth), least_s)
        return roofline

    def loss(logs: NDArray[np.float64]) -> float:
        return float(weight @ np.abs(np.log(measured_s / said_s(logs))))

    found = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 300, "xatol": 1e-3, "fatol": 1e-6})
    return said_s(found.x)
