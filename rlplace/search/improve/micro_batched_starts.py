"""Where searches of a step that is cut into micro-batches start: layouts, partitions and list schedules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.improve.evolve import tune, vary
from rlplace.search.improve.greedy_starts import CROSSED, score_greedy
from rlplace.search.improve.start_weights import START_WEIGHTS
from rlplace.search.improve.warm_starts import MICRO_BATCHED, balanced, score_heuristics, score_layouts
from rlplace.search.parallel.hybrid_starts import hybrid_start
from rlplace.search.parallel.micro_batch_orders import list_priorities
from rlplace.search.task import Task

Starts = list[tuple[NDArray[np.int32], float]]
"""Devices (N,) int32 and step times, best first."""

GREEDY_SHARE = 0.06
"""Most of a budget that fixed weights of the list scheduler take ..."""
TUNED_SHARE = 0.1
"""... and then those that are tuned."""
WORST = 1.5
"""A start that takes this many times as long as the best one is none."""
HYBRID_SHARE = 0.3
"""Part of what is left of a budget that goes into stages and replicas in every order ..."""
HYBRID_EACH = 25
"""... and evaluations for each device that they may always take: 16 devices have hundreds of layouts."""


def diverse_starts(task: Task) -> Starts:
    """Devices (N,) int32 and step times of the best of several kinds of placements, best first, one at least.

    The kinds are layouts by stages and replicas, graph partitions and list schedules of whole steps, and the list
    scheduler `Greedy` with tuned weights. Where none fits, groups are balanced by bytes.

    Args:
        task: scores and counts.
    """
    kinds = [score_layouts(task), score_heuristics(task, MICRO_BATCHED)]
    pairs = [(name, weights) for weights in START_WEIGHTS for name in CROSSED]
    leaders = score_greedy(task, pairs, until=task.spent + GREEDY_SHARE)
    until = task.spent + TUNED_SHARE
    leaders = vary(task, leaders, until=until)
    if leaders:
        devices, step_s = tune(task, leaders[0], until=until)
        kinds.append([(leaders[0].step_s, leaders[0].devices), (step_s, devices)])
    best = sorted((min(kind, key=lambda one: one[0]) for kind in kinds if kind), key=lambda one: one[0])
    starts = [(devices, step_s) for step_s, devices in best if step_s <= WORST * best[0][0]]
    if not starts or np.isinf(starts[0][1]):
        groups = balanced(task.problem)
        starts.insert(0, (task.problem.grouping.expand(groups), float(task.score_groups(groups)[0])))
    return starts


def in_best_order(task: Task, starts: Starts) -> Starts:
    """`starts` and the best hybrid of stages and replicas in the order of ops that is best for one of them.

    Where that is another than the problem's own, the task scores by it from then on, and starts are timed in it.

    Args:
        task: scores and counts; as it is where its timer takes no plans.
        starts: timed in the problem's own order, one at least.
    """
    starts = sorted(starts, key=lambda one: one[1])
    if not task.takes_plans or task.is_spent:
        return starts
    share = max(
        HYBRID_SHARE * (1.0 - task.spent), HYBRID_EACH * task.problem.host.num_devices / task.budget.evaluations
    )
    devices, best_s, best = hybrid_start(task, until=min(task.spent + share, 1.0))
    placements = [*(one for one, _ in starts), devices] if np.isfinite(best_s) else [one for one, _ in starts]
    for priorities in list_priorities(task.problem).values():
        for one in placements[: len(starts)]:
            if (step_s := task.score_ordered(one, priorities)) < best_s:
                best_s, best = step_s, priorities
    if best_s < starts[0][1]:
        task.priorities = best
    times = task.score(np.stack(placements)).tolist()
    order = sorted(range(len(times)), key=lambda place: times[place])
    kept = [place for place in order if times[place] <= WORST * times[order[0]]] or order[:1]
    return [(placements[place], times[place]) for place in kept]
