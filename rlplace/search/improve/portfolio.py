"""`portfolio`: the mixture of searches that did best over several problems at each budget.

Where searches of a step that is cut into micro-batches start: layouts, partitions and list schedules.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.guide import Guide, guided_schedules, score_guided
from rlplace.search.improve.anneal import anneal_finer
from rlplace.search.improve.coarsening import atoms
from rlplace.search.improve.evolve import tune, tuned_start, vary
from rlplace.search.improve.greedy_starts import (
    CROSSED,
    START_WEIGHTS,
    best_start_with_greedy,
    has_few_evaluations,
    score_greedy,
)
from rlplace.search.improve.metropolis import AnnealSettings
from rlplace.search.improve.warm_starts import (
    MICRO_BATCHED,
    balanced,
    check_budget,
    score_heuristics,
    score_layouts,
    try_all,
)
from rlplace.search.parallel.hybrid import hybrid_start
from rlplace.search.parallel.micro_batch_orders import list_priorities
from rlplace.search.task import Task


def solve(task: Task, start: NDArray[np.int32] | None = None, guide: Guide | None = None) -> None:
    """All placements of groups where they are few; else heuristics, tuned list scheduling, then annealing over ever
    finer groups.

    Where ops do not repeat, one long annealing that starts hotter and cools more slowly found as much in 200,000
    evaluations as several short ones of which the best went on. A step that is cut into micro-batches has several
    starts that are nothing alike, and is annealed from each of them for a while. At 500, `genetic` and
    `cem` found less over `core`.

    Args:
        task: scores and counts.
        start: (N,) a placement to start from besides those.
        guide: suggests more of them, and moves of annealing.
    """
    check_budget(task)
    settings = AnnealSettings(guide=guide)
    known = [] if start is None else [(start, float(task.score(start)[0]))]
    known += score_guided(task, guide)[:1]
    if task.problem.graph.num_micro_batches > 1 and not has_few_evaluations(task):
        (devices, step_s), *others = in_best_order(task, [*known, *diverse_starts(task)])
        anneal_finer(task, devices, step_s, others=others, until=1.0, settings=settings)
        return
    devices, step_s, leaders = best_start_with_greedy(task, first=guided_schedules(task, guide))
    devices, step_s = min([(devices, step_s), *known], key=lambda one: one[1])
    if not try_all(task, share=0.5):
        tuned = tuned_start(task, devices, step_s, leaders, until=1.0)
        anneal_finer(task, *tuned, others=[(devices, step_s)], until=1.0, settings=settings)
    elif atoms(task.problem).num_groups > task.problem.grouping.num_groups and task.best_devices is not None:
        anneal_finer(task, task.best_devices, task.best_s, until=1.0, settings=settings)


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
