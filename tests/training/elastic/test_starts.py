"""A placement of one host as a placement of another."""

from __future__ import annotations

import numpy as np
import pytest
from elastic_hosts import simulated_host, without

from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.groupings import atoms
from rlplace.search.methods import find
from rlplace.search.rules.baselines import blocks
from rlplace.search.task import Budget
from rlplace.training.elastic.carried import carried_placement, match_devices

GRAPH = synthetic("fork_join", seed=4, stages=4, width=4, flops=1e9)
FOUR = simulated_host(*["fast"] * 4)


def problem_on(host: Host, constraints: Constraints | None = None) -> Problem:
    return Problem.estimate(GRAPH, host, num_groups=32, constraints=constraints)


@pytest.fixture(scope="module")
def best() -> np.ndarray:
    """A good placement on four devices."""
    problem = problem_on(FOUR)
    devices = find(problem, "portfolio", Simulator(problem, threads=1), Budget(600)).devices
    assert devices is not None
    assert len(np.unique(devices)) == 4
    return devices


def carried(problem: Problem, devices: np.ndarray, old: Host = FOUR) -> np.ndarray:
    match = match_devices(old, problem.host)
    found = carried_placement(problem, devices, match, Simulator(problem, threads=1))
    return problem.check_placement(found)


def test_on_more_devices_a_placement_stays_as_it_is(best: np.ndarray) -> None:
    assert (carried(problem_on(simulated_host(*["fast"] * 8)), best) == best).all()


def test_devices_that_are_called_otherwise_take_over(best: np.ndarray) -> None:
    old = simulated_host("fast", "slow", "fast", "fast")
    found = carried(problem_on(simulated_host("slow", "fast", "fast", "fast")), best, old)
    assert (found == np.array([1, 0, 2, 3])[best]).all()


def test_ops_of_a_device_that_is_gone_go_elsewhere_and_no_others_move(best: np.ndarray) -> None:
    problem = problem_on(without(FOUR, "gpu:1"))
    found = carried(problem, best)
    stayed = best != 1
    fine = atoms(problem)
    mixed = np.isin(fine.op_group, np.unique(fine.op_group[~stayed]))
    kept = np.array([0, -1, 1, 2])[best]
    assert (found[stayed & ~mixed] == kept[stayed & ~mixed]).all()
    simulator = Simulator(problem, threads=1)
    crowded = np.where(kept < 0, 0, kept).astype(np.int32)
    assert simulator.step_times(found[None])[0] <= simulator.step_times(crowded[None])[0]


def test_one_device_takes_everything(best: np.ndarray) -> None:
    assert (carried(problem_on(simulated_host("slow")), best) == 0).all()


def test_ops_go_where_the_user_wants_them(best: np.ndarray) -> None:
    pattern = GRAPH.names[int(np.flatnonzero(~GRAPH.is_source & (best != 2))[0])]
    constraints = Constraints.parse(pins=[f"{pattern}=gpu:2"])
    problem = problem_on(simulated_host(*["fast"] * 4), constraints)
    found = carried(problem, best)
    assert found[GRAPH.names.index(pattern)] == 2
    assert np.mean(found == best) > 0.8


def test_what_does_not_fit_is_still_a_placement() -> None:
    tight = simulated_host("fast", "fast", memory_bytes=4096)
    devices = blocks(problem_on(FOUR))
    found = carried(problem_on(tight), devices)
    assert set(np.unique(found)) <= {0, 1}
