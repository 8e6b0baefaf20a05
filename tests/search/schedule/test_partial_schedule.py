"""The schedule under construction: `Greedy` step by step, any order of decisions, bounds, and what memory lets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_problem
from search_problems import barred, tight_problem

from rlplace.errors import UnknownName
from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.schedule.decision_features import DECISION_FEATURES, observe
from rlplace.search.schedule.greedy import FEATURES, Greedy
from rlplace.search.schedule.group_layout import GroupLayout, group_layout
from rlplace.search.schedule.partial_schedule import PartialSchedules, clear, decide, new_schedules, next_groups
from rlplace.search.schedule.schedule_bounds import MEMORY_MASKS, ScheduleBounds, schedule_bounds


class Stepper:
    """B schedules of a problem's groups, with features in float64."""

    def __init__(self, problem: Problem, num_episodes: int = 1, memory_mask: str = "resident") -> None:
        grouping = problem.grouping
        self.layout: GroupLayout = group_layout(problem, grouping)
        self.bounds: ScheduleBounds = schedule_bounds(problem, grouping, self.layout, memory_mask)
        self.state: PartialSchedules = new_schedules(self.layout, self.bounds, num_episodes)
        self.episodes = np.arange(num_episodes)

    def next(self) -> np.ndarray:
        groups = np.empty(len(self.episodes), dtype=np.int64)
        next_groups(self.layout, self.state, groups)
        return groups

    def look(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(groups), self.layout.op_time_s.shape[1])
        features, mask = np.full((*shape, len(DECISION_FEATURES)), np.nan), np.zeros(shape, dtype=np.bool_)
        observe(self.layout, self.bounds, self.state, self.episodes, groups, features, mask)
        return features, mask

    def decide(self, groups: np.ndarray, devices: np.ndarray) -> None:
        decide(self.layout, self.bounds, self.state, groups.astype(np.int64), devices.astype(np.int64))

    def place(self, placement: np.ndarray, order: np.ndarray) -> PartialSchedules:
        """The finished schedules of one placement, (G,), its groups decided in an order."""
        for group in order.tolist():
            groups = np.full(len(self.episodes), group)
            self.decide(groups, placement[groups])
        return self.state


def coarser(rng: np.random.Generator, problem: Problem) -> Grouping:
    """Groups of random ops, as many as half of them."""
    return Grouping(
        np.unique(rng.integers(0, problem.graph.num_ops // 2, problem.graph.num_ops), return_inverse=True)[1]
    )


def pinned(rng: np.random.Generator, problem: Problem) -> Problem:
    """`problem` with up to three ops that may be on one device only."""
    count = problem.graph.num_ops
    return barred(
        problem, {int(op): (int(rng.integers(problem.host.num_devices)),) for op in rng.integers(0, count, 3)}
    )


def test_the_first_features_are_those_of_the_list_scheduler() -> None:
    assert DECISION_FEATURES[: len(FEATURES)] == FEATURES


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
            value[~stepper.layout.allowed[groups]] = np.inf
            taken = placed[stepper.episodes, groups]
            # the sums are added up in another order, so that near ties may go either way: the scheduler's is taken
            slack = 1e-9 * (1.0 + np.abs(features[..., : len(FEATURES)]) @ np.abs(weights[0])).max()
            assert (value[stepper.episodes, taken] <= value.min(axis=1) + slack).all()
            stepper.decide(groups, taken)
        assert np.array_equal(stepper.state.placed, placed)
        assert stepper.next().tolist() == [-1, -1, -1]


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


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000))
def test_what_lacks_room_for_what_is_resident_does_not_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 16)
    placement = problem.draw_groups(rng, 1)[0]
    filled = Stepper(problem).place(placement, np.arange(16)).filled[0]
    if (filled > Stepper(problem).bounds.account_room).any():
        assert np.isinf(Simulator(problem, threads=1).step_times(placement[None])).all()


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


def test_a_mistyped_mask_is_named() -> None:
    with pytest.raises(UnknownName, match="resident"):
        Stepper(tight_problem(2, 2), memory_mask="residents")


def test_micro_batches_are_told_apart() -> None:
    graph = replace(op_graph([[], [], [0], [1], [2, 3]]), micro_batch=np.array([0, 1, 0, 1, -1]))
    problem = Problem(graph, plain_host(2), Costs(np.ones((5, 2)), "estimated"), Grouping(np.arange(5)))
    stepper = Stepper(problem)
    stepper.place(np.array([0, 1, 1, 0, 0]), np.array([0, 1]))
    features = {group: stepper.look(np.array([group]))[0][0] for group in (2, 3, 4)}
    share, index = DECISION_FEATURES.index("micro"), DECISION_FEATURES.index("micro_batch")
    assert [features[group][:, share].tolist() for group in (2, 3, 4)] == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert [features[group][0, index] for group in (2, 3, 4)] == [0.5, 1.0, 0.0]


def test_what_is_cleared_is_as_new() -> None:
    problem = random_problem(np.random.default_rng(1), 12)
    stepper = Stepper(problem, num_episodes=2)
    stepper.place(np.zeros(12, dtype=np.int64), np.arange(12))
    clear(stepper.bounds, stepper.state)
    fresh = new_schedules(stepper.layout, stepper.bounds, 2)
    for name, array in stepper.state._asdict().items():
        assert np.array_equal(array, getattr(fresh, name)), name


def test_looking_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    problem = random_problem(rng, 14)
    assert (group_layout(problem, problem.grouping).order.size) < 14  # there are groups of sources
    placement = rng.integers(0, problem.host.num_devices, 14)
    seen, unseen = Stepper(problem), Stepper(problem)
    for _ in range(13):
        groups = seen.next()
        for group in (groups, np.flatnonzero(seen.state.placed[0] < 0)[-1:]):
            seen.look(group)
        for stepper in (seen, unseen):
            stepper.decide(groups, placement[groups])
    assert np.array_equal(seen.look(seen.next())[0], unseen.look(unseen.next())[0])
