"""Annealing finds optima that brute force knows, within its budget, where it may."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from search_problems import Counting, barred, brute_force_s, chain_problem, fork_problem, tight_problem

from rlplace.errors import InvalidValue
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import AnnealConfig, anneal
from rlplace.search.improve.anneal import Rung
from rlplace.search.improve.coarsening import by_role
from rlplace.search.registry import find
from rlplace.search.task import Budget, Task

anneal_module = importlib.import_module("rlplace.search.improve.anneal")  # the package's `anneal` is the function


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_brute_force_optimum(seed: int) -> None:
    problem = fork_problem(seed)
    simulator = Simulator(problem, threads=1)
    start = np.zeros(6, dtype=np.int32)
    placement, step_s = anneal(problem, simulator, start, AnnealConfig(evaluations=3000, hot=0.3, seed=seed))
    assert step_s == pytest.approx(brute_force_s(problem), rel=1e-12)
    assert simulator.step_times(placement[None])[0] == step_s


def test_same_seed_same_answer_and_never_worse_than_its_start() -> None:
    problem = fork_problem(7)
    simulator = Simulator(problem, threads=1)
    start = np.array([0, 1, 0, 1, 0, 1], dtype=np.int32)
    first = anneal(problem, simulator, start, AnnealConfig(evaluations=200, seed=3))
    second = anneal(problem, simulator, start, AnnealConfig(evaluations=200, seed=3))
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1] <= simulator.step_times(start[None])[0]


def test_an_infeasible_start_is_left_behind_and_no_infeasible_placement_wins() -> None:
    problem = fork_problem(1)

    class OnlyMixed:
        def step_times(self, placements: np.ndarray) -> np.ndarray:
            mixed = placements.sum(axis=1)
            return np.where(mixed == 0, np.inf, mixed.astype(float))

    placement, step_s = anneal(problem, OnlyMixed(), np.zeros(6, dtype=np.int32), AnnealConfig(evaluations=500))
    assert step_s == 1.0
    assert placement.sum() == 1


@pytest.mark.parametrize("seed", range(5))
def test_it_spreads_what_does_not_fit(seed: int) -> None:
    problem = tight_problem(12, 3, seed)
    simulator = Simulator(problem, threads=1)
    full = np.zeros(12, dtype=np.int32)
    assert simulator.step_times(problem.grouping.expand(full)[None])[0] == np.inf
    placement, step_s = anneal(problem, simulator, full, AnnealConfig(evaluations=1500, seed=seed))
    assert np.isfinite(step_s)
    assert simulator.step_times(problem.grouping.expand(placement)[None])[0] == step_s


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


@pytest.mark.parametrize(("evaluations", "branches"), [(3000, 2), (9000, 4), (40_000, 8)])
def test_where_ops_repeat_the_best_of_short_annealings_goes_on(
    evaluations: int, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = unrolled(12)
    assert by_role(problem, 1).num_groups == 2
    calls: list[tuple[float, float, list[tuple[int, bool]]]] = []
    times = iter([*(5.0, 4.0, 7.0, 3.0, 6.0, 9.0, 8.0, 4.0)[:branches], 2.5])

    def descend(task: Task, devices: np.ndarray, step_s: float, rungs: list[Rung], *, until: float) -> object:
        calls.append((step_s, until, [(rung.grouping.num_groups, rung.reheat) for rung in rungs]))
        task.score(np.repeat(devices[None], int(until * evaluations) - task.evaluations, axis=0))
        return devices, next(times)

    monkeypatch.setattr(anneal_module, "_descend", descend)
    task = Task(problem, Counting(problem), Budget(evaluations))
    task.score(np.zeros((100, 24), dtype=np.int32))
    first, second, unfit = (np.full(24, device, dtype=np.int32) for device in (0, 1, 0))
    found = anneal_module.anneal_finer(task, first, 10.0, until=0.5, others=[(second, 11.0), (unfit, np.inf)])
    assert found[1] == 2.5
    assert [step_s for step_s, *_ in calls[:-1]] == [10.0, 11.0] * (branches // 2)
    begin = 100 / evaluations
    shares = [(until - begin) / (0.5 - begin) for _, until, _ in calls]
    assert shares == pytest.approx([*(0.6 * (k + 1) / branches for k in range(branches)), 1.0])
    assert calls[-1][0] == (4.0 if branches < 4 else 3.0)
    assert not any(reheat for _, reheat in calls[-1][2])
    assert calls[0][2] == [(24, True), (24, True)]  # roles of one op a part: there are only 24 ops


@pytest.mark.parametrize("problem", [unrolled(12, ""), fork_problem(3)], ids=["no modules", "no repeats"])
def test_elsewhere_it_goes_on_from_where_it_is(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[float] = []

    def descend(task: Task, devices: np.ndarray, step_s: float, rungs: object, *, until: float) -> object:
        starts.append(step_s)
        return devices, step_s

    monkeypatch.setattr(anneal_module, "_descend", descend)
    task = Task(problem, Counting(problem), Budget(5000))
    anneal_module.anneal_finer(task, np.zeros(problem.graph.num_ops, dtype=np.int32), 10.0, until=1.0)
    assert starts == [10.0]


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


def test_nonsense_options_are_refused() -> None:
    with pytest.raises(InvalidValue, match="evaluations"):
        AnnealConfig(evaluations=0)


def test_many_moves_start_hotter_and_end_as_cold() -> None:
    few, many, most = (AnnealConfig().temperatures(100, moves) for moves in (0.1, 2.0, 1e6))
    assert few == (pytest.approx(1e-3), pytest.approx(1e-4))
    assert many == (pytest.approx(4e-3), pytest.approx(1e-4))
    assert most == (pytest.approx(1.6e-2), pytest.approx(1e-4))
    assert AnnealConfig(hot=0.3).temperatures(100, 1e6) == (0.3, pytest.approx(0.03))


def test_moves_to_come_are_those_of_the_share_of_the_budget_that_is_left() -> None:
    problem = fork_problem(0)
    task = Task(problem, Simulator(problem, threads=1), Budget(evaluations=100))
    task.score(np.zeros((20, problem.graph.num_ops), dtype=np.int32))
    assert task.expected_evaluations(0.5) == pytest.approx(30)
    assert task.expected_evaluations(0.1) == 0
    timed = Task(problem, Simulator(problem, threads=1), Budget(seconds=1e6))
    timed.score(np.zeros((20, problem.graph.num_ops), dtype=np.int32))
    assert 0 < timed.expected_evaluations(1.0) < np.inf
