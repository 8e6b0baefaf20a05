"""`cut_stages`: a chain of layers cut into stages, by dynamic programming (PipeDream: Narayanan et al. 2019)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_PLACES = 256
"""Places where a chain may be cut: of more, the thinnest in each of as many equal shares of the load."""


def cut_stages(
    load: NDArray[np.float64], rate: NDArray[np.float64], crossing: NDArray[np.float64] | None = None
) -> NDArray[np.int32]:
    """(P,) int32: the stage, 0..S-1, of every link of a chain, so that the stage with the most to do has least.

    A stage is not empty where there are as many links as stages. Of equally good cuts it is the first.

    Args:
        load: (P,) what each link is: seconds or bytes.
        rate: (S,) how much of it each stage takes in one unit.
        crossing: (P + 1,) what a cut before each link costs the stages on both of its sides, in units; nothing by
            default.
    """
    count, stages = len(load), len(rate)
    crossing = np.zeros(count + 1) if crossing is None else crossing
    before = np.concatenate(([0.0], np.cumsum(load, dtype=np.float64)))
    cuts = thinnest_cuts(before, crossing, max(MOST_PLACES, 4 * stages))
    at, extra = before[cuts], crossing[cuts].copy()
    extra[0] = extra[-1] = 0.0
    best = np.where(np.arange(len(cuts)) == 0, 0.0, np.inf)  # of the chain up to each cut, over the stages so far
    chosen = np.zeros((stages, len(cuts)), dtype=np.int64)
    for stage in range(stages):
        took = (at[None, :] - at[:, None]) / rate[stage] + extra[None, :] + extra[:, None]  # from cut, to cut
        took[np.tril_indices(len(cuts), -1 if count < stages else 0)] = np.inf
        worst = np.maximum(best[:, None], took)
        chosen[stage] = worst.argmin(axis=0)
        best = worst.min(axis=0)
    stage_of = np.zeros(count, dtype=np.int32)
    cut = len(cuts) - 1
    for stage in range(stages - 1, -1, -1):
        first = int(chosen[stage, cut])
        stage_of[cuts[first] : cuts[cut]] = stage
        cut = first
    return stage_of


def thinnest_cuts(before: NDArray[np.float64], crossing: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Ascending places where a chain may be cut, both ends among them."""
    count = len(before) - 1
    if count <= most:
        return np.arange(count + 1)
    share = np.minimum(before / max(before[-1], 1e-300) * most, most - 1).astype(np.int64)
    inner = np.arange(1, count)
    by_share = inner[np.lexsort((inner, crossing[inner], share[inner]))]
    thinnest = by_share[np.unique(share[by_share], return_index=True)[1]]
    return np.unique(np.concatenate(([0], thinnest, [count]))).astype(np.int64)
