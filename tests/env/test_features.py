import numpy as np
import pytest
from micrographs import fork_join, op_graph
from random_problems import plain_host

from rlplace.env import graph_features
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD, UPDATE
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem


@pytest.fixture
def problem():
    # parameter 0 -> ops 1, 2 -> op 3 -> update 4; groups {0, 1}, {2}, {3, 4}
    graph = op_graph(
        [[], [0], [0], [1, 2], [3]],
        [80, 10, 20, 30, 40],
        targets=["parameter", "aten.op", "aten.op", "aten.op", "update.sgd"],
        phases=[0, 0, 0, BACKWARD, UPDATE],
    )
    costs = Costs(np.array([[0, 0], [1, 2], [3, 6], [2, 4], [1, 2]], dtype=float), "estimated")
    return Problem(graph, plain_host(2), costs, Grouping(np.array([0, 0, 1, 2, 2])))


def column(features, name):
    return features.node_features[:, features.names.index(name)]


def test_edges_join_groups_once(problem):
    features = graph_features(problem)
    assert list(zip(features.edge_source.tolist(), features.edge_target.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]


def test_costs_are_in_mean_groups(problem):
    # groups cost 1, 3, 3 on device 0 and twice that on device 1: the mean is 21 / 6 = 3.5
    features = graph_features(problem)
    assert features.group_cost == pytest.approx(np.array([[1, 2], [3, 6], [3, 6]]) / 3.5)
    assert features.group_cost.shape == (3, 2)


def test_features_are_standardised_and_finite(problem):
    features = graph_features(problem)
    assert features.node_features.dtype == np.float32
    assert features.node_features.shape == (3, len(features.names))
    assert np.isfinite(features.node_features).all()
    assert features.node_features.mean(axis=0) == pytest.approx(np.zeros(len(features.names)), abs=1e-6)
    spread = features.node_features.std(axis=0)
    assert np.all((np.abs(spread - 1) < 1e-5) | (spread == 0))


def test_columns_say_what_their_names_say(problem):
    features = graph_features(problem)
    # half of group 2 is backward and half update, the others are forward throughout
    assert np.argmax(column(features, "is_backward")) == 2
    assert column(features, "is_forward").tolist() == pytest.approx([2**-0.5, 2**-0.5, -(2**0.5)])
    # only group 0 holds a source and parameter bytes
    assert column(features, "is_source").tolist() == pytest.approx([2**0.5, -(2**-0.5), -(2**-0.5)])
    assert np.argmax(column(features, "log_parameter_bytes")) == 0
    # mean costs 0, 1.5, 4.5, 3, 1.5: the longest path goes through op 2, so group 0's op 0 and group 1 are critical
    after = column(features, "path_after")  # 9, 9, 4.5
    assert after[0] == pytest.approx(after[1])
    assert after[2] < after[0]


def test_relabelling_units_changes_nothing(problem):
    scaled = Problem(problem.graph, plain_host(2), Costs(problem.costs.op_time_s * 7, "estimated"), problem.grouping)
    before, after = graph_features(problem), graph_features(scaled)
    assert after.group_cost == pytest.approx(before.group_cost)
    assert after.node_features == pytest.approx(before.node_features, abs=1e-5)


def test_one_group_has_no_edges_and_no_features_to_tell_apart():
    graph = fork_join(2, 2)
    costs = Costs(np.ones((graph.num_ops, 1)), "estimated")
    problem = Problem(graph, plain_host(1), costs, Grouping(np.zeros(graph.num_ops)))
    features = graph_features(problem)
    assert features.edge_features.shape == (0, 2)
    assert not features.node_features.any()
