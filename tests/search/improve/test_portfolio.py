"""What every search keeps to, and the optimum that brute force knows.

Tuning the scheduler: better than its first weights, the same again, within its budget, where it may.

Starts of several kinds, and the order of ops that is best for one of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from bench_problems import synthetic_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_profiles import profile_problem
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host, random_host, random_problem
from search_problems import Counting, ToTheEnd, barred, brute_force_s, fork_problem, tight_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.measure import resolve_host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.portfolio import POPULATION, VARIED, WORST, diverse_starts, in_best_order, tune, vary
from rlplace.search.improve.starting_points import FIRST_WEIGHTS, GreedyPlacement, score_greedy, try_all
from rlplace.search.methods import find
from rlplace.search.parallel.layouts import layouts, placement_of
from rlplace.search.task import Budget, Task

SEARCHES = ("anneal", "evolve", "genetic", "cem", "portfolio")


def small_problem(seed: int, num_devices: int = 3) -> Problem:
    """At most six ops on at most three devices, every rule of the model in play, some ops barred from some devices."""
    rng = np.random.default_rng(seed)
    host = random_host(rng)
    while host.num_devices > num_devices:
        host = random_host(rng)
    num_ops = int(rng.integers(1, 7))
    problem = random_problem(rng, num_ops, host)
    pins = {int(op): (int(rng.integers(host.num_devices)),) for op in rng.integers(0, num_ops, rng.integers(0, 2))}
    return barred(problem, pins)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1_000_000))
def test_the_portfolio_finds_what_brute_force_finds(seed: int) -> None:
    problem = small_problem(seed)
    found = find(problem, "portfolio", Simulator(problem, threads=1), Budget(1500), seed=seed)
    assert found.step_time_s == brute_force_s(problem)


@pytest.mark.parametrize("method", SEARCHES)
def test_every_search_is_deterministic_and_keeps_to_budget_and_devices(method: str) -> None:
    problem = barred(fork_problem(2, 3), {0: (1,), 3: (0, 2), 5: (2,)})
    timer = Counting(problem)
    found = find(problem, method, timer, Budget(83), seed=4)
    assert found.evaluations == timer.count <= 83
    assert found.devices is not None
    assert problem.group_allowed[np.arange(6), found.devices].all()
    again = find(problem, method, Counting(problem), Budget(83), seed=4)
    assert again.history == found.history
    assert np.array_equal(again.devices, found.devices)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["anneal", "evolve", "portfolio"])
@pytest.mark.parametrize("evaluations", [60, 1500])
def test_a_search_that_gives_up_early_finds_the_same(method: str, evaluations: int) -> None:
    for seed in range(4):
        problem = random_problem(np.random.default_rng(seed), 40)
        early, late = (
            find(problem, method, timer, Budget(evaluations), seed=seed)
            for timer in (Counting(problem), ToTheEnd(problem))
        )
        assert (early.history, early.evaluations) == (late.history, late.evaluations)
        assert np.array_equal(early.devices, late.devices)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("evaluations", [1, 2, 9])
def test_a_budget_of_next_to_nothing_is_kept(method: str, evaluations: int) -> None:
    problem = fork_problem(2, 3)
    timer = Counting(problem)
    find(problem, method, timer, Budget(evaluations), seed=0)
    assert timer.count == evaluations


@pytest.mark.slow
@pytest.mark.parametrize("method", SEARCHES)
def test_every_search_spreads_what_does_not_fit(method: str) -> None:
    problem = tight_problem(12, 3)
    found = find(problem, method, Simulator(problem, threads=1), Budget(600), seed=1)
    assert found.devices is not None
    assert np.isfinite(found.step_time_s)


@pytest.mark.parametrize("method", ["anneal", "evolve", "portfolio"])
@pytest.mark.parametrize("evaluations", [8, 40])
def test_few_evaluations_find_what_fits(method: str, evaluations: int) -> None:
    for seed in range(6):
        problem = tight_problem(12, 3, seed)
        found = find(problem, method, Simulator(problem, threads=1), Budget(evaluations), seed=1)
        assert found.devices is not None
        assert np.isfinite(found.step_time_s)


@pytest.mark.parametrize("method", SEARCHES)
def test_seconds_end_every_search_and_no_budget_is_refused(method: str) -> None:
    problem = fork_problem(2, 3)
    assert find(problem, method, Counting(problem), Budget(seconds=0.02)).devices is not None
    with pytest.raises(InvalidValue, match="budget"):
        find(problem, method, Counting(problem))


def test_what_is_pinned_everywhere_has_one_placement() -> None:
    problem = barred(fork_problem(2, 2), {op: (op % 2,) for op in range(6)})
    for method in SEARCHES:
        found = find(problem, method, Counting(problem), Budget(50))
        assert found.devices is not None
        assert found.devices.tolist() == [0, 1, 0, 1, 0, 1]


def test_all_placements_are_tried_only_where_they_fit_in_the_share() -> None:
    problem = barred(fork_problem(0, 2), {0: (1,), 1: (0,), 2: (0,)})  # 2 * 2 * 2 placements
    timer = Counting(problem)
    assert not try_all(Task(problem, timer, Budget(15)), share=0.5)
    assert timer.count == 0
    task = Task(problem, timer, Budget(16))
    assert try_all(task, share=0.5)
    assert timer.count == 8
    assert task.best_s == brute_force_s(problem)


def test_what_is_too_much_to_try_all_of_is_tuned_and_annealed() -> None:
    plain = fork_problem(3, 4)
    problem = Problem(plain.graph, plain.host, plain.costs, Grouping(np.arange(6)))
    timer = Counting(problem)
    found = find(problem, "portfolio", timer, Budget(700), seed=1)
    assert timer.count == 700
    assert found.step_time_s == pytest.approx(brute_force_s(problem), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["anneal", "evolve", "portfolio"])
@pytest.mark.parametrize("evaluations", [40, 400])
def test_no_search_is_worse_than_the_best_layout(method: str, evaluations: int) -> None:
    for num_devices, count, op_order in ((2, 2, "tilt"), (4, 4, "rank"), (3, 4, "backward-first")):
        problem = step_problem(cut_graph(layered_step(6), count), plain_host(num_devices), op_order)
        timer = Simulator(problem, threads=1)
        rows = np.stack([placement_of(problem, layout) for layout in layouts(problem)])
        found = find(problem, method, timer, Budget(evaluations), seed=2)
        assert found.evaluations <= evaluations
        assert found.step_time_s <= timer.step_times(rows).min()


def test_what_is_known_already_is_a_start() -> None:
    for problem in (fork_problem(5, 4), step_problem(cut_graph(layered_step(6), 4), plain_host(4))):
        timer = Simulator(problem, threads=1)
        best = find(problem, "portfolio", timer, Budget(2000), seed=1)
        again = find(problem, "portfolio", timer, Budget(2), seed=5, start=best.devices)
        assert best.plan is not None or again.step_time_s <= best.step_time_s


def layered_problem() -> Problem:
    """Sixty ops in at most twenty groups on three devices."""
    plain = synthetic_problem(60, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 20)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


def leader(task: Task) -> GreedyPlacement:
    """The best of the first weights over the problem's groups."""
    return score_greedy(task, FIRST_WEIGHTS, until=1.0)[0]


def test_tuned_weights_beat_the_first_ones() -> None:
    problem = layered_problem()
    simulator = Simulator(problem, threads=1)
    task = Task(problem, simulator, Budget(300), seed=1)
    first = leader(task)
    devices, step_s = tune(task, first, until=1.0)
    assert step_s < first.step_s
    assert step_s == task.best_s == simulator.step_times(devices[None])[0]


def test_tuning_neither_minds_nor_moves_the_global_generator() -> None:
    problem = layered_problem()

    def tuned(seed: int) -> tuple[float, float]:
        np.random.seed(seed)
        task = Task(problem, Simulator(problem, threads=1), Budget(evaluations=200))
        return tune(task, leader(task), until=1.0)[1], float(np.random.random())

    (first_s, first), (second_s, second) = tuned(1), tuned(2)
    assert first_s == second_s
    assert first == np.random.RandomState(1).random()
    assert second == np.random.RandomState(2).random()


def test_variations_beat_the_first_weights_and_are_the_same_for_every_seed() -> None:
    problem = layered_problem()
    found = []
    for seed in (1, 2):
        task = Task(problem, Counting(problem), Budget(1000), seed=seed)
        leaders = score_greedy(task, FIRST_WEIGHTS, until=1.0)
        before = task.evaluations
        varied = vary(task, leaders, until=1.0)
        assert before + VARIED <= task.evaluations < before + VARIED + POPULATION
        assert len({one.devices.tobytes() for one in varied}) == len(varied) == task.evaluations
        assert varied[0].step_s == task.best_s < leaders[0].step_s
        assert task.generator.random() == np.random.default_rng(seed).random()
        found.append(varied[0].devices)
    assert np.array_equal(*found)


def test_they_stop_at_their_share_of_the_budget() -> None:
    problem = layered_problem()
    task = Task(problem, Counting(problem), Budget(100), seed=1)
    leaders = score_greedy(task, FIRST_WEIGHTS, until=0.1)
    assert task.evaluations == 10
    leaders = vary(task, leaders, until=0.15)
    assert task.evaluations == 15
    tune(task, leaders[0], until=0.15 + (POPULATION - 1) / 100)
    assert task.evaluations == 15
    tune(task, leaders[0], until=0.5)
    assert task.evaluations == 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_spreads_what_does_not_fit(seed: int) -> None:
    problem = tight_problem(12, 3, seed)
    found = find(problem, "evolve", Simulator(problem, threads=1), Budget(400), seed=seed)
    assert found.devices is not None
    assert np.isfinite(found.step_time_s)


def problem_of(op_order: str = "rank") -> Problem:
    return step_problem(cut_graph(layered_step(8), 4), plain_host(4), op_order)


def test_starts_are_best_first_and_none_is_hopeless() -> None:
    problem = problem_of()
    task = Task(problem, Counting(problem), Budget(3000))
    starts = diverse_starts(task)
    times = [step_s for _, step_s in starts]
    assert times == sorted(times)
    assert times[-1] <= WORST * times[0]
    assert times == Simulator(problem, threads=1).step_times(np.stack([devices for devices, _ in starts])).tolist()


@pytest.mark.slow
def test_starts_are_timed_in_the_order_that_the_task_goes_on_with() -> None:
    for op_order in ("rank", "tilt", "backward-first"):
        problem = problem_of(op_order)
        simulator = Simulator(problem, threads=1)
        task = Task(problem, simulator, Budget(3000))
        before = diverse_starts(task)
        after = in_best_order(task, before)
        assert after[0][1] <= before[0][1]
        placements = np.stack([devices for devices, _ in after])
        assert simulator.step_times(placements, task.priorities).tolist() == [step_s for _, step_s in after]


def test_what_takes_no_plans_keeps_its_order() -> None:
    problem = problem_of()
    task = Task(problem, Counting(problem), Budget(3000))
    starts = diverse_starts(task)
    assert in_best_order(task, starts) == sorted(starts, key=lambda one: one[1])
    assert task.priorities is None


def test_where_nothing_fits_groups_are_balanced_by_bytes() -> None:
    problem = problem_of()
    tiny = tuple(dataclasses.replace(device, memory_bytes=10) for device in problem.host.devices)
    problem = dataclasses.replace(problem, host=dataclasses.replace(problem.host, devices=tiny))
    starts = diverse_starts(Task(problem, Counting(problem), Budget(1000)))
    assert np.isinf(starts[0][1])
    assert len(np.unique(starts[0][0])) == 4


def test_few_evaluations_on_many_devices_reach_what_hybrid_finds_with_as_many(tmp_path: Path) -> None:
    """Activations shrink and the last layers hold the parameters: most devices replicate the first ones."""
    sizes = (152, 3072, 768, 1536, 1536, 384, 768, 768, 768, 192, 384, 384, 384, 96, 96, 96, 96, 24, 4, 4, 1)
    work = (27, 254, 16, 82, 120, 7, 55, 85, 85, 4, 41, 70, 69, 2, 23, 23, 23, 1, 11, 2, 1)
    held = [2_000_000] * 18 + [97_500_000] + [2_000_000] * 2
    rows = [
        (units / 24, units / 12, size * 250_000, weights)
        for units, size, weights in zip(work, sizes, held, strict=True)
    ]
    problem = profile_problem(tmp_path, rows, 8, resolve_host("16x1xV100-25gbe"))
    simulator = Simulator(problem, threads=1)
    by_hand, found = (find(problem, method, simulator, Budget(300)) for method in ("hybrid", "portfolio"))
    assert found.evaluations <= 300
    assert found.step_time_s <= by_hand.step_time_s
