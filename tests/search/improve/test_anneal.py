"""What a budget is annealed over, and that the method keeps to it, and to where ops may be.

Annealing over fixed groups finds optima that brute force knows, from wherever it starts.

Temperatures by hand; nonsense is refused.

Descending by blocks: to what no tried move improves, within its share, where it may, without a draw.

Runs of a chain as groups: aligned over micro-batches, with parameters and phases apart where asked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from bench_problems import synthetic_problem
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host
from search_problems import Counting, barred, brute_force_s, chain_problem, fork_problem, tight_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import AnnealSettings, anneal_from
from rlplace.search.groupings import allowed_devices, atoms, by_module, by_role, meet, split
from rlplace.search.improve import anneal as block_descent
from rlplace.search.improve.anneal import (
    MOST_SWEPT,
    SWEEP_SHARE,
    anneal_finer,
    blocks,
    chain_runs,
    ladder,
    run_groups,
    run_table,
    sweep,
)
from rlplace.search.improve.starting_points import MANY
from rlplace.search.methods import find
from rlplace.search.parallel.layouts import step_roles
from rlplace.search.task import Budget, Task


def test_the_method_keeps_to_its_budget_and_to_allowed_devices() -> None:
    problem = barred(fork_problem(2, 3), {0: (1,), 3: (0, 2), 5: (2,)})
    timer = Counting(problem)
    found = find(problem, "anneal", timer, Budget(301), seed=4)
    assert found.evaluations == timer.count == 301
    assert found.devices is not None
    assert problem.group_allowed[np.arange(6), found.devices].all()
    assert found.step_time_s == pytest.approx(brute_force_s(problem), rel=1e-12)
    again = find(problem, "anneal", Counting(problem), Budget(301), seed=4)
    assert again.history == found.history
    assert np.array_equal(again.devices, found.devices)


def unrolled(steps: int, module: str = "cell") -> Problem:
    """A chain of a cell of two ops, over so many steps; the second op runs faster on the second device."""
    chain = chain_problem(2 * steps, 2, output_bytes=[8, 4] * steps)
    costs = Costs(np.tile([[1.0, 1.0], [3.0, 2.0]], (steps, 1)), "estimated")
    return Problem(replace(chain.graph, modules=(module,) * 2 * steps), chain.host, costs, chain.grouping)


@pytest.mark.parametrize(("moves", "branches"), [(1000, 2), (2900, 2), (4000, 4), (40_000, 8)])
def test_where_ops_repeat_short_annealings_come_first_and_what_follows_is_not_heated_again(
    moves: int, branches: int
) -> None:
    problem = unrolled(12)
    assert by_role(problem, 1).num_groups == 2
    steps = ladder(problem, moves, AnnealSettings())
    assert steps.branches == branches
    # roles of one op a part: there are only 24 ops
    assert [(rung.grouping.num_groups, rung.reheat) for rung in steps.branch_rungs] == [(24, True), (24, True)]
    assert [rung.reheat for rung in steps.rungs] == [False, False, False]
    assert [blocks.num_groups for blocks in steps.rungs[0].blocks] == [1]


@pytest.mark.parametrize("problem", [unrolled(12, ""), fork_problem(3)], ids=["no modules", "no repeats"])
def test_elsewhere_it_goes_on_from_where_it_is(problem: Problem) -> None:
    steps = ladder(problem, 5000, AnnealSettings())
    assert steps.branches == 0
    assert all(rung.reheat for rung in steps.rungs)


def test_few_moves_have_one_level() -> None:
    steps = ladder(unrolled(12), 999, AnnealSettings())
    assert (steps.branches, len(steps.rungs)) == (0, 1)
    assert ladder(unrolled(12), 999, AnnealSettings(few_moves=500)).branches == 2


@pytest.mark.parametrize(("first_s", "second_s", "goes_on"), [(10.0, 11.0, 0), (11.0, 10.0, 1)])
def test_branches_start_in_turn_from_what_fits_and_the_best_goes_on(
    first_s: float, second_s: float, goes_on: int
) -> None:
    problem, asked = unrolled(12), []

    class NothingBetter:
        def step_times(self, placements: np.ndarray) -> np.ndarray:
            asked.extend(placements)
            return np.full(len(placements), 1e6)

    first, second = (np.full(24, device, dtype=np.int32) for device in (0, 1))
    # an op with its two neighbours: most of a placement stays as it was where annealing began
    settings = AnnealSettings(few_moves=50, most_branches=4, chances=(0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    task = Task(problem, NothingBetter(), Budget(400))
    others = [(second, second_s), (first, np.inf)]
    found, step_s = anneal_finer(task, first, first_s, until=1.0, others=others, settings=settings)
    assert step_s == 10.0
    assert found.tolist() == [goes_on] * 24
    began_at = [int(row.mean() > 0.5) for row in asked]
    share = int(400 * settings.branches_share / 4)
    expected = [0] * share + [1] * share + [0] * share + [1] * share + [goes_on] * (400 - 4 * share)
    assert began_at == expected


def test_branches_keep_to_the_budget_and_draw_the_same_from_the_same_seed() -> None:
    problem = unrolled(12)
    timer = Counting(problem)
    found = find(problem, "anneal", timer, Budget(2500), seed=1)
    assert found.evaluations == timer.count == 2500
    assert find(problem, "anneal", Counting(problem), Budget(2500), seed=1).history == found.history
    assert found.devices is not None
    assert Simulator(problem, threads=1).step_times(found.devices[None])[0] == found.step_time_s


def test_seconds_end_it_too() -> None:
    problem = fork_problem(2)
    found = find(problem, "anneal", Counting(problem), Budget(seconds=0.05))
    assert found.devices is not None
    assert found.evaluations > 0


def test_moves_to_come_are_those_of_the_share_of_the_budget_that_is_left() -> None:
    problem = fork_problem(0)
    task = Task(problem, Simulator(problem, threads=1), Budget(evaluations=100))
    task.score(np.zeros((20, problem.graph.num_ops), dtype=np.int32))
    assert task.expected_evaluations(0.5) == pytest.approx(30)
    assert task.expected_evaluations(0.1) == 0
    timed = Task(problem, Simulator(problem, threads=1), Budget(seconds=1e6))
    timed.score(np.zeros((20, problem.graph.num_ops), dtype=np.int32))
    assert 0 < timed.expected_evaluations(1.0) < np.inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_brute_force_optimum(seed: int) -> None:
    problem = fork_problem(seed)
    simulator = Simulator(problem, threads=1)
    start = np.zeros(6, dtype=np.int32)
    placement, step_s = anneal_from(
        problem, simulator, start, Budget(3000), seed=seed, settings=AnnealSettings(hot=0.3)
    )
    assert step_s == pytest.approx(brute_force_s(problem), rel=1e-12)
    assert simulator.step_times(placement[None])[0] == step_s


def test_same_seed_same_answer_and_never_worse_than_its_start() -> None:
    problem = fork_problem(7)
    simulator = Simulator(problem, threads=1)
    start = np.array([0, 1, 0, 1, 0, 1], dtype=np.int32)
    first = anneal_from(problem, simulator, start, Budget(200), seed=3)
    second = anneal_from(problem, simulator, start, Budget(200), seed=3)
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1] <= simulator.step_times(start[None])[0]


def test_an_infeasible_start_is_left_behind_and_no_infeasible_placement_wins() -> None:
    problem = fork_problem(1)

    class OnlyMixed:
        def step_times(self, placements: np.ndarray) -> np.ndarray:
            mixed = placements.sum(axis=1)
            return np.where(mixed == 0, np.inf, mixed.astype(float))

    placement, step_s = anneal_from(problem, OnlyMixed(), np.zeros(6, dtype=np.int32), Budget(500))
    assert step_s == 1.0
    assert placement.sum() == 1


def test_it_scores_no_more_than_its_budget_and_asks_for_critical_paths_of_what_it_scored() -> None:
    problem = fork_problem(3)

    class Recording(Simulator):
        scored: ClassVar[set[bytes]] = set()
        seen: ClassVar[set[bytes]] = set()
        count = 0

        def step_times(self, placements: np.ndarray, priorities: np.ndarray | None = None) -> np.ndarray:
            self.scored.update(row.tobytes() for row in placements)
            Recording.count += len(placements)
            return super().step_times(placements, priorities)

        def step_times_within(
            self, placements: np.ndarray, cutoff_s: np.ndarray, priorities: np.ndarray | None = None
        ) -> np.ndarray:
            self.scored.update(row.tobytes() for row in placements)
            Recording.count += len(placements)
            return super().step_times_within(placements, cutoff_s, priorities)

        def critical_ops(self, devices: np.ndarray, priorities: np.ndarray | None = None) -> np.ndarray:
            self.seen.add(devices.tobytes())
            return super().critical_ops(devices, priorities)

    anneal_from(problem, Recording(problem, threads=1), np.zeros(6, dtype=np.int32), Budget(200), seed=1)
    assert Recording.count == 200
    assert len(Recording.seen) > 1
    assert Recording.seen <= Recording.scored


@pytest.mark.parametrize("seed", range(5))
def test_it_spreads_what_does_not_fit(seed: int) -> None:
    problem = tight_problem(12, 3, seed)
    simulator = Simulator(problem, threads=1)
    full = np.zeros(12, dtype=np.int32)
    assert simulator.step_times(problem.grouping.expand(full)[None])[0] == np.inf
    placement, step_s = anneal_from(problem, simulator, full, Budget(1500), seed=seed)
    assert np.isfinite(step_s)
    assert simulator.step_times(problem.grouping.expand(placement)[None])[0] == step_s


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"hot": 0.1, "cold": 0.2}, "temperatures"),
        ({"cold": 0.0}, "temperatures"),
        ({"batch": 0}, "batch"),
        ({"critical_share": 1.5}, "critical_share"),
    ],
)
def test_nonsense_settings_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        AnnealSettings(**settings)


def test_many_moves_start_hotter_and_end_as_cold() -> None:
    few, many, most = (AnnealSettings().temperatures(100, moves) for moves in (0.1, 2.0, 1e6))
    assert few == (pytest.approx(1e-3), pytest.approx(1e-4))
    assert many == (pytest.approx(4e-3), pytest.approx(1e-4))
    assert most == (pytest.approx(1.6e-2), pytest.approx(1e-4))
    assert AnnealSettings(hot=0.3).temperatures(100, 1e6) == (0.3, pytest.approx(0.03))


def layered_problem() -> Problem:
    """Ninety ops in at most thirty groups on three devices."""
    plain = synthetic_problem(90, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 30)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


def test_no_block_is_better_elsewhere_when_it_ends_by_itself() -> None:
    problem = barred(fork_problem(2, 3), {0: (1,), 3: (0, 2), 5: (2,)})
    simulator = Simulator(problem, threads=1)
    start = problem.grouping.expand(np.array([1, 0, 0, 0, 0, 2], dtype=np.int32))
    start_s = float(simulator.step_times(start[None])[0])
    task = Task(problem, Counting(problem), Budget(10_000))
    devices, step_s = sweep(task, start, start_s, until=1.0)
    assert task.evaluations < MOST_SWEPT
    assert step_s == simulator.step_times(devices[None])[0] < start_s
    assert step_s == task.best_s
    for level in blocks(problem):
        parts = split(level, devices)
        for block, device in zip(*np.nonzero(allowed_devices(problem, parts)), strict=True):
            moved = np.where(parts.op_group == block, device, devices).astype(np.int32)
            assert simulator.step_times(moved[None])[0] >= step_s


def test_it_keeps_to_its_share_and_draws_nothing() -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    start_s = float(Simulator(problem, threads=1).step_times(start[None])[0])
    found = []
    for seed in (1, 2):
        task = Task(problem, Counting(problem), Budget(60), seed=seed)
        task.score(start)
        devices, step_s = sweep(task, start, start_s, until=41 / 60)
        assert task.evaluations == 1 + int(SWEEP_SHARE * 40)
        assert step_s < start_s
        assert task.generator.random() == np.random.default_rng(seed).random()
        found.append(devices)
    assert np.array_equal(*found)


def test_a_long_budget_is_left_to_annealing() -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    task = Task(problem, Counting(problem), Budget(100_000))
    sweep(task, start, 1e9, until=1.0, most=50)
    assert task.evaluations == 50


def test_what_does_not_fit_comes_back_as_it_is() -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    task = Task(problem, Counting(problem), Budget(100))
    devices, step_s = sweep(task, start, np.inf, until=1.0)
    assert devices is start
    assert np.isinf(step_s)
    assert task.evaluations == 0


def test_few_evaluations_are_not_spent_on_whole_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    start_s = float(Simulator(problem, threads=1).step_times(start[None])[0])
    asked = []
    monkeypatch.setattr(block_descent, "by_module", lambda *args: asked.append(args) or by_module(*args))
    for evaluations, begins in ((MANY - 1, 0), (MANY, 1)):
        sweep(Task(problem, Counting(problem), Budget(evaluations)), start, start_s, until=1.0)
        assert len(asked) == begins


def problem_of(num_layers: int = 4, count: int = 2) -> Problem:
    return step_problem(cut_graph(layered_step(num_layers), count), plain_host(2))


def groups_by_name(problem: Problem, count: int, **facts: bool) -> dict[str, int]:
    grouping = run_groups(problem, step_roles(problem.graph), count, **facts)
    return dict(zip(problem.graph.names, grouping.op_group.tolist(), strict=True))


def test_runs_have_equal_work() -> None:
    problem = problem_of()
    assert chain_runs(problem, step_roles(problem.graph), 2).tolist() == [0, 0, 1, 1, 1]
    assert chain_runs(problem, step_roles(problem.graph), 99).tolist() == [0, 1, 2, 3, 4]


def test_a_run_of_each_micro_batch_is_a_group_and_so_are_its_parameters() -> None:
    at = groups_by_name(problem_of(), 2)
    for k in (0, 1):
        assert at[f"op5/{k}"] == at[f"op6/{k}"] == at[f"op17/{k}"] != at[f"op7/{k}"]
    assert at["op5/0"] != at["op5/1"]
    assert at["op0"] == at["op1"] != at["op2"]
    assert at["op0"] not in (at["op5/0"], at["op5/1"])


def test_runs_of_all_micro_batches_hold_their_parameters_too() -> None:
    at = groups_by_name(problem_of(), 2, micro_batches=False)
    assert at["op0"] == at["op1"] == at["op5/0"] == at["op5/1"] == at["op6/0"] != at["op7/0"]
    assert set(at.values()) == {0, 1}


def test_phases_and_owners_are_apart_where_asked_for() -> None:
    at = groups_by_name(problem_of(), 2, phases=True, owners=True)
    assert at["op5/0"] == at["op6/0"] != at["op17/0"]
    assert len({at[f"op{layer}"] for layer in range(4)}) == 4


@pytest.mark.parametrize("facts", [{}, {"micro_batches": False}, {"phases": True, "owners": True}])
def test_groups_are_unions_of_atoms_that_may_be_somewhere(facts: dict[str, bool]) -> None:
    problem = problem_of(5, 4)
    allowed = np.ones((problem.graph.num_ops, 2), dtype=np.bool_)
    allowed[list(problem.graph.names).index("op7/1")] = [True, False]
    allowed[list(problem.graph.names).index("op8/1")] = [False, True]
    problem = dataclasses.replace(problem, allowed=allowed)
    grouping = run_groups(problem, step_roles(problem.graph), 2, **facts)
    assert meet(grouping, atoms(problem), "").num_groups == atoms(problem).num_groups
    dataclasses.replace(problem, grouping=grouping)  # no group is left without a device


def test_a_table_has_runs_by_micro_batches_and_owners_in_the_first_column() -> None:
    problem = problem_of()
    table, names = run_table(problem, step_roles(problem.graph), 2), problem.graph.names
    cell = dict(zip(names, zip(table.rows.tolist(), table.columns.tolist(), strict=True), strict=True))
    assert [cell[f"op5/{k}"] for k in (0, 1)] == [(0, 2), (0, 3)]  # a forward op of the first layer
    assert cell["op17/1"] == (0, 3)  # its backward goes with it
    assert cell["op0"] == (0, 0)  # and so does its parameter, which one device owns
    assert cell["op3"][0] == 1
