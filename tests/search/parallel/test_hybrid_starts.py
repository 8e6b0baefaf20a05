"""Searches that go on from hybrids: never worse than those, and with an order that suits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from layer_profiles import profile_problem
from random_problems import plain_host

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.hybrid import hybrid_start
from rlplace.search.registry import find
from rlplace.search.task import Budget, Task


def uneven_problem(folder: Path) -> Problem:
    """Two heavy layers with large outputs and few parameters, then one with little to do and many parameters."""
    rows = [(1000, 2000, 50, 2), (1000, 2000, 10, 2), (100, 200, 1, 3000)]
    return profile_problem(folder, rows, 8, plain_host(4))


def slow_links_problem(folder: Path) -> Problem:
    """A pipeline in which sending takes as long as a stage: it pays to have more under way than 1F1B, not all."""
    return profile_problem(folder, [(1000, 2000, 90, 300)] * 4, 8, plain_host(4))


@pytest.mark.parametrize("make", [uneven_problem, slow_links_problem])
def test_the_portfolio_is_never_worse_than_the_field(make: object, tmp_path: Path) -> None:
    problem = make(tmp_path)  # type: ignore[operator]
    simulator = Simulator(problem, threads=1)
    field = [find(problem, name, simulator, Budget(3000)) for name in ("data-parallel", "pipeline", "hybrid")]
    found = find(problem, "portfolio", simulator, Budget(3000))
    assert found.evaluations <= 3000
    assert found.step_time_s <= min(one.step_time_s for one in field)
    again = simulator.measure(found.devices)[0] if found.plan is None else simulator.retime(found.plan)
    assert again.step_time_s == found.step_time_s


@pytest.mark.slow
def test_stages_with_different_numbers_of_replicas_are_found(tmp_path: Path) -> None:
    """The layers with few parameters are replicated; the one with many stays on one device (PipeDream's VGG)."""
    problem = uneven_problem(tmp_path)
    found = find(problem, "hybrid", Simulator(problem, threads=1))
    assert found.devices is not None
    used = {
        layer: {int(found.devices[op]) for op, module in enumerate(problem.graph.modules) if module.endswith(layer)}
        for layer in ("l0", "l2")
    }
    assert len(used["l0"]) >= 2
    assert len(used["l2"]) == 1


def test_a_start_is_a_list_schedule(tmp_path: Path) -> None:
    problem = uneven_problem(tmp_path)
    simulator = Simulator(problem, threads=1)
    task = Task(problem, simulator, Budget(4000))
    devices, step_s, priorities = hybrid_start(task, until=0.5)
    assert float(simulator.step_times(devices[None], priorities)[0]) == step_s
    assert task.best_s <= step_s < np.inf
