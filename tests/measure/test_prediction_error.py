"""Figures of fidelity on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.prediction_error import PLACEMENT_KINDS, draw_mix, judge_fidelity
from rlplace.measure.problem import Problem


def test_perfect_predictions() -> None:
    times = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    peaks = np.ones((8, 2))
    figures = judge_fidelity(times, times, times, peaks, peaks)
    assert figures.spearman == figures.spearman_ceiling == figures.spearman_best_quartile == pytest.approx(1.0)
    assert figures.median_abs_rel_error == figures.p90_abs_rel_error == figures.pick_regret == 0.0


def test_errors_regret_and_ranks_by_hand() -> None:
    first = [1.0, 2.0, 4.0, 8.0]
    simulated = [2.2, 2.0, 4.0, 8.8]  # picks the second, which measures twice the best
    figures = judge_fidelity(simulated, first, [1.0, 2.0, 4.0, 8.0], np.array([[1.0, 0.0]]), np.array([[0.8, 0.0]]))
    assert figures.pick_regret == 1.0
    assert figures.median_abs_rel_error == pytest.approx(0.05)  # errors 1.2, 0, 0, 0.1
    assert figures.spearman == pytest.approx(0.8)  # one pair of neighbours swapped: 1 - 6 * 2 / (4 * 15)
    assert figures.peak_bytes_max_rel_error == pytest.approx(0.25)


def test_equal_times_have_no_rank_correlation() -> None:
    peaks = np.ones((8, 1))
    simulated = [1.0, 1.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0]  # the three that measured best are all one to the simulator
    times = [1.0, 1.1, 1.2, 4.0, 5.0, 6.0, 7.0, 8.0]
    figures = judge_fidelity(simulated, times, times, peaks, peaks)
    assert figures.spearman_best_quartile is None
    assert figures.spearman is not None
    assert 0.9 < figures.spearman < 1.0
    assert figures.spearman_ceiling_best_quartile == pytest.approx(1.0)


def test_the_mix_is_a_quarter_each_and_avoids_what_was_seen() -> None:
    graph = op_graph([[] for _ in range(12)])
    host = Host(
        "h",
        tuple(Device(f"d{k}", "k", "simulated", 1) for k in range(2)),
        (Link("a", 1.0), Link("b", 1.0)),
        (Route("d0", "d1", ("a",)), Route("d1", "d0", ("b",))),
    )
    problem = Problem(graph, host, Costs(np.ones((12, 2)), "estimated"), Grouping(np.arange(12)))
    best = np.arange(12, dtype=np.int32) % 2
    test, kinds = draw_mix(problem, best, 20, np.random.default_rng(0))
    assert [kinds.count(kind) for kind in PLACEMENT_KINDS] == [5, 5, 5, 5]
    assert test.shape == (20, 12)
    assert set(np.unique(test)) <= {0, 1}
    fit, _ = draw_mix(problem, best, 16, np.random.default_rng(1), unlike=test)
    assert not {row.tobytes() for row in fit} & {row.tobytes() for row in test}
    again, _ = draw_mix(problem, best, 20, np.random.default_rng(0))
    assert np.array_equal(test, again)


def test_constraints_that_leave_nothing_to_draw_are_said() -> None:
    host = Host(
        "h",
        tuple(Device(f"d{k}", "k", "simulated", 1) for k in range(2)),
        (Link("a", 1.0), Link("b", 1.0)),
        (Route("d0", "d1", ("a",)), Route("d1", "d0", ("b",))),
    )
    pinned = Problem(
        op_graph([[] for _ in range(3)]),
        host,
        Costs(np.ones((3, 2)), "estimated"),
        Grouping(np.arange(3)),
        allowed=np.array([[True, False]] * 3),
    )
    only = np.zeros((1, 3), dtype=np.int32)
    with pytest.raises(InvalidValue, match="0 of 4 that were not drawn before"):
        draw_mix(pinned, only[0], 4, np.random.default_rng(1), unlike=only)
