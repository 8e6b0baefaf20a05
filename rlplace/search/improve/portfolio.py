"""`portfolio`: the mixture of searches that did best over several problems at each budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.guide import Guide, guided_schedules, score_guided
from rlplace.search.improve.anneal import anneal_finer
from rlplace.search.improve.anneal_settings import AnnealSettings
from rlplace.search.improve.coarsening import atoms
from rlplace.search.improve.evolve import tuned_start
from rlplace.search.improve.greedy_starts import best_start_with_greedy, has_few_evaluations
from rlplace.search.improve.micro_batched_starts import diverse_starts, in_best_order
from rlplace.search.improve.warm_starts import check_budget, try_all
from rlplace.search.task import Task


def solve(task: Task, start: NDArray[np.int32] | None = None, guide: Guide | None = None) -> None:
    """All placements of groups where they are few; else heuristics, tuned list scheduling, then annealing over ever
    finer groups.

    Where ops do not repeat, one long annealing that starts hotter and cools more slowly found as much in 200,000
    evaluations as several short ones of which the best went on. A step that is cut into micro-batches has several
    starts that are nothing alike, and is annealed from each of them for a while. At 500, `genetic`, `cem`,
    `multilevel` and `local-search` found less over `core`.

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
