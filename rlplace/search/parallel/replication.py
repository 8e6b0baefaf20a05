"""Stages with different numbers of replicas, as PipeDream's and DAPPLE's planners choose them."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from rlplace.search.parallel.layouts import Chain
from rlplace.search.parallel.stage_plans import StagePlan
from rlplace.search.parallel.stages import thinnest_cuts

MOST_STAGES = 8
PLACES = 48
"""Places where a chain may be cut between stages."""


def replicated_plans(chain: Chain, line: list[int], s_per_byte: float) -> list[StagePlan]:
    """Plans of 2 to `MOST_STAGES` stages that minimise the time of the slowest stage.

    By dynamic programming over the last stage's first layer and devices (Narayanan et al. 2019, section 3.1): a stage
    takes its work over its devices; what it sends over its ends counts fully or not at all, and so do the gradients and
    parameters that its replicas exchange (Fan et al. 2021, section 4).

    Args:
        chain: of the problem.
        line: devices in the order in which stages take them.
        s_per_byte: of what replicas exchange.
    """
    found: dict[StagePlan, None] = {}
    for sending, exchanging in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        for cuts, replicas in _plans(chain, len(line), sending, exchanging * s_per_byte):
            first = np.cumsum([0, *replicas]).tolist()
            teams = tuple(tuple(line[a:b]) for a, b in itertools.pairwise(first))
            found[StagePlan(tuple(cuts[:-1]), teams)] = None
    return list(found)


def _plans(chain: Chain, num_devices: int, sending: float, s_per_byte: float) -> list[tuple[list[int], list[int]]]:
    """For each number of stages: where each ends, and how many replicas it has."""
    before = np.concatenate(([0.0], np.cumsum(chain.work_s)))
    held = np.concatenate(([0.0], np.cumsum(chain.fixed_bytes)))
    cuts = thinnest_cuts(before, chain.crossing_s, PLACES)
    sent = chain.crossing_s[cuts] * sending
    sent[0] = sent[-1] = 0.0
    work = before[cuts][None, :] - before[cuts][:, None] + sent[None, :] + sent[:, None]  # from cut, to cut
    exchanged = np.maximum(held[cuts][None, :] - held[cuts][:, None], 0.0) * s_per_byte
    work[np.tril_indices(len(cuts))] = np.inf
    most = int(min(num_devices, chain.num_micro_batches))
    stage_s = np.stack([work / r + exchanged * (r - 1) / r for r in range(1, most + 1)])
    places, stages = len(cuts), min(MOST_STAGES, num_devices, len(cuts) - 1)
    best = np.full((num_devices + 1, places), np.inf)  # of the chain up to each cut on so many devices
    best[0, 0] = 0.0
    chosen: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    plans = []
    for stage in range(stages):
        following = np.full_like(best, np.inf)
        first, number = np.zeros(best.shape, dtype=np.int64), np.zeros(best.shape, dtype=np.int64)
        for used in range(1, num_devices + 1):
            for r in range(1, min(used, most) + 1):
                worst = np.maximum(best[used - r][:, None], stage_s[r - 1])
                at = worst.argmin(axis=0)
                value = worst[at, np.arange(places)]
                better = value < following[used]
                following[used][better], first[used][better], number[used][better] = value[better], at[better], r
        best = following
        chosen.append((first, number))
        used = int(best[:, -1].argmin())
        if stage and np.isfinite(best[used, -1]):
            plans.append(_traced(chosen, cuts, used))
    return plans


def _traced(
    chosen: list[tuple[NDArray[np.int64], NDArray[np.int64]]], cuts: NDArray[np.int64], used: int
) -> tuple[list[int], list[int]]:
    at, ends, replicas = len(cuts) - 1, [], []
    for first, number in reversed(chosen):
        ends.append(int(cuts[at]))
        replicas.append(int(number[used, at]))
        at, used = int(first[used, at]), used - replicas[-1]
    return ends[::-1], replicas[::-1]
