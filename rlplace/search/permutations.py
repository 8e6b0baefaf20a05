"""The same placement with its devices relabelled: `permuted` looks for the best way, `permutations_of` draws some."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import Problem

_TRIES = 20
"""Relabellings drawn for each one that is wanted, before there are taken to be no more."""


def permuted(
    problem: Problem, devices_N: NDArray[np.int32], step_s: float, timer: StepTimer, *, most: int
) -> tuple[NDArray[np.int32], float]:
    """`devices_N` relabelled among devices of the same kind so that it takes the least time, and that time.

    A descent: two devices are swapped after each other, every swap that helps is kept, until none does. It draws
    nothing. A swap that pins or exclusions forbid, or that changes nothing, is not timed.

    Args:
        problem: whose devices are relabelled.
        devices_N: (N,) devices of ops.
        step_s: its step time by `timer`, in seconds; infinite where it does not fit into memory.
        timer: times a placement.
        most: placements timed at most.
    """
    best, best_s = np.array(devices_N, dtype=np.int32), step_s
    swaps = [pair for devices in _of_a_kind(problem) for pair in combinations(devices, 2)]
    timed, tried = {best.tobytes()}, 0
    while tried < len(swaps) and len(timed) <= most:
        one, other = swap = swaps.pop(0)
        swaps.append(swap)
        tried += 1
        mapping = np.arange(problem.host.num_devices, dtype=np.int32)
        mapping[[one, other]] = other, one
        swapped = mapping[best]
        if swapped.tobytes() in timed or not _is_allowed(problem, swapped):
            continue
        timed.add(swapped.tobytes())
        swapped_s = float(timer.step_times(swapped[None])[0])
        if swapped_s < best_s:
            best, best_s, tried = swapped, swapped_s, 0
    return best, best_s


def permutations_of(
    problem: Problem, devices_N: NDArray[np.int32], generator: np.random.Generator, count: int
) -> NDArray[np.int32]:
    """(<= count, N) int32: `devices_N` relabelled at random among devices of the same kind, distinct, all allowed.

    Fewer than `count` where there are hardly more; `devices_N` itself is none of them.

    Args:
        problem: whose devices are relabelled.
        devices_N: (N,) devices of ops.
        generator: of the draws.
        count: how many are wanted.
    """
    devices = np.asarray(devices_N, dtype=np.int32)
    drawn: dict[bytes, NDArray[np.int32]] = {devices.tobytes(): devices}
    kinds = _of_a_kind(problem)
    for _ in range(_TRIES * count if kinds else 0):
        if len(drawn) > count:
            break
        mapping = np.arange(problem.host.num_devices, dtype=np.int32)
        for members in kinds:
            mapping[members] = generator.permutation(members)
        relabelled = mapping[devices]
        if _is_allowed(problem, relabelled):
            drawn.setdefault(relabelled.tobytes(), relabelled)
    return np.array(list(drawn.values())[1:], dtype=np.int32).reshape(-1, len(devices))


def _of_a_kind(problem: Problem) -> list[list[int]]:
    """Devices by kind, in order; kinds of which there are two at least."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(problem.host.devices):
        kinds[device.kind].append(index)
    return [devices for devices in kinds.values() if len(devices) > 1]


def _is_allowed(problem: Problem, devices: NDArray[np.int32]) -> bool:
    """Whether pins and exclusions let every op be where it is; relabelling breaks no co-location class."""
    return problem.allowed is None or bool(problem.allowed[np.arange(len(devices)), devices].all())
