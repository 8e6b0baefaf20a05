"""All that knows or seeks an optimum, in one chain: bounds <= CP-SAT <= brute force = the best of the searches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_host, random_problem
from search_problems import barred, brute_force_s

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.bounds import lower_bounds
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.exact import cp_sat
from rlplace.search.registry import find
from rlplace.search.task import Budget

SEARCHES = ("portfolio", "anneal", "evolve", "genetic", "cem")
EVALUATIONS = 420
MORE = 5000
"""What each may spend in a second round, where none has found the optimum in the first."""
MOST_OPS = 8
MOST_PLACEMENTS = 3**MOST_OPS
EFFORT = 0.3
"""OR-Tools' deterministic time, in which it proves nearly all of these; of the others its bound is held."""
ROUNDING = 1e-6
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
