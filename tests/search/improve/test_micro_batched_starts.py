"""Starts of several kinds, and the order of ops that is best for one of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host
from search_problems import Counting

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.micro_batched_starts import WORST, diverse_starts, in_best_order
from rlplace.search.task import Budget, Task


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
