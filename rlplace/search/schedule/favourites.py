"""Favourite children: which reader of each unit should share a device with it, by a linear program, for `m-sct`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.schedule.host_resources import HostResources
from rlplace.search.schedule.ranks import mean_transfer_s
from rlplace.search.schedule.units import Units

FAVOURITE_BELOW = 0.1
"""A child is a favourite where the relaxed program puts less than this on the edge (Baechi's threshold)."""


def favourite_children(units: Units, resources: HostResources) -> NDArray[np.int64]:
    """(U,) int64: the child that each unit should share a device with, -1 for none.

    An edge on which the relaxed program puts less than `FAVOURITE_BELOW` makes a favourite; every unit has at most one
    favourite child and is that of at most one parent.
    """
    count = len(units.label)
    parents, children, transfer_s = _edges(units, mean_transfer_s(units, resources))
    share = _relaxed(units, parents, children, transfer_s) if len(parents) else None
    if share is None:
        return np.full(count, -1, dtype=np.int64)
    turns = np.lexsort((np.arange(len(parents)), share))
    return _matched(count, parents, children, turns[share[turns] < FAVOURITE_BELOW])


def favourites_within(
    ops: Units, op_group: NDArray[np.int32], group_favourites: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(N,) int64: favourite children of ops where only those of groups are known.

    An op's is the reader, in its own group or its group's favourite, of most bytes that is nobody's favourite yet.
    """
    parents, children, weight = _edges(ops, ops.tensor_bytes)
    near = (op_group[parents] == op_group[children]) | (group_favourites[op_group[parents]] == op_group[children])
    turns = np.lexsort((np.arange(len(parents)), -weight))
    return _matched(len(ops.label), parents, children, turns[near[turns]])


def num_edges(units: Units) -> int:
    """Pairs of units of which one reads the other, sources aside."""
    return len(_edges(units, np.zeros(len(units.tensor_unit)))[0])


def _edges(
    units: Units, tensor_weight: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Pairs (parent, child) of jobs, and the summed weight of the tensors between them."""
    count = len(units.label)
    child = np.repeat(np.arange(count), np.diff(units.input_offsets))
    parent = units.tensor_unit[units.input_tensors].astype(np.int64)
    is_job = ~units.is_source[parent] & ~units.is_source[child]
    pairs, which = np.unique(parent[is_job] * count + child[is_job], return_inverse=True)
    weight = np.bincount(which, weights=tensor_weight[units.input_tensors[is_job]], minlength=len(pairs))
    return pairs // count, pairs % count, weight.astype(np.float64)


def _relaxed(
    units: Units, parents: NDArray[np.int64], children: NDArray[np.int64], transfer_s: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """(E,) float64: what share of its transfer each edge pays, 0..1; None where no solution was found.

    The linear relaxation of Hanen and Munier's program, by HiGHS: an edge's transfer counts x in 0..1 of its time, a
    unit with k children (or parents) has at least k - 1 of x over them, and the makespan is least.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix, vstack

    count, edges = len(units.label), len(parents)
    time_s = units.time_s.mean(axis=1)
    scale = 1.0 / max(float(time_s.sum() + transfer_s.sum()), 1e-30)
    # columns: starts of units, x of edges, makespan; rows: edges, children, parents, ends
    rows = np.arange(edges)
    ones = np.ones(edges)
    width = count + edges + 1
    after = coo_matrix(
        (
            np.concatenate((ones, -ones, transfer_s * scale)),
            (np.tile(rows, 3), np.concatenate((parents, children, count + rows))),
        ),
        shape=(edges, width),
    )
    by_parent = coo_matrix((-ones, (parents, count + rows)), shape=(count, width))
    by_child = coo_matrix((-ones, (children, count + rows)), shape=(count, width))
    every = np.arange(count)
    signs = np.repeat((1.0, -1.0), count)
    columns = np.concatenate((every, np.full(count, width - 1)))
    ends = coo_matrix((signs, (np.tile(every, 2), columns)), shape=(count, width))
    limits = np.concatenate(
        (
            -time_s[parents] * scale,
            -np.maximum(np.bincount(parents, minlength=count) - 1, 0),
            -np.maximum(np.bincount(children, minlength=count) - 1, 0),
            -time_s * scale,
        )
    )
    goal = np.zeros(width)
    goal[-1] = 1.0
    bounds = np.zeros((width, 2))
    bounds[:, 1] = np.inf
    bounds[count : count + edges, 1] = 1.0
    solved = linprog(goal, A_ub=vstack((after, by_parent, by_child, ends)).tocsr(), b_ub=limits, bounds=bounds)
    return None if solved.x is None else np.asarray(solved.x[count : count + edges])


def _matched(
    count: int, parents: NDArray[np.int64], children: NDArray[np.int64], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(count,) int64: favourite children where edges, in these turns, make one if parent and child have none yet."""
    favourites = np.full(count, -1, dtype=np.int64)
    taken = np.zeros(count, dtype=np.bool_)
    for edge in turns.tolist():
        parent, child = int(parents[edge]), int(children[edge])
        if favourites[parent] < 0 and not taken[child]:
            favourites[parent] = child
            taken[child] = True
    return favourites
