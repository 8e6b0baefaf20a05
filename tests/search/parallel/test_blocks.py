"""Runs of a chain as groups: aligned over micro-batches, with parameters and phases apart where asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host

from rlplace.measure.problem import Problem
from rlplace.search.improve.coarsening import atoms, meet
from rlplace.search.parallel.starts import chain_runs, run_groups, run_table
from rlplace.search.parallel.step_roles import step_roles


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
