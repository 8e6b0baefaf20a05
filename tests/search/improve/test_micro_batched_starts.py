"""Starts of several kinds, and the order of ops that is best for one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from layer_profiles import profile_problem
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host
from search_problems import Counting

from rlplace.measure import resolve_host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.portfolio import WORST, diverse_starts, in_best_order
from rlplace.search.registry import find
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
