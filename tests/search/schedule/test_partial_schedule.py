"""The schedule under construction: any order of decisions ends the same, and its bound holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem
from schedule_stepper import Stepper, coarser

from rlplace.search.schedule.partial_schedule import DECISION_FEATURES, clear, new_schedules


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000))
def test_the_finished_schedule_does_not_depend_on_the_order_of_decisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 14)
    problem = replace(problem, grouping=coarser(rng, problem))
    count = problem.grouping.num_groups
    placement = rng.integers(0, problem.host.num_devices, count)
    forward = Stepper(problem)
    for _ in range(count):
        forward.decide(forward.next(), placement[forward.next()])
    for order in (np.arange(count)[::-1], rng.permutation(count)):
        shuffled = Stepper(problem).place(placement, order)
        for name in ("placed", "there_s", "end_s", "free_s", "busy_s", "finish_s", "bound_s", "position"):
            assert np.array_equal(getattr(shuffled, name), getattr(forward.state, name)), name


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000))
def test_the_bound_never_shrinks_and_is_the_finish_in_the_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 14)
    problem = replace(problem, grouping=coarser(rng, problem))
    placement = rng.integers(0, problem.host.num_devices, problem.grouping.num_groups)
    stepper = Stepper(problem)
    promised_s = [stepper.bounds.least_s]
    for group in rng.permutation(problem.grouping.num_groups).tolist():
        groups = np.array([group])
        features, _ = stepper.look(groups)
        delay = features[0, placement[group], DECISION_FEATURES.index("delay")]
        before_s = float(stepper.state.bound_s[0])
        promised_s.append(before_s + delay * stepper.layout.unit_s)
        stepper.decide(groups, placement[groups])
        assert before_s <= stepper.state.bound_s[0]
        assert stepper.state.finish_s[0] <= stepper.state.bound_s[0] + 1e-9
    finish_s = float(stepper.state.finish_s[0])
    assert finish_s == pytest.approx(float(stepper.state.bound_s[0]), rel=1e-9)
    assert max(promised_s) <= finish_s * (1 + 1e-9) + 1e-12


def test_what_is_cleared_is_as_new() -> None:
    problem = random_problem(np.random.default_rng(1), 12)
    stepper = Stepper(problem, num_episodes=2)
    stepper.place(np.zeros(12, dtype=np.int64), np.arange(12))
    clear(stepper.bounds, stepper.state)
    fresh = new_schedules(stepper.layout, stepper.bounds, 2)
    for name, array in stepper.state.to_dict().items():
        assert np.array_equal(array, getattr(fresh, name)), name
