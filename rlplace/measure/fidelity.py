"""How well the simulator tells what the host will measure: the placements to ask about, and the figures to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.measure.problem import Problem

KINDS = ("random", "blocks", "near-best", "unbalanced")
TRIES = 1000
"""Draws for each placement after which there are too few to draw from."""


@dataclass(frozen=True)
class Fidelity:
    """Simulated against measured step times of unseen placements.

    A rank correlation is None where there is none: all times of one side are equal, as those of the three placements in
    the best quarter of a few may be.

    Attributes:
        spearman: rank correlation over all.
        spearman_best_quartile: among the quarter that measured best.
        median_abs_rel_error: of |simulated / measured - 1|.
        p90_abs_rel_error: 90th percentile of the same.
        pick_regret: measured time of the simulator's favourite over the best measured one, minus 1.
        peak_bytes_max_rel_error: largest |simulated / counted - 1| of a device's peak memory.
        spearman_ceiling: rank correlation of two measurements of the same placements.
        spearman_ceiling_best_quartile: the same among the best quarter.
        num_placements: how many.
    """

    spearman: float | None
    spearman_best_quartile: float | None
    median_abs_rel_error: float
    p90_abs_rel_error: float
    pick_regret: float
    peak_bytes_max_rel_error: float
    spearman_ceiling: float | None
    spearman_ceiling_best_quartile: float | None
    num_placements: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def draw_mix(
    problem: Problem,
    best: NDArray[np.int32],
    count: int,
    generator: np.random.Generator,
    *,
    unlike: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """(count, G) placements of groups, a quarter of each kind in turn, and their kinds.

    `random` is uniform; `blocks` cuts the groups into contiguous blocks at random places; `near-best` changes up to a
    tenth of the groups of `best`; `unbalanced` puts most groups on one device, or all of them. A group that may not be
    where that puts it goes to the next device where it may be.

    Args:
        problem: what is placed.
        best: (G,) the best placement known.
        count: how many.
        generator: draws them.
        unlike: (_, G) placements that are not to be drawn again.

    Raises:
        InvalidValue: hardly any placement is left to draw.
    """
    seen = set() if unlike is None else {row.tobytes() for row in np.asarray(unlike, dtype=np.int32)}
    groups, devices = problem.grouping.num_groups, problem.host.num_devices
    drawn: list[NDArray[np.int32]] = []
    kinds: list[str] = []
    tries = 0
    while len(drawn) < count:
        tries += 1
        if tries > TRIES * count:
            raise InvalidValue(
                "placements",
                f"{len(drawn)} of {count} that were not drawn before in {tries - 1:,} draws",
                "fewer of them, or constraints that leave more of them",
                where="fidelity",
            )
        kind = KINDS[len(drawn) % len(KINDS)]
        if kind == "random":
            row = problem.draw_groups(generator, 1)[0].astype(np.int64)
        elif kind == "blocks":
            cuts = np.sort(generator.integers(0, groups, int(generator.integers(1, 2 * devices))))
            first = generator.integers(devices)
            row = (first + np.searchsorted(cuts, np.arange(groups), side="right")) % devices
        elif kind == "near-best":
            row = np.array(best, dtype=np.int64)
            changed = generator.choice(groups, int(generator.integers(0, max(groups // 10, 2))), replace=False)
            row[changed] = generator.integers(0, devices, len(changed))
        else:
            favourite = generator.integers(devices)
            share = generator.choice([0.0, 0.1, 0.25])
            row = np.where(generator.random(groups) < share, generator.integers(0, devices, groups), favourite)
        placement = problem.nearest_groups(row)
        if placement.tobytes() not in seen:
            drawn.append(placement)
            kinds.append(kind)
    return np.stack(drawn), tuple(kinds)


def judge_fidelity(
    simulated_s: Sequence[float],
    first_s: Sequence[float],
    second_s: Sequence[float],
    simulated_peaks: NDArray[np.float64],
    counted_peaks: NDArray[np.float64],
) -> Fidelity:
    """The figures, from simulated times and two measurements of the same placements.

    Args:
        simulated_s: (P,) predictions.
        first_s: (P,) first measurement ...
        second_s: (P,) ... and second; their mean is what predictions are held against.
        simulated_peaks: (P, D) predicted peak bytes.
        counted_peaks: (P, D) the runner's own count.
    """
    simulated, first, second = (np.asarray(values, dtype=np.float64) for values in (simulated_s, first_s, second_s))
    measured = (first + second) / 2
    errors = np.abs(simulated / measured - 1.0)
    quartile = np.argsort(measured)[: max(len(measured) // 4, 3)]
    used = counted_peaks > 0  # a device that a placement leaves out holds nothing
    peak_errors = np.abs(simulated_peaks[used] / counted_peaks[used] - 1.0)
    return Fidelity(
        spearman=_spearman(simulated, measured),
        spearman_best_quartile=_spearman(simulated[quartile], measured[quartile]),
        median_abs_rel_error=float(np.median(errors)),
        p90_abs_rel_error=float(np.percentile(errors, 90)),
        pick_regret=float(measured[int(np.argmin(simulated))] / measured.min() - 1.0),
        peak_bytes_max_rel_error=float(peak_errors.max(initial=0.0)),
        spearman_ceiling=_spearman(first, second),
        spearman_ceiling_best_quartile=_spearman(first[quartile], second[quartile]),
        num_placements=len(measured),
    )


def _spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    from scipy.stats import spearmanr

    if np.ptp(a) == 0.0 or np.ptp(b) == 0.0:
        return None
    return float(spearmanr(a, b).statistic)
