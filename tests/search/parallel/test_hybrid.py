"""Data-parallel, pipeline and hybrid: as good as trying all, within budgets, with answers that keep their order.

Searches that go on from hybrids: never worse than those, and with an order that suits.

The layouts that searches start from.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layer_profiles import profile_problem
from micro_batched import cut_graph, layered_step, step_problem
from micrographs import op_graph
from random_problems import plain_host
from search_problems import Counting, chain_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import METHODS, find
from rlplace.search.parallel.hybrid import (
    KEPT_LAYOUTS,
    LAYOUTS_BATCH,
    Field,
    StagePlan,
    first_layouts,
    hybrid_start,
    parallel_starts,
)
from rlplace.search.parallel.layouts import Layout, layouts, placement_of
from rlplace.search.task import Budget, Task

METHOD_NAMES = ("data-parallel", "pipeline", "hybrid")


def layers_problem(folder: Path, seed: int, *, speeds: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Problem:
    """Six unequal layers, four micro-batches, three devices whose links take part of a layer's time."""
    generator = np.random.default_rng(seed)
    rows = [
        (forward, 2 * forward, int(generator.integers(5, 60)), int(generator.integers(0, 200)))
        for forward in generator.uniform(200, 2000, 6).tolist()
    ]
    problem = profile_problem(folder, rows, 4, plain_host(3))
    times_s = problem.costs.op_time_s / np.array(speeds)
    return Problem(problem.graph, problem.host, Costs(times_s, "given"), problem.grouping)


def every_hybrid_s(problem: Problem) -> float:
    """The best over all contiguous stages, all their sets of devices, both owners and all orders."""
    field = Field(Task(problem, Simulator(problem, threads=1)))
    places, count = field.step.num_positions, problem.graph.num_micro_batches
    best = np.inf
    for stages in (1, 2, 3):
        for ends in itertools.combinations(range(1, places), stages - 1):
            stage_of = np.searchsorted(np.array(ends), np.arange(places), side="right").astype(np.int32)
            for line in itertools.permutations(range(3)):
                for cuts in itertools.combinations(range(1, 4), stages):
                    parts = np.split(np.array(line), cuts)[:stages]  # the rest stays idle
                    if any(sorted(part) != list(part) for part in map(list, parts)):
                        continue
                    table = np.array([part[np.arange(count) * len(part) // count] for part in parts], dtype=np.int32)
                    spread = Layout(table, stage_of[field.step.position], np.arange(count, dtype=np.int32))
                    for layout in (spread, replace(spread, owners="with-stage")):
                        best = min(best, field.try_orders(layout).step_s)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_hybrid_is_within_one_percent_of_trying_all(seed: int, tmp_path: Path) -> None:
    """Six layers on three devices; with unequal devices in half of the cases."""
    problem = layers_problem(tmp_path, seed, speeds=(1.0, 1.0, 1.0) if seed % 2 else (2.0, 1.0, 1.5))
    found = find(problem, "hybrid", Simulator(problem, threads=1))
    assert found.step_time_s <= 1.01 * every_hybrid_s(problem)


@pytest.mark.slow
def test_hybrid_is_never_worse_than_its_parts(tmp_path: Path) -> None:
    problem = layers_problem(tmp_path, 5)
    simulator = Simulator(problem, threads=1)
    times = {name: find(problem, name, simulator).step_time_s for name in METHOD_NAMES}
    assert times["hybrid"] <= min(times.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", METHOD_NAMES)
def test_the_answer_keeps_its_order(name: str, tmp_path: Path) -> None:
    problem = layers_problem(tmp_path, 6)
    simulator = Simulator(problem, threads=1)
    found = find(problem, name, simulator)
    assert found.plan is not None
    assert found.devices is not None
    assert found.plan.devices.tolist() == found.devices.tolist()
    assert simulator.retime(found.plan).step_time_s == found.step_time_s
    again = find(problem, name, simulator)
    assert again.plan is not None
    assert (again.plan.fingerprint, again.evaluations) == (found.plan.fingerprint, found.evaluations)


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("evaluations", [1, 7])
def test_budgets_are_kept(name: str, evaluations: int, tmp_path: Path) -> None:
    problem = layers_problem(tmp_path, 7)
    found = find(problem, name, Simulator(problem, threads=1), Budget(evaluations=evaluations))
    orders = 1 if found.devices is not None else len(OP_ORDERS)  # the budget is that of each
    assert 1 <= found.evaluations <= evaluations * orders


def one_op_each(count: int) -> OpGraph:
    """Micro-batches of one input and one op that reads it."""
    graph = op_graph([each for k in range(count) for each in ([], [2 * k])], targets=["input", "aten.op"] * count)
    return replace(graph, micro_batch=np.repeat(np.arange(count), 2))


@pytest.mark.parametrize(
    ("op_s", "count", "step_s", "num_used"),
    [
        ((1.0, 1.0, 10.0), 4, 2.0, 2),  # one of four on the slow device would take 10
        ((1.0, 1.0, 3.0), 4, 2.0, 2),
        ((1.0, 2.0, 9.0), 3, 2.0, 2),  # two on the first, one on the second
        ((1.0, 1.0, 1.0), 6, 2.0, 3),
        ((1.0, 10.0, 10.0), 2, 10.0, 2),  # data parallelism has two replicas at least
    ],
)
def test_data_parallelism_has_as_many_replicas_as_pay(
    op_s: tuple[float, ...], count: int, step_s: float, num_used: int
) -> None:
    graph, host = one_op_each(count), plain_host(3, 1e9)
    costs = Costs(np.where(graph.is_source[:, None], 0.0, np.array(op_s)), "estimated")
    problem = Problem(graph, host, costs, Grouping(np.arange(graph.num_ops)))
    found = find(problem, "data-parallel", Simulator(problem, threads=1))
    assert found.devices is not None
    assert (found.step_time_s, len(set(found.devices.tolist()))) == (pytest.approx(step_s), num_used)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_step_that_is_not_cut_is_refused(name: str) -> None:
    problem = chain_problem(3, 2)
    with pytest.raises(InvalidValue, match=rf"method {name}: micro_batches is 1, .* `--micro-batches K`"):
        find(problem, name, Simulator(problem, threads=1))
    assert METHODS[name].kind == "baseline"


@pytest.mark.slow
def test_pins_are_kept(tmp_path: Path) -> None:
    problem = layers_problem(tmp_path, 8)
    allowed = np.ones((problem.graph.num_ops, 3), dtype=np.bool_)
    allowed[[module == "node2.l1" for module in problem.graph.modules], 0] = False
    pinned = replace(problem, allowed=allowed)
    for name in METHOD_NAMES:
        found = find(pinned, name, Simulator(pinned, threads=1))
        assert found.devices is not None
        assert np.all(allowed[np.arange(len(allowed)), found.devices])


def test_plans_of_layouts_with_more_stages_than_places_have_a_team_a_stage(tmp_path: Path) -> None:
    problem = profile_problem(tmp_path, [(9.0, 18.0, 40_000, 10_000)] * 4, 2, 8)
    field = Field(Task(problem, Simulator(problem, threads=1)))
    plans = [StagePlan.of(layout, field.chain) for layout in field.candidates()]
    assert all(len(plan.teams) == len(plan.ends) + 1 for plan in plans)
    assert max(len(plan.teams) for plan in plans) <= field.step.num_positions
    assert all(list(plan.neighbours(field.step.num_positions, 1)) for plan in plans)


@pytest.mark.parametrize("method", [*METHOD_NAMES, "portfolio"])
def test_ops_that_are_all_in_co_location_classes_are_placed(method: str) -> None:
    graph = cut_graph(layered_step(3), 2)
    classes = np.arange(graph.num_ops, dtype=np.int32)
    problem = step_problem(replace(graph, colocation=classes), plain_host(2))
    found = find(problem, method, Simulator(problem), Budget(100))
    assert found.devices is not None
    assert np.array_equal(problem.check_placement(found.devices[None])[0], found.devices)


def uneven_problem(folder: Path) -> Problem:
    """Two heavy layers with large outputs and few parameters, then one with little to do and many parameters."""
    rows = [(1000, 2000, 50, 2), (1000, 2000, 10, 2), (100, 200, 1, 3000)]
    return profile_problem(folder, rows, 8, plain_host(4))


def slow_links_problem(folder: Path) -> Problem:
    """A pipeline in which sending takes as long as a stage: it pays to have more under way than 1F1B, not all."""
    return profile_problem(folder, [(1000, 2000, 90, 300)] * 4, 8, plain_host(4))


@pytest.mark.parametrize("make", [uneven_problem, slow_links_problem])
def test_the_portfolio_is_never_worse_than_the_field(make: object, tmp_path: Path) -> None:
    problem = make(tmp_path)  # type: ignore[operator]
    simulator = Simulator(problem, threads=1)
    field = [find(problem, name, simulator, Budget(3000)) for name in ("data-parallel", "pipeline", "hybrid")]
    found = find(problem, "portfolio", simulator, Budget(3000))
    assert found.evaluations <= 3000
    assert found.step_time_s <= min(one.step_time_s for one in field)
    again = simulator.measure(found.devices)[0] if found.plan is None else simulator.retime(found.plan)
    assert again.step_time_s == found.step_time_s


@pytest.mark.slow
def test_stages_with_different_numbers_of_replicas_are_found(tmp_path: Path) -> None:
    """The layers with few parameters are replicated; the one with many stays on one device (PipeDream's VGG)."""
    problem = uneven_problem(tmp_path)
    found = find(problem, "hybrid", Simulator(problem, threads=1))
    assert found.devices is not None
    used = {
        layer: {int(found.devices[op]) for op, module in enumerate(problem.graph.modules) if module.endswith(layer)}
        for layer in ("l0", "l2")
    }
    assert len(used["l0"]) >= 2
    assert len(used["l2"]) == 1


def test_a_start_is_a_list_schedule(tmp_path: Path) -> None:
    problem = uneven_problem(tmp_path)
    simulator = Simulator(problem, threads=1)
    task = Task(problem, simulator, Budget(4000))
    devices, step_s, priorities = hybrid_start(task, until=0.5)
    assert float(simulator.step_times(devices[None], priorities)[0]) == step_s
    assert task.best_s <= step_s < np.inf


def problem_of(num_layers: int = 6, count: int = 4, num_devices: int = 3) -> Problem:
    return step_problem(cut_graph(layered_step(num_layers), count), plain_host(num_devices))


def test_the_best_layouts_come_back_best_first() -> None:
    problem = problem_of()
    timer = Simulator(problem, threads=1)
    starts = parallel_starts(Task(problem, timer, Budget(2000)))
    times = [step_s for _, step_s in starts]
    assert 1 < len(starts) <= KEPT_LAYOUTS
    assert times == sorted(times)
    assert times == timer.step_times(np.stack([devices for devices, _ in starts])).tolist()
    rows = np.stack([placement_of(problem, layout) for layout in layouts(problem)])
    assert times[0] <= timer.step_times(rows).min()


def test_stages_are_moved_where_a_task_takes_no_plans() -> None:
    problem = problem_of(7, 4, 2)
    plain = parallel_starts(Task(problem, Simulator(problem, threads=1), Budget(4000)))
    moved = parallel_starts(Task(problem, Counting(problem), Budget(4000)))
    assert moved[0][1] <= plain[0][1]


@pytest.mark.parametrize("evaluations", [1, 20, 400])
def test_a_small_budget_is_kept(evaluations: int) -> None:
    problem = problem_of()
    task = Task(problem, Counting(problem), Budget(evaluations))
    assert parallel_starts(task)
    assert task.evaluations <= max(min(LAYOUTS_BATCH, evaluations), 0.4 * evaluations + LAYOUTS_BATCH)


def test_a_step_that_is_not_cut_has_none() -> None:
    problem = step_problem(layered_step(4), plain_host(2))
    assert parallel_starts(Task(problem, Simulator(problem, threads=1), Budget(100))) == []
    assert first_layouts(problem, 3) == []


def test_first_layouts_are_the_first() -> None:
    problem = problem_of()
    assert len(first_layouts(problem, 3)) == 3
    assert np.array_equal(first_layouts(problem, 1)[0], placement_of(problem, next(layouts(problem))))
