"""`problem_summary` and `group_features`: what does not change with the numbers of devices, and what does with them."""

from __future__ import annotations

import numpy as np
import pytest
from fake_measurer import chain_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_batched import cut_graph, layered_step, step_problem
from permuted_devices import permuted
from random_problems import plain_host, random_problem

from rlplace.policy.schedule_network import GROUP_FEATURES, SUMMARY, group_features, problem_summary


def told(problem: object) -> dict[str, float]:
    return dict(zip(SUMMARY, problem_summary(problem).tolist(), strict=True))  # type: ignore[arg-type]


def test_a_chain_by_hand() -> None:
    """Four ops of a second and a byte on two devices; a byte takes 10 ms."""
    summary = told(chain_problem(4))
    assert summary["log_devices"] == pytest.approx(np.log(2))
    assert summary["critical_path_share"] == pytest.approx(1.0)
    assert summary["largest_op_share"] == pytest.approx(0.25)
    assert summary["device_speed_spread"] == summary["link_rate_spread"] == 0.0
    assert summary["log_transfer_share"] == pytest.approx(np.log(3 * 0.01 / 4))  # the last output has no reader
    assert summary["log_micro_batches"] == 0.0
    assert summary["unrolling"] == 0.0


def test_micro_batches_are_seen() -> None:
    graph = cut_graph(layered_step(3), 4)
    summary = told(step_problem(graph, plain_host(2)))
    assert summary["log_micro_batches"] == pytest.approx(np.log(4))
    assert summary["unrolling"] > told(step_problem(layered_step(3), plain_host(2)))["unrolling"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_numbering_of_devices_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 20)))
    turned = permuted(problem, rng.permutation(problem.host.num_devices).tolist())
    assert problem_summary(turned) == pytest.approx(problem_summary(problem), abs=1e-4)
    assert group_features(turned) == pytest.approx(group_features(problem), abs=1e-4)
    assert np.isfinite(problem_summary(problem)).all()
    assert group_features(problem).shape == (problem.grouping.num_groups, len(GROUP_FEATURES))
