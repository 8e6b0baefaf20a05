"""Starts, projections and bytes, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from search_problems import Counting, barred, chain_problem, fork_problem, tight_problem

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.improve.warm_starts import (
    balanced,
    best_start,
    fullness,
    held_bytes,
    kept_bytes,
    room_bytes,
    score_starts,
)
from rlplace.search.task import Budget, Task


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
