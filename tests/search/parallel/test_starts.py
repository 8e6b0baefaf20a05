"""The layouts that searches start from."""

from __future__ import annotations

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host
from search_problems import Counting

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.layouts import layouts, placement_of
from rlplace.search.parallel.starts import BATCH, KEPT, first_layouts, parallel_starts
from rlplace.search.task import Budget, Task


def problem_of(num_layers: int = 6, count: int = 4, num_devices: int = 3) -> Problem:
    return step_problem(cut_graph(layered_step(num_layers), count), plain_host(num_devices))


def test_the_best_layouts_come_back_best_first() -> None:
    problem = problem_of()
    timer = Simulator(problem, threads=1)
    starts = parallel_starts(Task(problem, timer, Budget(2000)))
    times = [start.step_s for start in starts]
    assert 1 < len(starts) <= KEPT
    assert times == sorted(times)
    assert times == timer.step_times(np.stack([start.devices for start in starts])).tolist()
    rows = np.stack([placement_of(problem, layout) for layout in layouts(problem)])
    assert times[0] <= timer.step_times(rows).min()


def test_stages_are_moved_where_a_task_takes_no_plans() -> None:
    problem = problem_of(7, 4, 2)
    plain = parallel_starts(Task(problem, Simulator(problem, threads=1), Budget(4000)))
    moved = parallel_starts(Task(problem, Counting(problem), Budget(4000)))
    assert moved[0].step_s <= plain[0].step_s


@pytest.mark.parametrize("evaluations", [1, 20, 400])
def test_a_small_budget_is_kept(evaluations: int) -> None:
    problem = problem_of()
    task = Task(problem, Counting(problem), Budget(evaluations))
    assert parallel_starts(task)
    assert task.evaluations <= max(min(BATCH, evaluations), 0.4 * evaluations + BATCH)


def test_a_step_that_is_not_cut_has_none() -> None:
    problem = step_problem(layered_step(4), plain_host(2))
    assert parallel_starts(Task(problem, Simulator(problem, threads=1), Budget(100))) == []
    assert first_layouts(problem, 3) == []


def test_first_layouts_are_the_first() -> None:
    problem = problem_of()
    assert len(first_layouts(problem, 3)) == 3
    assert np.array_equal(first_layouts(problem, 1)[0], placement_of(problem, next(layouts(problem))))
