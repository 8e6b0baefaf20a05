"""Layouts of steps whose ops are split into shards, and when a split is chosen."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from micro_batched import cut_graph, layered_step, step_problem
from numpy.typing import NDArray
from random_problems import plain_host
from torch import nn

from rlplace.errors import CaptureError, InvalidValue, RunnerError
from rlplace.graphs import FORWARD, OpGraph, SplitPlan, capture
from rlplace.measure import Problem, Simulator, resolve_host
from rlplace.measure.costs.costs import Costs
from rlplace.search.methods import METHODS, find
from rlplace.search.parallel.choose_micro_batches import (
    CLASSES,
    DUEL,
    SHARE,
    SPLIT_GAIN,
    SPLIT_SHARE,
    SPLITS,
    choose,
    shard_counts,
    shares_of,
    sized,
    spread_s,
)
from rlplace.search.parallel.hybrid import Field
from rlplace.search.parallel.layouts import Chain, Layout, layouts, placement_of, step_roles, teams_of
from rlplace.search.task import Budget, Task

PAIR, FOUR = "RTX4090+RTX3060", "4xA100-nvlink"


@cache
def step(count: int, parts: int | tuple[int, ...] | None, width: int = 64) -> OpGraph:
    """Two layers with a norm between them, whose hidden width is split, and a table that is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    split = None if parts is None else SplitPlan(("mlp",), parts)
    return capture(model, x, nn.functional.mse_loss, "adam", targets=y, micro_batches=count, split=split)


def problem_of(count: int, parts: int | tuple[int, ...] | None, host: str = FOUR) -> Problem:
    return Problem.estimate(step(count, parts, 1 << 16 if host == PAIR else 64), resolve_host(host))


def placed(problem: Problem, devices: list[list[int]], **changes: object) -> NDArray[np.int32]:
    chain = Chain.of(problem, step_roles(problem.graph))
    return placement_of(problem, dataclasses.replace(chain.layout(np.array(devices, dtype=np.int32)), **changes))


def test_teams_are_within_nodes() -> None:
    graph = step(1, 4)
    problem = Problem.estimate(graph, resolve_host("2x8xA100-ib"))
    assert teams_of(problem).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    eight = Problem.estimate(step(1, 8), resolve_host("2x8xA100-ib"))
    assert teams_of(eight).tolist() == [list(range(8)), list(range(8, 16))]


def test_the_largest_shard_is_on_the_fastest_device() -> None:
    assert teams_of(problem_of(1, (3, 1), PAIR)).tolist() == [[0, 1]]
    assert teams_of(problem_of(1, (1, 3), PAIR)).tolist() == [[1, 0]]


def test_updates_in_parts_are_data_parallelism_whose_parameters_all_devices_own() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(16, 8), torch.randn(16, 4)
    given = {"targets": y, "micro_batches": 4, "split": SplitPlan(("updates",), 4)}
    problem = Problem.estimate(capture(model, x, nn.functional.mse_loss, "adam", **given), resolve_host(FOUR))
    graph, devices = problem.graph, placed(problem, [[0]])
    is_whole = (graph.shard < 0) & (graph.micro_batch >= 0) & (graph.colocation < 0)
    assert np.array_equal(devices[is_whole], graph.micro_batch[is_whole])
    updates = [op for op in np.flatnonzero(graph.shard >= 0) if graph.targets[op].startswith("update.")]
    assert sorted(devices[updates].tolist()) == sorted(4 * [0, 1, 2, 3])  # weights and biases


def test_more_shards_than_devices_share_them() -> None:
    assert teams_of(problem_of(1, 4, PAIR)).tolist() == [[0, 0, 1, 1]]


def test_a_shard_is_on_its_device_and_whole_ops_on_the_first() -> None:
    problem = problem_of(1, 4)
    graph, devices = problem.graph, placed(problem, [[0]], owners="with-stage")
    assert np.array_equal(devices[graph.shard >= 0], graph.shard[graph.shard >= 0])
    assert not devices[graph.shard < 0].any()


def test_whole_parameters_are_spread_over_a_team() -> None:
    problem = problem_of(1, 4)
    graph, devices = problem.graph, placed(problem, [[0]])
    is_own = (graph.colocation >= 0) & (graph.shard < 0) & (graph.phases == FORWARD) & (graph.parameter_bytes > 0)
    classes = graph.colocation[is_own]
    whole = [one for one in classes if not (graph.shard[graph.colocation == one] >= 0).any()]
    homes = [int(devices[graph.colocation == one][0]) for one in whole]
    assert len(whole) == 5  # the second bias, the norm's two, the last layer's two
    assert set(homes) == {0, 1, 2, 3}
    assert not devices[(graph.shard < 0) & (graph.colocation < 0)].any()


def test_whole_ops_go_round_their_team() -> None:
    problem = problem_of(1, 4)
    graph, roles = problem.graph, step_roles(problem.graph)
    next_each = np.arange(roles.num_positions, dtype=np.int32)[roles.position]  # every place on the next device
    devices = placed(problem, [[0]], owners="with-stage", shift=next_each)
    is_shard = graph.shard >= 0
    assert np.array_equal(devices[is_shard], graph.shard[is_shard])
    assert np.array_equal(devices[~is_shard], roles.op_position[~is_shard] % 4)
    for one in range(int(graph.colocation.max()) + 1):
        assert len(set(devices[graph.colocation == one].tolist())) == 1


@pytest.mark.parametrize(("count", "expected"), [(1, 2), (2, 2), (4, 0)])
def test_whole_ops_go_round_where_micro_batches_are_too_few(count: int, expected: int) -> None:
    problem = problem_of(count, 4)
    roles = step_roles(problem.graph)
    found = [layout for layout in layouts(problem) if len(layout.shift)]
    assert len(found) == expected  # parameters owned both ways
    for layout in found:
        along = np.empty(roles.num_positions, dtype=np.int64)
        along[roles.position] = layout.shift
        assert along[0] == 0
        assert set(np.diff(along).tolist()) <= {0, 1}  # contiguous parts of the chain, none left out
        assert len(set((along % 4).tolist())) == 4


def test_micro_batches_take_turns_on_a_team_and_replicas_have_teams() -> None:
    problem = problem_of(4, 2)
    graph, devices = problem.graph, placed(problem, [[0, 1]])
    own = (graph.micro_batch >= 0) & (graph.colocation < 0)
    team = graph.micro_batch // 2
    slot = np.where(graph.shard >= 0, graph.shard, graph.micro_batch % 2)
    assert np.array_equal(devices[own], (2 * team + slot)[own])


def test_shards_of_an_op_have_one_place_in_the_chain() -> None:
    graph = step(1, 4)
    roles = step_roles(graph)
    assert roles.follows[graph.colocation < 0].tolist() == [0] * int((graph.colocation < 0).sum())
    gelu = [op for op in range(graph.num_ops) if "gelu.default" in graph.targets[op]]
    assert sorted(graph.shard[gelu]) == [0, 1, 2, 3]
    assert len(set(roles.op_position[gelu].tolist())) == 1
    assert len(set(roles.role[gelu].tolist())) == 4
    back = [op for op in range(graph.num_ops) if "gelu_backward" in graph.targets[op]]
    assert set(roles.op_position[back].tolist()) == set(roles.op_position[gelu].tolist())


def test_roles_of_whole_steps_are_as_before() -> None:
    graph = cut_graph(layered_step(3), 2)
    roles = step_roles(graph)
    assert roles.num_positions == 4
    assert np.array_equal(roles.follows, np.where(graph.colocation >= 0, -1, graph.micro_batch))


def test_layouts_are_grids_of_teams() -> None:
    found = {layout.devices.shape: layout for layout in layouts(problem_of(4, 2)) if not layout.is_across}
    assert set(found) == {(1, 2), (2, 1), (1, 1)}
    assert all(layout.teams.tolist() == [[0, 1], [2, 3]] for layout in found.values())
    assert "x 2 shards" in found[1, 2].name


def test_owners_of_shards_move_to_the_same_place_of_other_teams() -> None:
    problem = problem_of(4, 2)
    field = Field(Task(problem, Simulator(problem, threads=1), Budget(100), seed=0))
    layout: Layout = field.chain.layout(np.array([[0, 1]], dtype=np.int32))
    for members, device in field._other_owners(layout):
        shard = problem.graph.shard[members].max()
        assert shard < 0 or device % 2 == shard


@pytest.mark.parametrize(("count", "parts"), [(1, 4), (4, 2)])
def test_groups_keep_shards_and_micro_batches_apart(count: int, parts: int) -> None:
    problem = problem_of(count, parts)
    graph = problem.graph
    for group in range(problem.grouping.num_groups):
        own = problem.grouping.op_group == group
        assert len(set(graph.shard[own & (graph.colocation < 0)].tolist())) <= 1
        assert len(set(graph.micro_batch[own & (graph.colocation < 0)].tolist())) <= 1


def test_tensor_parallelism_needs_shards_and_is_no_slower_than_its_layouts() -> None:
    problem = problem_of(4, 2)
    simulator = Simulator(problem, threads=1)
    found = find(problem, "tensor-parallel", simulator)
    best = min(
        float(simulator.step_times(placement_of(problem, layout)[None])[0])
        for layout in layouts(problem)
        if len(layout.devices) == 1
    )
    assert found.step_time_s <= best
    with pytest.raises(InvalidValue, match=r"--split-parts P"):
        find(problem_of(4, None), "tensor-parallel", simulator)
    assert METHODS["hybrid-3d"].refusal(problem) is None
    assert find(problem, "hybrid-3d", simulator, Budget(200)).step_time_s < np.inf


def test_work_is_spread_by_speed() -> None:
    problem = step_problem(layered_step(4), plain_host(2, 1e12))  # twelve ops of a second each
    time_s = problem.costs.op_time_s * np.array([[1.0, 2.0]])
    assert spread_s(dataclasses.replace(problem, costs=Costs(time_s, "estimated"))) == pytest.approx(8.0)


def test_numbers_and_shares_of_shards_follow_the_host() -> None:
    assert shard_counts(problem_of(1, None, "2x8xA100-ib")) == [2, 4, 8]
    assert shard_counts(problem_of(1, None, FOUR)) == [2, 4]
    assert shares_of(problem_of(1, None, FOUR), 4) == 4
    shares = shares_of(problem_of(1, None, PAIR), 2)
    assert isinstance(shares, tuple)
    assert shares[0] > shares[1] == 1


def whole_or_split(count: int, plan: SplitPlan | None = None, *, gain: float) -> Problem:
    """A chain of layers of a second each, which no placement shortens; with shards, of `gain` seconds in all devices.

    A step with shards is as many independent ones as there are shards.
    """
    problem = problem_of(count, None if plan is None else plan.parts)
    time_s = np.where(problem.graph.is_source, 0.0, 1.0)[:, None] * np.ones((1, problem.host.num_devices))
    if plan is not None:
        time_s *= gain
    return dataclasses.replace(problem, costs=Costs(time_s, "estimated"))


def candidates(gain: float) -> tuple[dict[int, Callable[[], Problem]], Callable[[int, SplitPlan], Problem]]:
    return {1: lambda: whole_or_split(1, gain=gain)}, lambda count, plan: whole_or_split(count, plan, gain=gain)


def test_a_split_that_pays_is_chosen() -> None:
    heard: list[str] = []
    problems, split = candidates(0.1)
    chosen = choose(problems, evaluations=2000, say=heard.append, split=split)
    assert chosen.split is not None
    assert chosen.problem.graph.num_shards == chosen.split.num_shards
    assert chosen.devices is not None
    assert Simulator(chosen.problem).step_times(chosen.devices[None])[0] == chosen.step_time_s
    assert chosen.spent <= (SHARE + SPLIT_SHARE) * 2000 + 100
    assert "shards" in heard[-1]
    whole = problems[1]()
    together = np.zeros((1, whole.graph.num_ops), dtype=np.int32)
    assert chosen.step_time_s / SPLIT_GAIN <= chosen.unsplit_s <= Simulator(whole).step_times(together)[0]


def test_a_split_that_does_not_pay_costs_nothing_but_evaluations() -> None:
    problems, split = candidates(2.0)
    whole = choose(problems | {2: lambda: whole_or_split(2, gain=1.0)}, evaluations=2000)
    other = choose(problems | {2: lambda: whole_or_split(2, gain=1.0)}, evaluations=2000, split=split)
    assert other.split is None
    assert (other.num_micro_batches, other.op_order) == (whole.num_micro_batches, whole.op_order)
    assert other.step_time_s == other.unsplit_s == whole.step_time_s
    assert whole.devices is not None
    assert np.array_equal(other.devices, whole.devices)


def test_a_split_that_is_better_only_if_small_ops_are_as_efficient_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The invented costs say a tenth; by size, ops of a few kilobytes take a launch each, and shards are more of them.
    heard: list[str] = []
    problems, split = candidates(0.1)
    chosen = choose(problems, evaluations=2000, say=heard.append, split=split, by_size=True)
    assert chosen.split is None
    assert any("small ops are less efficient" in line for line in heard)
    monkeypatch.setattr("rlplace.search.parallel.choose_micro_batches.sized", lambda problem: problem)
    assert choose(problems, evaluations=2000, split=split, by_size=True).split is not None
    monkeypatch.setattr("rlplace.search.parallel.choose_micro_batches.sized", lambda problem: None)
    assert choose(problems, evaluations=2000, split=split, by_size=True).split is not None


def test_costs_by_size_need_devices_that_are_known() -> None:
    problem = problem_of(1, None)
    by_size = sized(problem)
    assert by_size is not None
    runs = ~problem.graph.is_source
    assert np.all(by_size.costs.op_time_s[runs] > problem.costs.op_time_s[runs])
    others = tuple(dataclasses.replace(device, kind="unheard of") for device in problem.host.devices)
    assert sized(dataclasses.replace(problem, host=dataclasses.replace(problem.host, devices=others))) is None


def test_no_split_is_captured_where_work_is_spread_evenly() -> None:
    def split(count: int, plan: SplitPlan) -> Problem:
        raise AssertionError("captured")

    even = step_problem(cut_graph(layered_step(4), 4), plain_host(2, 1e12))
    assert choose({4: lambda: even}, evaluations=1000, split=split).split is None


@pytest.mark.parametrize("error", [CaptureError, RunnerError])
def test_what_cannot_be_split_or_does_not_run_is_left_out(error: type[Exception]) -> None:
    def split(count: int, plan: SplitPlan) -> Problem:
        raise error("there is nothing to split")

    problems, _ = candidates(1.0)
    assert choose(problems, evaluations=1000, split=split).split is None


def test_only_the_best_plans_stay_in_memory() -> None:
    problems, _ = candidates(0.1)
    made: list[weakref.ref[Problem]] = []
    alive: list[int] = []

    def split(count: int, plan: SplitPlan) -> Problem:
        alive.append(sum(each() is not None for each in made))
        width = 64 + 8 * list(CLASSES).index(plan.classes) + 4 * (plan.reduce == "chunks")  # each its own graph
        problem = Problem.estimate(step(count, plan.parts, width), resolve_host(FOUR))
        time_s = np.where(problem.graph.is_source, 0.0, 0.1)[:, None] * np.ones((1, 4))
        problem = dataclasses.replace(problem, costs=Costs(time_s, "estimated"))
        made.append(weakref.ref(problem))
        return problem

    chosen = choose(problems, evaluations=2000, split=split)
    assert chosen.split is not None
    assert chosen.unsplit is not None
    assert chosen.unsplit.graph.num_shards == 1
    assert len(made) > SPLITS + 2
    assert max(alive) <= SPLITS


def test_shards_may_be_across_the_stages_of_whole_ops() -> None:
    problem = problem_of(4, 4)
    graph, roles = problem.graph, step_roles(problem.graph)
    across = [layout for layout in layouts(problem) if layout.is_across]
    assert {layout.devices.shape for layout in across} == {(4, 1), (2, 2)}
    for layout in across:
        devices, stages = placement_of(problem, layout), len(layout.devices)
        shards = graph.shard >= 0
        replica = np.where(graph.micro_batch >= 0, layout.replica[np.maximum(graph.micro_batch, 0)], -1)
        own = shards & (graph.colocation < 0) & (replica >= 0)
        assert np.array_equal(devices[own], layout.devices[graph.shard % stages, replica][own])
        whole = ~shards & (graph.colocation < 0) & (replica >= 0)
        assert np.array_equal(devices[whole], layout.devices[layout.role_stage[roles.role], replica][whole])


def test_a_split_that_is_not_clearly_better_is_searched_on_beside_the_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems, split = candidates(0.1)
    clear = choose(problems, evaluations=2000, split=split)
    monkeypatch.setattr("rlplace.search.parallel.choose_micro_batches.CLEAR", 1e-9)
    near = choose(problems, evaluations=2000, split=split)
    assert near.split is not None
    assert clear.spent < near.spent <= (SHARE + (1 + DUEL) * SPLIT_SHARE) * 2000 + 100
