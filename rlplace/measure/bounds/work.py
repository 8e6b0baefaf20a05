"""Lower bounds by work: devices do at most one second of work a second."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, Ints, kernel
from rlplace.measure.bounds.figures import Figures

MOST_THRESHOLDS = 128
"""Heads that are tried as the earliest of a set of ops; more ops than that are sampled."""
MOST_LP_ENTRIES = 20_000
"""Labels x devices up to which weights come from a linear program, else from subgradient steps."""
SUBGRADIENT_STEPS = 100


def even_weights(figures: Figures) -> NDArray[np.float64]:
    """(A,) float64: every single device counts the same."""
    singles = figures.holds.shape[1]
    return np.full(singles, 1.0 / singles)


def work_of_labels_s(figures: Figures, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C,) float64: least weighted work of the ops of each label, all on one device.

    Weights over single devices are >= 0 and sum to 1. An op on device d keeps busy all that d holds, so its weighted
    work is its time there times the weights of what d holds; in a second, all devices together do at most 1 of it.
    Thus the sum over labels is a bound on the step, whatever the weights (the dual of spreading fractions of labels
    over devices).
    """
    return _least_load(_label_work_s(figures), figures.holds @ weights)


def best_weights(figures: Figures) -> NDArray[np.float64]:
    """(A,) weights of single devices for which the work is most: dear where devices are slow, or ops have no choice.

    They are the dual solution of spreading labels over devices in fractions (HiGHS); for large problems, the best of
    100 subgradient steps. Any weights give a valid bound, so precision does not matter.
    """
    even = even_weights(figures)
    work_s = _label_work_s(figures)
    work_s = work_s[np.where(np.isfinite(work_s), work_s, 0.0).any(axis=1)]
    if len(work_s) == 0 or len(even) == 1:
        return even
    if np.all(figures.holds.sum(axis=1) == 1) and np.all(work_s == work_s[:, :1]):
        return even
    if work_s.size <= MOST_LP_ENTRIES:
        return _dual_weights(work_s, figures.holds, even)
    return _ascent_weights(work_s, figures.holds, even)


def head_tail_s(
    figures: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    """Seconds that sets of ops with late heads and long tails take.

    A set of ops runs no earlier than the least of its heads and ends at least the least of its tails before the step
    does; in between lies its weighted work (see `work_of_labels_s`), done at 1 a second. Sets: all ops with heads from
    h and tails from q on, for every q and up to 128 values of h. After Carlier 1982; one op alone is the longest path.
    """
    jobs = np.flatnonzero(figures.is_job)
    if not len(jobs):
        return 0.0
    work_s = _least_load(figures.work_s[jobs], figures.holds @ weights)
    by_tail = np.argsort(-tails[jobs], kind="stable")
    heads, tails, work_s = heads[jobs][by_tail], tails[jobs][by_tail], work_s[by_tail]
    thresholds = np.unique(heads)
    if len(thresholds) > MOST_THRESHOLDS:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, MOST_THRESHOLDS).astype(np.int64)]
    best_s = 0.0
    for head in thresholds.tolist():
        inside = heads >= head
        best_s = max(best_s, float((head + np.cumsum(work_s[inside]) + tails[inside]).max()))
    return best_s


def class_s(figures: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64]) -> float:
    """Seconds that the worst co-location class takes, on the device that suits it best.

    All its ops run on one device, one after the other: no earlier than the least of their heads, and the least of
    their tails is left when they are done. The same holds for those of its ops with late heads and long tails.
    """
    order = np.argsort(figures.label, kind="stable").astype(np.int32)
    order = order[figures.is_job[order]]
    if not len(order):
        return 0.0
    offsets = np.concatenate(([0], np.flatnonzero(np.diff(figures.label[order])) + 1, [len(order)]))
    return float(_class_s(offsets.astype(np.int32), order, figures.work_s, heads, tails))


def _label_work_s(figures: Figures) -> NDArray[np.float64]:
    table = np.zeros((int(figures.label.max(initial=-1)) + 1, figures.work_s.shape[1]))
    np.add.at(table, figures.label, figures.work_s)
    return table


def _least_load(work_s: Floats, device_weights: Floats) -> NDArray[np.float64]:
    """(rows,) float64: least of work times weight over the devices that a row may use."""
    can_go = np.isfinite(work_s)
    load = np.where(can_go, work_s, 0.0) * device_weights
    return np.asarray(np.where(can_go, load, np.inf).min(axis=1, initial=np.inf))


def _dual_weights(work_s: Floats, holds: Floats, even: Floats) -> NDArray[np.float64]:
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    labels, devices = np.nonzero(np.isfinite(work_s))
    cells, singles = np.arange(len(labels)), holds.shape[1]
    loads = holds[devices] * (work_s[labels, devices] / work_s[np.isfinite(work_s)].max())[:, None]
    cell, single = np.nonzero(loads)
    rows = np.concatenate((single, np.arange(singles)))
    columns = np.concatenate((cell, np.full(singles, len(cells))))
    values = np.concatenate((loads[cell, single], np.full(singles, -1.0)))
    capacity = coo_matrix((values, (rows, columns)), shape=(singles, len(cells) + 1)).tocsr()
    whole = coo_matrix((np.ones(len(cells)), (labels, cells)), shape=(len(work_s), len(cells) + 1)).tocsr()
    goal = np.append(np.zeros(len(cells)), 1.0)
    solved = linprog(goal, A_ub=capacity, b_ub=np.zeros(singles), A_eq=whole, b_eq=np.ones(len(work_s)))
    if solved.x is None:
        return even
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    return np.asarray(weights / weights.sum()) if weights.sum() > 0 else even


def _ascent_weights(work_s: Floats, holds: Floats, even: Floats) -> NDArray[np.float64]:
    weights, best, best_s = even, even, -np.inf
    can_go = np.isfinite(work_s)
    for step in range(SUBGRADIENT_STEPS):
        load = np.where(can_go, work_s, 0.0) * (holds @ weights)
        chosen = np.where(can_go, load, np.inf).argmin(axis=1)
        picked = work_s[np.arange(len(work_s)), chosen]
        value_s = float((picked * (holds @ weights)[chosen]).sum())
        if value_s > best_s:
            best, best_s = weights, value_s
        slope = picked @ holds[chosen]
        weights = weights * np.exp(slope / max(float(slope.max()), 1e-300) / np.sqrt(step + 1.0))
        weights = weights / weights.sum()
    return best


@kernel
def _class_s(offsets: Ints, order: Ints, work_s: Floats, heads: Floats, tails: Floats) -> float:
    worst_s = 0.0
    for c in range(len(offsets) - 1):
        ops = order[offsets[c] : offsets[c + 1]]
        by_tail = ops[np.argsort(-tails[ops])]
        stride = max(1, len(ops) // 64)
        least_s = np.inf
        for device in range(work_s.shape[1]):
            device_s = 0.0
            for first in range(0, len(ops), stride):
                done_s = heads[ops[first]]
                for op in by_tail:
                    if heads[op] >= heads[ops[first]]:
                        done_s += work_s[op, device]
                        device_s = max(device_s, done_s + tails[op])
            least_s = min(least_s, device_s)
        worst_s = max(worst_s, least_s)
    return worst_s
