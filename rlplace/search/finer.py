"""`finer`: groupings that cut the groups of another, so that its placements carry over unchanged."""

from __future__ import annotations

import numpy as np

from rlplace.graphs.grouping import Grouping, group_ops
from rlplace.measure.problem import Problem


def finer(problem: Problem, grouping: Grouping, num_groups: int) -> Grouping:
    """`grouping` with its groups cut along the borders of about `num_groups` groups of the same graph.

    Ops that must live together stay together, as they do in both. Groups are numbered by their first op.

    Args:
        problem: gives graph and costs.
        grouping: what is cut.
        num_groups: how many groups the borders come from; the number of ops cuts wherever cutting is allowed.
    """
    cuts = group_ops(problem.graph, problem.costs.op_time_s.mean(axis=1), num_groups)
    return meet(grouping, cuts, f"{grouping.rule} cut by {cuts.rule}")


def meet(first: Grouping, second: Grouping, rule: str) -> Grouping:
    """Groups of ops that share a group in both groupings, numbered by their first op."""
    key = first.op_group.astype(np.int64) * max(second.num_groups, 1) + second.op_group
    _, first_op, place = np.unique(key, return_index=True, return_inverse=True)
    number = np.empty(len(first_op), dtype=np.int32)
    number[np.argsort(first_op, kind="stable")] = np.arange(len(first_op), dtype=np.int32)
    return Grouping(number[place], rule=rule)
