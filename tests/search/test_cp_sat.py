"""CP-SAT between the lower bounds and brute force, and by hand.

All that knows or seeks an optimum, in one chain: bounds <= CP-SAT <= brute force = the best of the searches.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from bench_problems import synthetic_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph
from random_problems import plain_host, random_host, random_priorities, random_problem
from search_problems import barred, brute_force_s

from rlplace.errors import MissingExtra
from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.measure.bounds import lower_bounds
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import cp_sat
from rlplace.search.methods import find
from rlplace.search.task import Budget, Task

ROUNDING = 1e-6
"""Time units are 2**-30 of the horizon, and every item of a path loses at most one."""


def test_delaying_an_op_beats_every_priority() -> None:
    # d1: x (5 s) is ready at 0; y (1 s) is ready at 2 and on it hangs z (6 s), which only d0 runs fast
    graph = op_graph([[], [0], [1], []], [100, 0, 1, 1])
    costs = Costs(np.array([[1.0, 99.0], [99.0, 1.0], [6.0, 99.0], [99.0, 5.0]]), "estimated")
    problem = Problem(graph, plain_host(2, 100.0), costs, Grouping(np.arange(4)))
    simulator = Simulator(problem, threads=1)
    every = np.array(np.unravel_index(np.arange(16), (2,) * 4)).T.astype(np.int32)
    # at once: x until 5, y until 6, z until 12
    assert simulator.step_times(every).min() == 12.0
    assert simulator.step_times(every, np.array([1.0, 4.0, 3.0, 2.0])).min() == 12.0
    solved = cp_sat.schedule(problem)
    assert solved.is_optimal
    assert solved.value_s == pytest.approx(9.0, rel=ROUNDING)  # y from 2 to 3, z until 9, x from 3 to 8


def test_a_transfer_is_sent_once_and_links_are_shared() -> None:
    # two ops of 5 s read one tensor of 2 s; the third device has the same way down as the second has up
    graph = op_graph([[], [0], [0]], [200, 1, 1])
    costs = Costs(np.repeat([[1.0], [5.0], [5.0]], 3, axis=1), "estimated")
    problem = Problem(graph, plain_host(3, 100.0), costs, Grouping(np.arange(3)))
    solved = cp_sat.schedule(problem, is_narrowed=False)
    assert solved.is_optimal
    assert solved.value_s == pytest.approx(8.0, rel=ROUNDING)  # one reader stays: 1 + 2 + 5
    assert Simulator(problem, threads=1).step_times(solved.placements[-1:])[0] == 8.0


def test_what_is_resident_must_fit() -> None:
    graph = op_graph([[], [], [0], [1, 2]], [60, 60, 40, 1], targets=["parameter", "parameter", "aten.op", "aten.op"])
    host = plain_host(2, 10.0)
    tight = replace(host, devices=tuple(replace(device, memory_bytes=110) for device in host.devices))
    problem = Problem(graph, tight, Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))
    solved = cp_sat.schedule(problem, is_narrowed=False)
    assert solved.is_optimal
    assert solved.value_s == pytest.approx(6.0, rel=ROUNDING)  # 1 + 4 (the 40 bytes) + 1
    none = replace(host, devices=tuple(replace(device, memory_bytes=50) for device in host.devices))
    solved = cp_sat.schedule(replace(problem, host=none))
    assert len(solved.placements) == 0
    assert solved.value_s == np.inf


def test_the_method_proves_the_optimum_of_a_fork_and_tells_its_bound() -> None:
    graph = fork_join(4, 1, 1)
    costs = Costs(np.ones((6, 2)), "estimated")
    problem = Problem(graph, plain_host(2, 1e6), costs, Grouping(np.arange(6)))
    found = find(problem, "cp-sat", Simulator(problem, threads=1), Budget(evaluations=100))
    assert found.step_time_s == pytest.approx(4.0, rel=1e-5)
    assert found.lower_bound_s == pytest.approx(found.step_time_s, rel=ROUNDING)
    again = find(problem, "cp-sat", Simulator(problem, threads=1), Budget(evaluations=100))
    assert np.array_equal(found.devices, again.devices)


def test_pins_are_kept_and_a_throughput_gets_no_bound() -> None:
    graph = fork_join(3, 1, 1)
    allowed = np.ones((5, 2), dtype=np.bool_)
    allowed[1:4, 0] = False
    problem = Problem(graph, plain_host(2, 1e6), Costs(np.ones((5, 2)), "estimated"), Grouping(np.arange(5)), allowed)
    task = Task(problem, Simulator(problem, objective="throughput", threads=1), Budget(evaluations=50))
    cp_sat.solve_cp_sat(task)
    assert task.best_devices is not None
    assert task.best_devices[1:4].tolist() == [1, 1, 1]
    assert task.lower_bound_s == 0.0


@pytest.mark.slow
def test_large_problems_are_scheduled_by_groups_without_a_bound() -> None:
    problem = synthetic_problem(200, 3)
    problem = replace(problem, grouping=group_ops(problem.graph, problem.costs.op_time_s.mean(axis=1), 60))
    task = Task(problem, Simulator(problem, threads=1), Budget(seconds=3.0))
    cp_sat.solve_cp_sat(task)
    assert np.isfinite(task.best_s)
    assert task.lower_bound_s == 0.0


def test_without_ortools_it_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtra, match="exact"):
        cp_sat.schedule(synthetic_problem(5, 2))


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_bounds_are_below_the_optimum_and_the_optimum_below_brute_force(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    devices = problem.host.num_devices
    some = rng.permutation(devices**num_ops)[:3000]
    placements = np.array(np.unravel_index(some, (devices,) * num_ops)).T.astype(np.int32)
    simulator = Simulator(problem, threads=1)
    times = (simulator.step_times(placements), simulator.step_times(placements, random_priorities(rng, num_ops)))
    best_s = float(np.minimum(*times).min())
    solved = cp_sat.schedule(problem, is_narrowed=False, effort=0.3)
    assert solved.bound_s <= best_s * (1 + 1e-9) + 1e-12
    assert solved.bound_s <= solved.value_s
    if solved.is_optimal:
        for name, bound_s in lower_bounds(problem).items():
            assert bound_s <= solved.value_s * (1 + ROUNDING) + 1e-12, name
    if len(some) == devices**num_ops and len(solved.placements):
        assert simulator.step_times(solved.placements).min() >= float(times[0].min())


SEARCHES = ("portfolio", "anneal", "evolve", "genetic", "cem")
EVALUATIONS = 420
MORE = 5000
"""What each may spend in a second round, where none has found the optimum in the first."""
MOST_OPS = 8
MOST_PLACEMENTS = 3**MOST_OPS
EFFORT = 0.3
"""OR-Tools' deterministic time, in which it proves nearly all of these; of the others its bound is held."""
"""Time units of CP-SAT are 2**-30 of the horizon, and every item of a path loses at most one."""


def drawn_problem(seed: int) -> Problem:
    """At most eight ops, every rule of the model in play; half of the time some live together, and half one is pinned.

    The size comes from the seed too: what hypothesis draws itself is a single op in every third example.
    """
    rng = np.random.default_rng(seed)
    num_ops = int(rng.integers(1, MOST_OPS + 1))
    host = random_host(rng)
    while host.num_devices**num_ops > MOST_PLACEMENTS:
        host = random_host(rng)
    problem = random_problem(rng, num_ops, host)
    if rng.random() < 0.5:
        together = rng.random(num_ops) < 0.4
        op_group = np.unique(np.where(together, num_ops, np.arange(num_ops)), return_inverse=True)[1]
        graph = replace(problem.graph, colocation=np.where(together, 0, -1))
        problem = replace(problem, graph=graph, grouping=Grouping(op_group))
    if rng.random() < 0.5:
        problem = barred(problem, {int(rng.integers(num_ops)): (int(rng.integers(host.num_devices)),)})
    return problem


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_bounds_cp_sat_brute_force_and_the_best_search_agree(seed: int) -> None:
    problem = drawn_problem(seed)
    optimum_s = brute_force_s(problem)
    solved = cp_sat.schedule(problem, is_narrowed=False, effort=EFFORT)  # not told the bounds that it is held against
    for name, bound_s in lower_bounds(problem).items():
        assert bound_s <= solved.value_s * (1 + ROUNDING) + 1e-12, name
    proven_s = solved.value_s if solved.is_optimal else solved.bound_s
    assert proven_s <= optimum_s * (1 + ROUNDING) + 1e-12
    # nobody can do better than brute force: each is the first to seek in a fifth of the problems, and the others
    # seek only what it has missed
    found_s = np.inf
    for turn in range(2 * len(SEARCHES)):
        method = SEARCHES[(seed + turn) % len(SEARCHES)]
        evaluations = EVALUATIONS if turn < len(SEARCHES) else MORE
        found = find(problem, method, Simulator(problem, threads=1), Budget(evaluations), seed=seed)
        assert found.step_time_s >= optimum_s, method
        found_s = min(found_s, found.step_time_s)
        if found_s == optimum_s:
            break
    assert found_s == optimum_s
