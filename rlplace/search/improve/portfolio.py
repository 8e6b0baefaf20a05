"""`portfolio`: the mixture of searches that did best over several problems at each budget.

`evolve`: the weights of the list scheduler `Greedy`, tuned on the problem: variations of several, then CMA-ES.

`cem`: the cross-entropy method over one categorical a group (Rubinstein 1999; de Boer et al. 2005).

`genetic`: a biased random-key genetic algorithm (BRKGA; Gonçalves & Resende 2011).

`diverse_starts`: for a step that is cut into micro-batches, layouts, partitions and list schedules to start from.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.search.groupings import atoms, balanced
from rlplace.search.improve.anneal import AnnealSettings, anneal_finer
from rlplace.search.improve.starting_points import (
    CROSSED,
    MICRO_BATCHED,
    START_WEIGHTS,
    GreedyPlacement,
    best_start_with_greedy,
    check_budget,
    evaluations_until,
    has_few_evaluations,
    losses,
    score_greedy,
    score_heuristics,
    score_starts,
    score_weights,
    try_all,
    varied,
)
from rlplace.search.parallel.hybrid import Starts, hybrid_start, parallel_starts
from rlplace.search.parallel.pipelines import list_priorities
from rlplace.search.task import Guide, Task, guided_schedules, score_guided

POPULATION = 8
TUNING_SHARE = 0.15
"""Share of the budget that goes into tuning."""
FEW_TUNING_SHARE = 0.5
"""The same where evaluations are few."""
TUNING = 500
"""Evaluations after which tuning hardly finds more."""
SIGMA = 0.2
"""Standard deviation of the first weights of CMA-ES around the best known ones."""
LEADERS = 4
"""Weights, each with its grouping, that are varied: the best so far."""
VARIED = 64
"""Evaluations of variations after which no more populations of them are begun."""
_TRIES = 2000


def solve_evolve(task: Task) -> None:
    """Tunes the scheduler for a share of the budget, at most `TUNING` evaluations, then anneals the result."""
    devices, step_s, leaders = best_start_with_greedy(task)
    anneal_finer(task, *tuned_start(task, devices, step_s, leaders, until=1.0), others=[(devices, step_s)], until=1.0)


def tuned_start(
    task: Task, start: NDArray[np.int32], start_s: float, leaders: Sequence[GreedyPlacement], *, until: float
) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 to anneal from until a share of the budget, and their step time.

    Args:
        task: scores and counts.
        start: (N,) the result if tuning finds nothing better.
        start_s: its step time.
        leaders: weights to begin with.
        until: share of the task's budget at which annealing will stop.
    """
    share = FEW_TUNING_SHARE if has_few_evaluations(task) else TUNING_SHARE
    tuned = task.spent + share * (until - task.spent)
    if not has_few_evaluations(task) and math.isfinite(task.budget.evaluations):
        tuned = min(tuned, task.spent + TUNING / task.budget.evaluations)
    leaders = vary(task, leaders, until=tuned)
    found = [(start, start_s)]
    if leaders:
        found += [(leaders[0].devices, leaders[0].step_s), tune(task, leaders[0], until=tuned)]
    return min(found, key=lambda pair: pair[1])


def vary(task: Task, leaders: Sequence[GreedyPlacement], *, until: float) -> list[GreedyPlacement]:
    """`leaders` and about `VARIED` variations of their weights, best first.

    Each varies about half of the weights of one of the best `LEADERS` at that time, over any grouping: weights
    that do well in different ways are worth more than many steps from one of them. The draws are always the same, so
    that all seeds anneal from one placement, and the result of a small budget depends less on the seed.

    Args:
        task: scores and counts.
        leaders: weights to begin with.
        until: share of the task's budget at which to stop.
    """
    generator, tries, most = np.random.default_rng(0), 0, task.evaluations + VARIED
    found, seen = sorted(leaders, key=lambda one: one.loss), {one.devices.tobytes() for one in leaders}
    while found and tries < _TRIES and task.evaluations < most and evaluations_until(task, until) >= 1:
        pairs = []
        for _ in range(POPULATION):
            parent = found[int(generator.integers(min(len(found), LEADERS)))]
            pairs.append((parent.greedy, varied(parent.weights, generator)))
        tries += len(pairs)
        found = sorted([*found, *score_weights(task, pairs, seen, until=until)], key=lambda one: one.loss)
    return found


def tune(task: Task, leader: GreedyPlacement, *, until: float) -> tuple[NDArray[np.int32], float]:
    """The best devices (N,) int32 that CMA-ES (Hansen 2016, arXiv:1604.00772) finds from `leader`, and their step time.

    Args:
        task: scores and counts.
        leader: weights to begin with, and their grouping.
        until: share of the task's budget at which to stop; the last population may be cut short by it, the first
            is not begun.
    """
    if evaluations_until(task, until) < POPULATION:
        return leader.devices, leader.step_s
    import cma

    greedy, grouping = leader.greedy, leader.greedy.grouping
    draws = np.random.RandomState(int(task.generator.integers(1, 2**31)))
    # by default it seeds NumPy's global generator and draws from that, which belongs to the user and to all threads
    options = {"seed": math.nan, "randn": draws.randn, "verbose": -9, "popsize": POPULATION}
    best, best_s = leader.devices, leader.step_s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cma warns of flat losses, which groups' devices make often
        strategy = cma.CMAEvolutionStrategy(leader.weights.tolist(), SIGMA, options)
        most = task.evaluations + TUNING
        while (count := int(min(POPULATION, evaluations_until(task, until), most - task.evaluations))) >= 1:
            weights = strategy.ask()
            groups = greedy.place(np.array(weights[:count]))
            step_s = task.score(grouping.expand(groups))
            first = int(np.argmin(step_s))
            if step_s[first] < best_s:
                best, best_s = grouping.expand(groups)[first], float(step_s[first])
            if count == POPULATION:
                strategy.tell(weights, losses(task.problem, grouping, groups, step_s).tolist())
    return best, best_s


def solve_portfolio(task: Task, start: NDArray[np.int32] | None = None, guide: Guide | None = None) -> None:
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
    if task.problem.graph.is_in_parts and not has_few_evaluations(task):
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


GREEDY_SHARE = 0.06
"""Most of a budget that fixed weights of the list scheduler take ..."""
TUNED_SHARE = 0.1
"""... and then those that are tuned."""
WORST = 1.5
"""A start that takes this many times as long as the best one is none."""
HYBRID_SHARE = 0.3
"""Share of the rest of a budget that goes into stages and replicas in every order ..."""
HYBRID_EACH = 25
"""... and evaluations for each device that they may always take: 16 devices have hundreds of layouts."""


def diverse_starts(task: Task) -> Starts:
    """Devices (N,) int32 and step times of the best of several kinds of placements, best first, one at least.

    The kinds are layouts by stages and replicas, graph partitions and list schedules of whole steps, and the list
    scheduler `Greedy` with tuned weights. Where none fits, groups are balanced by bytes.

    Args:
        task: scores and counts.
    """
    kinds = [parallel_starts(task), score_heuristics(task, MICRO_BATCHED)]
    pairs = [(name, weights) for weights in START_WEIGHTS for name in CROSSED]
    leaders = score_greedy(task, pairs, until=task.spent + GREEDY_SHARE)
    until = task.spent + TUNED_SHARE
    if leaders := vary(task, leaders, until=until):
        kinds.append([(leaders[0].devices, leaders[0].step_s), tune(task, leaders[0], until=until)])
    best = sorted((min(kind, key=lambda one: one[1]) for kind in kinds if kind), key=lambda one: one[1])
    starts = [one for one in best if one[1] <= WORST * best[0][1]]
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
    if not task.takes_plans or task.is_spent or task.problem.graph.num_micro_batches == 1:
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
    timed = sorted(zip(placements, task.score(np.stack(placements)).tolist(), strict=True), key=lambda one: one[1])
    return [one for one in timed if one[1] <= WORST * timed[0][1]] or timed[:1]


CEM_ELITE = 0.15
"""Share of a batch that chances move towards ..."""
STEP = 0.3
"""... and how far."""
FLOOR = 0.002
"""Least chance of an allowed device, over the number of devices: no choice is lost for good."""


def solve_cem(task: Task) -> None:
    """Draws placements, moves the chances of each group's devices towards the best of them, and again."""
    starts, times = score_starts(task)
    problem = task.problem
    size = int(min(max(10, math.sqrt(min(task.budget.evaluations, 10_000))), 64))
    chances = start_chances(starts[0], problem.group_allowed)
    elite, elite_loss = starts[:1], losses(problem, problem.grouping, starts[:1], times[:1])
    keep = max(1, round(CEM_ELITE * size))
    while not task.is_spent:
        drawn = draw(chances, size, task.generator)
        loss = losses(problem, problem.grouping, drawn, task.score_groups(drawn))
        pool, pool_loss = np.concatenate((elite, drawn)), np.concatenate((elite_loss, loss))
        order = np.argsort(pool_loss, kind="stable")[:keep]
        elite, elite_loss = pool[order], pool_loss[order]
        chances = towards(chances, elite, problem.group_allowed)


def start_chances(start: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(G, D) float64: nine tenths for where each group is in `start`, the rest evenly over its allowed devices."""
    chances: NDArray[np.float64] = 0.1 * allowed / allowed.sum(axis=1, keepdims=True)
    chances[np.arange(len(start)), start] += 0.9
    return chances


def towards(chances: NDArray[np.float64], elite: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """`chances` (G, D) moved by `STEP` towards how often each group is where in `elite` (K, G), floored."""
    share = (elite[:, :, None] == np.arange(chances.shape[1])).mean(axis=0)
    moved = np.where(allowed, np.maximum((1 - STEP) * chances + STEP * share, FLOOR / chances.shape[1]), 0.0)
    return np.asarray(moved / moved.sum(axis=1, keepdims=True))


def draw(chances: NDArray[np.float64], count: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """(count, G) int32: a device for each group by its chances (G, D)."""
    place = (generator.random((count, len(chances), 1)) >= np.cumsum(chances, axis=1)).sum(axis=2)
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)  # where rounding left the sum below 1
    return np.asarray(np.minimum(place, last), dtype=np.int32)


GENETIC_ELITE, MUTANTS, BIAS = 0.2, 0.15, 0.7
"""Shares of a population that is kept and that is drawn anew, and the chance of a child's key from its elite parent."""


def solve_genetic(task: Task) -> None:
    """Evolves keys, one for each group, from those of the starts and random ones."""
    starts, times = score_starts(task)
    problem, generator = task.problem, task.generator
    size = population_size(task.budget.evaluations)
    keys = np.concatenate((keys_of(starts, problem.group_allowed), generator.random((size, starts.shape[1]))))[:size]
    known = min(len(starts), size)
    loss = losses(problem, problem.grouping, starts[:known], times[:known])
    drawn = decode(keys[known:], problem.group_allowed)
    loss = np.concatenate((loss, losses(problem, problem.grouping, drawn, task.score_groups(drawn))))
    num_elite, num_mutants = max(1, int(GENETIC_ELITE * size)), max(1, int(MUTANTS * size))
    while not task.is_spent:
        order = np.argsort(loss, kind="stable")
        elite, others = order[:num_elite], order[num_elite:]
        count = size - num_elite - num_mutants
        first, second = keys[generator.choice(elite, count)], keys[generator.choice(others, count)]
        children = np.where(generator.random(first.shape) < BIAS, first, second)
        fresh = np.concatenate((generator.random((num_mutants, keys.shape[1])), children))
        placed = decode(fresh, problem.group_allowed)
        fresh_loss = losses(problem, problem.grouping, placed, task.score_groups(placed))
        keys, loss = np.concatenate((keys[elite], fresh)), np.concatenate((loss[elite], fresh_loss))


def population_size(evaluations: float) -> int:
    """About twice the square root of the budget, between 10 and 200."""
    return 100 if math.isinf(evaluations) else int(min(max(10, 2 * math.sqrt(evaluations)), 200))


def decode(keys: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(B, G) int32: the device of each group; the keys [0, 1) are cut evenly over the group's allowed devices."""
    place = (keys * allowed.sum(axis=1)).astype(np.int64)  # which of its allowed devices
    ranked = np.argsort(~allowed, axis=1, kind="stable").astype(np.int32)  # allowed devices first
    return np.asarray(ranked[np.arange(len(allowed)), place])


def keys_of(placements: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(B, G) float64: the keys in the middle of those that decode to `placements`."""
    place = (np.cumsum(allowed, axis=1) - 1)[np.arange(len(allowed)), placements]
    return np.asarray((place + 0.5) / allowed.sum(axis=1))
