import numpy as np
import pytest
from fake_measurer import chain_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import plain_host, random_problem

from rlplace.env.problem_features import GroupArrays
from rlplace.measure.problem import Problem
from rlplace.policy.improver import STATE_FEATURES, PassArrays, PassState, replay


def arrays_of(problem: Problem) -> PassArrays:
    return PassArrays.of(GroupArrays.of(problem))


def column(features, name):
    return features[..., STATE_FEATURES.index(name)].tolist()


def test_features_are_those_worked_out_by_hand():
    # a chain 0 -> 1 -> 2 of one-second ops, one byte an edge, 1 byte a second and 0.5 s to begin; 1 is looked at while
    # 0 has been moved to device 1 and 2 is still on device 0
    chain = chain_problem(3)
    problem = Problem(chain.graph, plain_host(2, 1.0, 0.5), chain.costs, chain.grouping)
    state = PassState(arrays_of(problem), np.array([0, 0, 0]), 1)
    state.look(0)
    state.move(0, np.array([1]))
    features = state.look(1)[0]
    assert column(features, "stays") == [1, 0]
    assert column(features, "follows") == [0, 1]
    # one second is there already on either device; an even share is 1.5 s
    assert column(features, "load") == pytest.approx([2 / 1.5, 2 / 1.5])
    assert column(features, "load_above") == [0, 0]
    # it reads from device 1 and is read on device 0, over 1.5 s each way
    assert column(features, "cut_in") == pytest.approx([np.log1p(1.5), 0])
    assert column(features, "cut_out") == pytest.approx([0, np.log1p(1.5)])
    assert column(features, "cut") == [0, 0]
    assert column(features, "reads") == [0, 1]
    assert column(features, "readers") == [1, 0]
    # a byte of each group of a large memory
    assert column(features, "fullness") == pytest.approx([2 / (1 << 50)] * 2)


def test_costs_and_load_of_the_group_itself_do_not_count_twice():
    state = PassState(arrays_of(chain_problem(3)), np.array([0, 0, 1]), 1)
    features = state.look(1)[0]
    assert column(features, "load") == pytest.approx([2 / 1.5, 2 / 1.5])
    state = PassState(arrays_of(chain_problem(4)), np.array([0, 0, 0, 0]), 1)
    features = state.look(2)[0]
    assert column(features, "load") == pytest.approx([4 / 2, 1 / 2])
    assert column(features, "load_above") == pytest.approx([np.log1p(3), 0])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_a_replay_sees_what_the_steps_saw(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(1, 14)))
    arrays = arrays_of(problem)
    start, *rows = problem.draw_groups(rng, 5)
    placed = np.stack(rows)
    seen = replay(arrays, start, placed)
    state = PassState(arrays, start, len(placed))
    for group in arrays.order.tolist():
        assert state.look(group) == pytest.approx(seen[:, group], abs=1e-5)
        state.move(group, placed[:, group])
    assert np.array_equal(state.placed_BG, placed)
    assert np.isfinite(seen).all()
