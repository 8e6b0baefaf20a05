"""Fixed weights over several groupings: each as the scheduler has it, scored once, best first, within their share.

Starts, projections and bytes, worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from bench_problems import synthetic_problem
from random_problems import plain_host
from search_problems import Counting, barred, chain_problem, fork_problem, tight_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.groupings import allowed_devices, balanced, fullness, held_bytes, kept_bytes, nested, room_bytes
from rlplace.search.improve import starting_points
from rlplace.search.improve.starting_points import (
    CROSSED,
    FIRST_WEIGHTS,
    GROUPINGS,
    MANY,
    START_WEIGHTS,
    Pair,
    Schedulers,
    best_start,
    best_start_with_greedy,
    evaluations_until,
    grouping_of,
    score_greedy,
    score_starts,
)
from rlplace.search.schedule.partial_schedule import FEATURES, Greedy
from rlplace.search.task import Budget, Task

CROSS = [(name, weights) for weights in START_WEIGHTS for name in CROSSED]


def layered_problem() -> Problem:
    """Ninety ops in at most thirty groups on three devices."""
    plain = synthetic_problem(90, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 30)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


@pytest.mark.parametrize("pairs", [CROSS, FIRST_WEIGHTS], ids=["crossed", "first"])
def test_all_weights_are_tried_each_over_its_grouping_and_equal_placements_once(pairs: Sequence[Pair]) -> None:
    problem = layered_problem()
    timer = Counting(problem)
    found = score_greedy(Task(problem, timer, Budget(1000)), pairs, until=1.0)
    levels, expected = nested(problem), []
    for name, weights in pairs:
        grouping = grouping_of(problem, levels, name)
        expected.append(grouping.expand(Greedy.of(problem, grouping).place(np.array(weights)))[0])
    assert {one.devices.tobytes() for one in found} == {row.tobytes() for row in expected}
    assert timer.count == len(found) == len(np.unique(np.stack(expected), axis=0))
    step_s = Simulator(problem, threads=1).step_times(np.stack([one.devices for one in found]))
    assert [one.step_s for one in found] == step_s.tolist() == sorted(step_s)


def test_the_lists_name_groupings_and_have_a_weight_for_every_feature() -> None:
    assert {*CROSSED, *(name for name, _ in FIRST_WEIGHTS)} <= set(GROUPINGS)
    rows = [*START_WEIGHTS, *(weights for _, weights in FIRST_WEIGHTS)]
    assert np.array(rows).shape == (len(rows), len(FEATURES))


def test_what_does_not_fit_comes_last_and_the_least_full_of_it_first() -> None:
    problem = tight_problem(12, 3)
    found = score_greedy(Task(problem, Simulator(problem, threads=1), Budget(1000)), CROSS, until=1.0)
    fits = [np.isfinite(one.step_s) for one in found]
    assert fits == sorted(fits, reverse=True)
    assert not all(fits)
    assert [one.loss for one in found] == sorted(one.loss for one in found)


@pytest.mark.slow
def test_the_start_is_the_best_of_all_and_the_same_for_every_seed() -> None:
    problem = layered_problem()
    for evaluations, others in ((1000, best_start), (MANY - 1, score_starts)):
        starts = []
        for seed in (1, 2):
            task = Task(problem, Simulator(problem, threads=1), Budget(evaluations), seed=seed)
            devices, step_s, leaders = best_start_with_greedy(task)
            assert step_s == task.best_s
            alone = Task(problem, Simulator(problem, threads=1), Budget(1000))
            others(alone)
            assert step_s == min(alone.best_s, leaders[0].step_s)
            starts.append(devices)
        assert np.array_equal(*starts)


@pytest.mark.parametrize(("evaluations", "begins"), [(MANY - 1, False), (MANY, True)])
def test_heuristics_begin_where_evaluations_are_many(
    evaluations: int, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Task] = []
    monkeypatch.setattr(starting_points, "HEURISTICS", (asked.append,))
    problem = layered_problem()
    best_start_with_greedy(Task(problem, Counting(problem), Budget(evaluations)))
    assert bool(asked) == begins


@pytest.mark.parametrize("evaluations", [8, 30])
def test_groups_balanced_by_bytes_fit_where_no_weights_do(evaluations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tight_problem(12, 3)
    gather = ("own", (0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0))
    monkeypatch.setattr(starting_points, "FIRST_WEIGHTS", (gather,) * 32)
    monkeypatch.setattr(starting_points, "START_WEIGHTS", ())
    task = Task(problem, Counting(problem), Budget(evaluations))
    devices, step_s, leaders = best_start_with_greedy(task)
    assert not any(np.isfinite(one.step_s) for one in leaders)
    assert np.isfinite(step_s)
    assert step_s == Simulator(problem, threads=1).step_times(devices[None])[0]


def test_a_spent_budget_still_gives_devices() -> None:
    problem = layered_problem()
    task = Task(problem, Counting(problem), Budget(100))
    task.stop()
    devices, _, leaders = best_start_with_greedy(task)
    assert devices.shape == (problem.graph.num_ops,)
    assert leaders == []


def test_they_keep_to_their_share() -> None:
    problem = layered_problem()
    timer = Counting(problem)
    task = Task(problem, timer, Budget(100))
    score_greedy(task, CROSS, until=0.07)
    assert timer.count == 7
    assert evaluations_until(task, 0.07) == 0
    assert evaluations_until(task, 0.5) == 43
    assert score_greedy(task, CROSS, until=0.07) == []


def test_groupings_are_the_problems_own_the_next_ones_modules_and_roles() -> None:
    problem = layered_problem()
    levels = nested(problem)
    found = {name: grouping_of(problem, levels, name) for name in GROUPINGS}
    assert found["own"] is problem.grouping
    assert found["finest"].num_groups == problem.graph.num_ops
    assert found["coarser"].num_groups < found["own"].num_groups < found["finer"].num_groups
    single = fork_problem(0, 2)
    whole = Problem(single.graph, single.host, single.costs, Grouping(np.zeros(single.graph.num_ops, dtype=np.int32)))
    for name in GROUPINGS:
        grouping = grouping_of(whole, nested(whole), name)
        assert len(grouping.op_group) == whole.graph.num_ops
        assert allowed_devices(whole, grouping).any(axis=1).all()


def test_a_scheduler_is_laid_out_once() -> None:
    schedulers = Schedulers(layered_problem())
    assert schedulers["roles"] is schedulers["roles"]
    assert schedulers["own"].grouping is not schedulers["finest"].grouping


def test_bytes_held_are_parameters_and_forward_outputs_and_fill_the_room_of_a_device() -> None:
    problem = tight_problem(2, 2)
    sizes = problem.graph.parameter_bytes[:2]
    kept = kept_bytes(problem, problem.grouping)
    assert kept.tolist() == (sizes + 1).tolist()  # one byte of its reader
    assert held_bytes(problem, problem.grouping).tolist() == (2 * sizes + 1).tolist()  # parameters weigh twice there
    room = room_bytes(problem)
    rows = np.array([[0, 1], [1, 1]], dtype=np.int32)
    assert fullness(kept, room, rows).tolist() == [max(kept) / room[0], kept.sum() / room[1]]


def test_balanced_puts_the_largest_on_the_emptiest_allowed_device() -> None:
    chain = chain_problem(4, 2, output_bytes=[4, 3, 2, 1])
    assert balanced(chain).tolist() == [0, 1, 1, 0]
    assert balanced(barred(chain, {1: (0,)})).tolist() == [0, 0, 1, 1]


def test_starts_are_scored_best_first_and_within_budget() -> None:
    chain = chain_problem(4, 2)
    timer = Counting(chain)
    starts, times = score_starts(Task(chain, timer, Budget(100)))
    assert np.all(np.diff(times) >= 0)
    assert len(np.unique(starts, axis=0)) == len(starts) == timer.count
    timer = Counting(chain)
    _, times = score_starts(Task(chain, timer, Budget(2)))
    assert timer.count == 2
    assert np.isfinite(times).sum() == 2


def test_a_search_without_a_budget_is_refused() -> None:
    chain = chain_problem(4, 2)
    with pytest.raises(InvalidValue, match="budget"):
        score_starts(Task(chain, Counting(chain)))


def test_the_best_start_is_over_ops_where_that_is_faster() -> None:
    fork = fork_problem(0, 2)
    together = Problem(fork.graph, fork.host, fork.costs, Grouping(np.zeros(fork.graph.num_ops, dtype=np.int32)))
    timer = Counting(together)
    task = Task(together, timer, Budget(100))
    devices, step_s = best_start(task)
    assert len(set(devices.tolist())) == 2
    assert step_s == task.best_s < score_starts(Task(together, Counting(together), Budget(100)))[1][0]
    assert timer.count == task.evaluations < 40


def test_heuristics_leave_most_of_the_budget() -> None:
    fork = fork_problem(0, 2)
    timer = Counting(fork)
    best_start(Task(fork, timer, Budget(10)))
    assert timer.count < 10


def test_one_device_of_a_kind_is_tried() -> None:
    chain = chain_problem(4, 3)
    starts, _ = score_starts(Task(chain, Counting(chain), Budget(100)))
    assert [row.tolist() for row in starts].count([0, 0, 0, 0]) == 1
    assert [1, 1, 1, 1] not in starts.tolist()
