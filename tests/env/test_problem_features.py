from dataclasses import replace

import numpy as np
import pytest
from fake_measurer import chain_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph
from permuted_devices import permuted
from random_problems import plain_host, random_problem

from rlplace.env import problem_features
from rlplace.env.problem_features import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    LINK_FEATURES,
    NODE_FEATURES,
    PAIR_FEATURES,
    SUMMARY,
)
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD, UPDATE
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem

KINDS_OF_ARRAYS = ("nodes", "edges", "devices", "pairs", "links", "summary")


@pytest.fixture
def problem():
    # parameter 0 -> ops 1, 2 -> op 3 -> update 4; groups {0, 1}, {2}, {3, 4}
    graph = op_graph(
        [[], [0], [0], [1, 2], [3]],
        [80, 10, 20, 30, 40],
        targets=["parameter", "aten.mm.default", "aten.add.Tensor", "aten.mm.default", "update.sgd"],
        phases=[0, 0, 0, BACKWARD, UPDATE],
    )
    costs = Costs(np.array([[0, 0], [1, 2], [3, 6], [2, 4], [1, 2]], dtype=float), "estimated")
    return Problem(graph, plain_host(2), costs, Grouping(np.array([0, 0, 1, 2, 2])))


def column(features, name):
    return features.nodes[:, NODE_FEATURES.index(name)]


def test_columns_say_what_their_names_say(problem):
    features = problem_features(problem)
    # groups cost 1, 3, 3 on device 0 and twice that on device 1: mean costs 1.5, 4.5, 4.5, of which the mean is 3.5
    assert column(features, "cost") == pytest.approx(np.log1p(np.array([1.5, 4.5, 4.5]) / 3.5))
    assert column(features, "load_share") == pytest.approx(np.array([1.5, 4.5, 4.5]) / 5.25)
    assert column(features, "spread") == pytest.approx(np.log(2.0) * np.ones(3))
    assert column(features, "source_share").tolist() == [0.5, 0.0, 0.0]
    # longest path: op 2, 3, 4 take 4.5 + 3 + 1.5 = 9
    assert column(features, "path_before") == pytest.approx([0.0, 0.0, 0.5])
    assert column(features, "criticality") == pytest.approx([1.0, 1.0, 1.0])
    # by time: group 2 is two thirds a backward matmul, a third an update
    assert column(features, "is_backward") == pytest.approx([0, 0, 2 / 3], abs=1e-6)
    assert column(features, "kind_matmul") == pytest.approx([1, 0, 2 / 3], abs=1e-6)
    assert column(features, "kind_update") == pytest.approx([0, 0, 1 / 3], abs=1e-6)
    # 80 bytes of the parameter to groups 1, 10 and 20 bytes on to group 2, at 100 bytes a second
    assert list(zip(features.arrays.edge_source, features.arrays.edge_target, strict=True)) == [(0, 1), (0, 2), (1, 2)]
    assert features.edges[:, 0] == pytest.approx(np.log1p(np.array([0.8, 0.1, 0.2]) / 3.5))


def test_devices_pairs_and_links_say_what_their_names_say(problem):
    features = problem_features(problem)
    # everything takes 7 s and 14 s, 10.5 s on average
    assert features.devices[:, DEVICE_FEATURES.index("speed")] == pytest.approx(np.log([1.5, 0.75]))
    assert features.pairs[1, :, PAIR_FEATURES.index("relative_cost")] == pytest.approx(np.log([3 / 4.5, 6 / 4.5]))
    assert features.pairs[..., PAIR_FEATURES.index("fits")].all()
    mean_edge_s = (80 + 10 + 20) / 3 / 100.0
    assert features.links[0, 1, LINK_FEATURES.index("seconds")] == pytest.approx(np.log1p(mean_edge_s / 3.5))
    assert not features.links[[0, 1], [0, 1]].any()


def test_groups_are_ordered_by_their_first_op_that_is_no_source(problem):
    late = replace(problem, grouping=Grouping(np.array([0, 1, 2, 2, 0])))  # group 0: the parameter and the update
    assert problem_features(late).arrays.order.tolist()[-1] == 0


def test_units_do_not_matter(problem):
    slower = replace(
        problem,
        costs=Costs(problem.costs.op_time_s * 7, "estimated"),
        host=plain_host(2, bandwidth_bytes_per_s=100 / 7),
    )
    before, after = problem_features(problem), problem_features(slower)
    for name in KINDS_OF_ARRAYS:
        assert getattr(after, name) == pytest.approx(getattr(before, name), abs=1e-5), name


def test_no_width_depends_on_groups_or_devices(problem):
    other = problem_features(chain_problem(7, num_devices=5))
    features = problem_features(problem)
    for name in KINDS_OF_ARRAYS:
        assert getattr(features, name).shape[-1] == getattr(other, name).shape[-1], name
    widths = [len(names) for names in (NODE_FEATURES, EDGE_FEATURES, DEVICE_FEATURES, PAIR_FEATURES, LINK_FEATURES)]
    assert [getattr(features, name).shape[-1] for name in KINDS_OF_ARRAYS] == [*widths, len(SUMMARY)]


def test_micro_batches_are_seen():
    graph = replace(op_graph([[], [0], [0], [1, 2]]), micro_batch=np.array([-1, 0, 1, -1]))
    cut = Problem(graph, plain_host(2), Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))
    features = problem_features(cut)
    assert column(features, "shared").tolist() == [1, 0, 0, 1]
    assert column(features, "micro_batch").tolist() == [0, 0, 0.5, 0]
    assert features.summary[SUMMARY.index("log_micro_batches")] == 1.0


def test_equal_devices_are_counted():
    assert problem_features(chain_problem(3, num_devices=4)).twins().tolist() == [0, 1, 2, 3]
    uneven = replace(chain_problem(3, num_devices=3), costs=Costs(np.array([[1.0, 2.0, 1.0]] * 3), "estimated"))
    assert problem_features(uneven).twins().tolist() == [0, 0, 1]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_permuting_devices_permutes_what_is_seen_of_them(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 20)))
    order = rng.permutation(problem.host.num_devices)
    before, after = problem_features(problem), problem_features(permuted(problem, order))
    for name in ("nodes", "edges", "summary"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), abs=1e-4), name
    assert after.devices == pytest.approx(before.devices[order], abs=1e-4)
    assert after.pairs == pytest.approx(before.pairs[:, order], abs=1e-4)
    assert after.links == pytest.approx(before.links[np.ix_(order, order)], abs=1e-4)
    assert np.isfinite(before.nodes).all()
    assert np.isfinite(before.links).all()


def test_one_group_on_one_device():
    graph = fork_join(2, 2)
    alone = Problem(
        graph, plain_host(1), Costs(np.zeros((graph.num_ops, 1)), "estimated"), Grouping(np.zeros(graph.num_ops))
    )
    features = problem_features(alone)
    assert features.edges.shape == (0, 3)
    for name in KINDS_OF_ARRAYS:
        assert np.isfinite(getattr(features, name)).all(), name
