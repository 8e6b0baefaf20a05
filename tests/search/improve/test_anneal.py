"""What a budget is annealed over, and that the method keeps to it, and to where ops may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_problems import Counting, barred, brute_force_s, chain_problem, fork_problem

from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import AnnealSettings
from rlplace.search.improve.anneal import anneal_finer, ladder
from rlplace.search.improve.coarsening import by_role
from rlplace.search.registry import find
from rlplace.search.task import Budget, Task


def test_the_method_keeps_to_its_budget_and_to_allowed_devices() -> None:
    problem = barred(fork_problem(2, 3), {0: (1,), 3: (0, 2), 5: (2,)})
    timer = Counting(problem)
    found = find(problem, "anneal", timer, Budget(301), seed=4)
    assert found.evaluations == timer.count == 301
    assert found.devices is not None
    assert problem.group_allowed[np.arange(6), found.devices].all()
    assert found.step_time_s == pytest.approx(brute_force_s(problem), rel=1e-12)
    again = find(problem, "anneal", Counting(problem), Budget(301), seed=4)
    assert again.history == found.history
    assert np.array_equal(again.devices, found.devices)


def unrolled(steps: int, module: str = "cell") -> Problem:
    """A chain of a cell of two ops, over so many steps; the second op runs faster on the second device."""
    chain = chain_problem(2 * steps, 2, output_bytes=[8, 4] * steps)
    costs = Costs(np.tile([[1.0, 1.0], [3.0, 2.0]], (steps, 1)), "estimated")
    return Problem(replace(chain.graph, modules=(module,) * 2 * steps), chain.host, costs, chain.grouping)


@pytest.mark.parametrize(("moves", "branches"), [(1000, 2), (2900, 2), (4000, 4), (40_000, 8)])
def test_where_ops_repeat_short_annealings_come_first_and_what_follows_is_not_heated_again(
    moves: int, branches: int
) -> None:
    problem = unrolled(12)
    assert by_role(problem, 1).num_groups == 2
    steps = ladder(problem, moves, AnnealSettings())
    assert steps.branches == branches
    # roles of one op a part: there are only 24 ops
    assert [(rung.grouping.num_groups, rung.reheat) for rung in steps.branch_rungs] == [(24, True), (24, True)]
    assert [rung.reheat for rung in steps.rungs] == [False, False, False]
    assert [blocks.num_groups for blocks in steps.rungs[0].blocks] == [1]


@pytest.mark.parametrize("problem", [unrolled(12, ""), fork_problem(3)], ids=["no modules", "no repeats"])
def test_elsewhere_it_goes_on_from_where_it_is(problem: Problem) -> None:
    steps = ladder(problem, 5000, AnnealSettings())
    assert steps.branches == 0
    assert all(rung.reheat for rung in steps.rungs)


def test_few_moves_have_one_level() -> None:
    steps = ladder(unrolled(12), 999, AnnealSettings())
    assert (steps.branches, len(steps.rungs)) == (0, 1)
    assert ladder(unrolled(12), 999, AnnealSettings(few_moves=500)).branches == 2


@pytest.mark.parametrize(("first_s", "second_s", "goes_on"), [(10.0, 11.0, 0), (11.0, 10.0, 1)])
def test_branches_start_in_turn_from_what_fits_and_the_best_goes_on(
    first_s: float, second_s: float, goes_on: int
) -> None:
    problem, asked = unrolled(12), []

    class NothingBetter:
        def step_times(self, placements: np.ndarray) -> np.ndarray:
            asked.extend(placements)
            return np.full(len(placements), 1e6)

    first, second = (np.full(24, device, dtype=np.int32) for device in (0, 1))
    # an op with its two neighbours: most of a placement stays as it was where annealing began
    settings = AnnealSettings(few_moves=50, most_branches=4, chances=(0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    task = Task(problem, NothingBetter(), Budget(400))
    others = [(second, second_s), (first, np.inf)]
    found, step_s = anneal_finer(task, first, first_s, until=1.0, others=others, settings=settings)
    assert step_s == 10.0
    assert found.tolist() == [goes_on] * 24
    began_at = [int(row.mean() > 0.5) for row in asked]
    share = int(400 * settings.branches_share / 4)
    expected = [0] * share + [1] * share + [0] * share + [1] * share + [goes_on] * (400 - 4 * share)
    assert began_at == expected


def test_branches_keep_to_the_budget_and_draw_the_same_from_the_same_seed() -> None:
    problem = unrolled(12)
    timer = Counting(problem)
    found = find(problem, "anneal", timer, Budget(2500), seed=1)
    assert found.evaluations == timer.count == 2500
    assert find(problem, "anneal", Counting(problem), Budget(2500), seed=1).history == found.history
    assert found.devices is not None
    assert Simulator(problem, threads=1).step_times(found.devices[None])[0] == found.step_time_s


def test_seconds_end_it_too() -> None:
    problem = fork_problem(2)
    found = find(problem, "anneal", Counting(problem), Budget(seconds=0.05))
    assert found.devices is not None
    assert found.evaluations > 0


def test_moves_to_come_are_those_of_the_share_of_the_budget_that_is_left() -> None:
    problem = fork_problem(0)
    task = Task(problem, Simulator(problem, threads=1), Budget(evaluations=100))
    task.score(np.zeros((20, problem.graph.num_ops), dtype=np.int32))
    assert task.expected_evaluations(0.5) == pytest.approx(30)
    assert task.expected_evaluations(0.1) == 0
    timed = Task(problem, Simulator(problem, threads=1), Budget(seconds=1e6))
    timed.score(np.zeros((20, problem.graph.num_ops), dtype=np.int32))
    assert 0 < timed.expected_evaluations(1.0) < np.inf
