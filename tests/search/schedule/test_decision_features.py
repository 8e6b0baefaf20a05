"""What is known of devices before a decision: the list scheduler's features, and what masks let."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_problem
from schedule_stepper import Stepper, coarser, pinned
from search_problems import tight_problem

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.schedule.partial_schedule import DECISION_FEATURES, FEATURES, MEMORY_MASKS, Greedy


def test_the_first_features_are_those_of_the_list_scheduler() -> None:
    assert DECISION_FEATURES[: len(FEATURES)] == FEATURES


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000))
def test_the_least_weighted_sum_of_features_is_what_the_list_scheduler_takes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = pinned(rng, random_problem(rng, 12))
    weights = rng.normal(size=(3, len(FEATURES)))
    for grouping in (problem.grouping, coarser(rng, problem)):
        if grouping is not problem.grouping:
            problem = replace(problem, grouping=grouping, allowed=None)
        placed = Greedy.of(problem).place(weights)
        stepper = Stepper(problem, num_episodes=3)
        for _ in range(grouping.num_groups):
            groups = stepper.next()
            features, _ = stepper.look(groups)
            value = np.einsum("bdf,bf->bd", features[..., : len(FEATURES)], weights)
            value[~stepper.layout.units.label_allowed[groups]] = np.inf
            taken = placed[stepper.episodes, groups]
            # the sums are added up in another order, so that near ties may go either way: the scheduler's is taken
            slack = 1e-9 * (1.0 + np.abs(features[..., : len(FEATURES)]) @ np.abs(weights[0])).max()
            assert (value[stepper.episodes, taken] <= value.min(axis=1) + slack).all()
            stepper.decide(groups, taken)
        assert np.array_equal(stepper.state.placed, placed)
        assert stepper.next().tolist() == [-1, -1, -1]


def resident(problem: Problem) -> np.ndarray:
    """(N,) bytes that are there before a step, op by op."""
    graph = problem.graph
    there = np.where(graph.is_source, np.bincount(graph.tensor_op, graph.tensor_bytes, graph.num_ops), 0)
    return there + graph.state_bytes


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100_000), st.sampled_from(MEMORY_MASKS))
def test_masks_are_pins_and_memory_and_never_empty(seed: int, memory_mask: str) -> None:
    rng = np.random.default_rng(seed)
    problem = pinned(rng, random_problem(rng, 12))
    stepper = Stepper(problem, memory_mask=memory_mask)
    devices = problem.host.devices
    pools = [device.memory_pool or device.name for device in devices]
    members = [[i for i, pool in enumerate(pools) if pool == of] for of in pools]
    need = {"resident": resident(problem), "held": stepper.layout.held, "none": np.full(12, -np.inf)}[memory_mask]
    used = np.zeros(len(devices))
    for _ in range(problem.grouping.num_groups):
        groups = stepper.next()
        group = int(groups[0])
        features, mask = stepper.look(groups)
        allowed = problem.group_allowed[group]
        lacking = np.array([
            sum(used[i] for i in row)
            + need[group]
            - (min(devices[i].memory_bytes for i in row) - sum(devices[i].context_bytes for i in row))
            for row in members
        ])  # fmt: skip
        lacking[~allowed] = np.inf
        expected = lacking <= 0 if lacking.min() <= 0 else np.arange(len(lacking)) == lacking.argmin()
        assert mask[0].tolist() == expected.tolist()
        assert features[0, :, DECISION_FEATURES.index("allowed")].tolist() == expected.tolist()
        device = int(rng.choice(np.flatnonzero(mask[0])))
        used[device] += need[group]
        stepper.decide(groups, np.array([device]))


def test_masked_decisions_fit_where_anything_does() -> None:
    problem = tight_problem(6, 3)
    stepper, rng = Stepper(problem, num_episodes=20), np.random.default_rng(0)
    for _ in range(6):
        groups = stepper.next()
        _, mask = stepper.look(groups)
        stepper.decide(groups, np.array([rng.choice(np.flatnonzero(row)) for row in mask]))
    placements = problem.grouping.expand(stepper.state.placed)
    masked = np.isfinite(Simulator(problem, threads=1).step_times(placements)).mean()
    free = np.isfinite(
        Simulator(problem, threads=1).step_times(problem.grouping.expand(problem.draw_groups(rng, 20)))
    ).mean()
    assert masked > free


def test_micro_batches_are_told_apart() -> None:
    graph = replace(op_graph([[], [], [0], [1], [2, 3]]), micro_batch=np.array([0, 1, 0, 1, -1]))
    problem = Problem(graph, plain_host(2), Costs(np.ones((5, 2)), "estimated"), Grouping(np.arange(5)))
    stepper = Stepper(problem)
    stepper.place(np.array([0, 1, 1, 0, 0]), np.array([0, 1]))
    features = {group: stepper.look(np.array([group]))[0][0] for group in (2, 3, 4)}
    share, index = DECISION_FEATURES.index("micro"), DECISION_FEATURES.index("micro_batch")
    assert [features[group][:, share].tolist() for group in (2, 3, 4)] == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert [features[group][0, index] for group in (2, 3, 4)] == [0.5, 1.0, 0.0]


def test_looking_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    problem = random_problem(rng, 14)
    placement = rng.integers(0, problem.host.num_devices, 14)
    seen, unseen = Stepper(problem), Stepper(problem)
    assert seen.bounds.has_source_groups
    for _ in range(13):
        groups = seen.next()
        for group in (groups, np.flatnonzero(seen.state.placed[0] < 0)[-1:]):
            seen.look(group)
        for stepper in (seen, unseen):
            stepper.decide(groups, placement[groups])
    assert np.array_equal(seen.look(seen.next())[0], unseen.look(unseen.next())[0])
