"""What every search keeps to, and the optimum that brute force knows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host, random_host, random_problem
from search_problems import Counting, ToTheEnd, barred, brute_force_s, fork_problem, tight_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.warm_starts import try_all
from rlplace.search.parallel.layouts import layouts, placement_of
from rlplace.search.registry import find
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
