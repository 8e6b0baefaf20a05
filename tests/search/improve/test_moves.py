"""Every move by hand on a chain, and what all moves respect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from search_problems import barred, chain_problem

from rlplace.graphs import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.groupings import main_modules
from rlplace.search.improve.moves import CLUSTER, COPY, MODULE, NEIGHBOUR, ONE, SWAP, WINDOW, Neighbourhood, Table


def only(kind: int) -> np.ndarray:
    chances = np.zeros(7)
    chances[kind] = 1.0
    return chances


def moved(
    problem: Problem,
    start: list[int],
    kind: int,
    *,
    count: int = 200,
    max_window: int = 4,
    table: Table | None = None,
) -> set[tuple]:
    rows = np.repeat(np.array(start, dtype=np.int32)[None], count, axis=0)
    near = Neighbourhood.of(problem, table=table)
    return {tuple(row) for row in near.propose(rows, np.random.default_rng(0), only(kind), max_window).tolist()}


def test_one_group_goes_to_each_other_device() -> None:
    assert moved(chain_problem(2, 3), [0, 1], ONE) == {(1, 1), (2, 1), (0, 0), (0, 2)}


def test_a_neighbour_s_device_is_taken_only_across_a_cut() -> None:
    # chain 0-1-2-3 cut between 1 and 2: either end of the cut joins the other
    assert moved(chain_problem(4, 2), [0, 0, 1, 1], NEIGHBOUR) == {(0, 1, 1, 1), (0, 0, 0, 1)}


def test_two_groups_change_places() -> None:
    assert moved(chain_problem(3, 3), [0, 1, 2], SWAP) == {(1, 0, 2), (0, 2, 1), (2, 1, 0)}


def test_a_window_is_consecutive_in_order_of_first_op() -> None:
    # groups numbered against their order: group 3 has op 0
    chain = chain_problem(4, 2)
    chain = Problem(chain.graph, chain.host, chain.costs, Grouping(np.array([3, 2, 1, 0])))
    for row in moved(chain, [0, 0, 0, 0], WINDOW):
        changed = np.flatnonzero(np.array(row)[::-1] == 1)  # in order of ops
        assert len(changed)
        assert np.all(np.diff(changed) == 1)
    assert (0, 0, 1, 1) in moved(chain, [0, 0, 0, 0], WINDOW)


def test_a_module_window_takes_the_groups_of_a_module_first() -> None:
    chain = chain_problem(4, 2)
    graph = replace(chain.graph, modules=("a", "b", "a", "b"))
    chain = Problem(graph, chain.host, chain.costs, chain.grouping)
    assert Neighbourhood.of(chain).module_order.tolist() == [0, 2, 1, 3]
    windows = moved(chain, [0, 0, 0, 0], MODULE)
    assert (1, 0, 1, 0) in windows
    assert (0, 1, 0, 1) in windows
    assert (1, 1, 0, 0) not in windows  # op 2 lies between them


def test_the_main_module_is_the_one_with_most_time() -> None:
    graph = replace(op_graph([[], [0], [1]]), modules=("x", "y", "y"))
    chain = chain_problem(3, 1)
    both = Problem(graph, chain.host, replace(chain.costs, op_time_s=np.array([[3.0], [1.0], [1.0]])), chain.grouping)
    assert main_modules(both, Grouping(np.array([0, 0, 0]))).tolist() == [0]
    assert main_modules(both, Grouping(np.array([0, 1, 1]))).tolist() == [0, 1]


def test_a_cluster_goes_with_the_neighbours_on_its_device() -> None:
    # moving 1 takes 0 and 2 along (not 3, which is no neighbour); moving an end takes its one neighbour
    assert moved(chain_problem(4, 2), [0, 0, 0, 0], CLUSTER) == {(1, 1, 0, 0), (1, 1, 1, 0), (0, 1, 1, 1), (0, 0, 1, 1)}


def cells(rows: list[int], columns: list[int]) -> Table:
    return Table(np.array(rows, dtype=np.int32), np.array(columns, dtype=np.int32))


def test_rows_go_where_the_next_one_is_cell_by_cell() -> None:
    """Two rows of three cells: the first column may stay, the others take the devices of the other row's cells."""
    found = moved(chain_problem(6, 6), [0, 1, 2, 3, 4, 5], COPY, table=cells([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]))
    whole = {(3, 4, 5, 3, 4, 5), (0, 4, 5, 3, 4, 5), (0, 1, 2, 0, 1, 2), (0, 1, 2, 3, 1, 2)}
    assert whole <= found
    single = {row for row in found if sum(a != b for a, b in zip(row, range(6), strict=True)) == 1}
    assert found == whole | single  # beyond the ends of the table there is no row: then one group goes elsewhere


def test_more_rows_than_one_go_together() -> None:
    start = [0] * 8 + [1] * 4
    found = moved(chain_problem(12, 2), start, COPY, table=cells(list(range(12)), [1] * 12), count=600)
    assert {(*[0] * first, *[1] * (12 - first)) for first in (6, 7, 9, 10)} <= found


def test_without_a_table_rows_are_none() -> None:
    assert moved(chain_problem(2, 3), [0, 1], COPY) == moved(chain_problem(2, 3), [0, 1], ONE)


@pytest.mark.parametrize("kind", range(7))
def test_barred_devices_are_never_proposed(kind: int) -> None:
    problem = barred(chain_problem(5, 3), {0: (0,), 1: (0, 2), 4: (1, 2)})
    table = cells([0, 0, 1, 1, 2], [0, 1, 0, 1, 0])
    for row in moved(problem, [0, 0, 1, 2, 2], kind, table=table):
        assert problem.group_allowed[np.arange(5), row].all()
        assert row[0] == 0


def test_where_nothing_may_move_nothing_does() -> None:
    problem = barred(chain_problem(2, 2), {0: (0,), 1: (1,)})
    assert moved(problem, [0, 1], WINDOW) == {(0, 1)}


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(0, 5), st.integers(0, 1000))
def test_every_move_changes_something_and_leaves_its_start_alone(start: list[int], kind: int, seed: int) -> None:
    near, row = Neighbourhood.of(chain_problem(6, 3)), np.array([start], dtype=np.int32)
    first = near.propose(row, np.random.default_rng(seed), only(kind), 3)
    again = near.propose(row, np.random.default_rng(seed), only(kind), 3)
    assert np.array_equal(first, again)
    assert row.tolist() == [start]
    assert first.tolist() != [start]


def test_a_block_of_a_coarser_level_moves_as_one() -> None:
    chain = chain_problem(4, 2)
    near = Neighbourhood.of(chain, coarse=[Grouping(np.array([0, 0, 1, 1]))])
    rows = np.zeros((200, 4), dtype=np.int32)
    found = {tuple(row) for row in near.propose(rows, np.random.default_rng(0), only(ONE), 4).tolist()}
    assert found == {(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1)}
    # only those of the block that are where the group is go with it
    rows[:, 1] = 1
    found = {tuple(row) for row in near.propose(rows, np.random.default_rng(0), only(NEIGHBOUR), 4).tolist()}
    assert found == {(1, 1, 0, 0), (0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 1, 1)}


def test_rows_that_no_group_begins_in_are_none() -> None:
    """Rows 0, 2 and 4 are next to each other where groups begin in those alone."""
    near = Neighbourhood.of(chain_problem(3, 2), table=cells([0, 2, 4], [1, 1, 1]))
    assert near.rows.tolist() == [0, 1, 2]


FOCUS = np.array([2], dtype=np.int32)


def focused(problem: Problem, start: list[int], kind: int, focus: np.ndarray = FOCUS, count: int = 200) -> set[tuple]:
    rows = np.repeat(np.array(start, dtype=np.int32)[None], count, axis=0)
    near = Neighbourhood.of(problem)
    generator = np.random.default_rng(0)
    return {tuple(r) for r in near.propose(rows, generator, only(kind), 4, focus=focus, focus_share=1.0).tolist()}


def test_a_focused_move_begins_with_a_group_of_the_focus() -> None:
    chain = chain_problem(5, 2)
    assert focused(chain, [0, 0, 0, 0, 0], ONE) == {(0, 0, 1, 0, 0)}
    assert focused(chain, [0, 1, 1, 0, 0], SWAP) == {(1, 1, 0, 0, 0), (0, 1, 0, 1, 0), (0, 1, 0, 0, 1), (0, 1, 0, 0, 0)}
    assert focused(chain, [0, 0, 1, 1, 1], CLUSTER) == {(0, 0, 0, 0, 1)}
    for row in focused(chain, [0, 0, 0, 0, 0], WINDOW) | focused(chain, [0, 0, 0, 0, 0], MODULE):
        assert row[2] == 1


def test_a_focused_group_joins_a_neighbour_or_the_neighbour_joins_it() -> None:
    chain = chain_problem(5, 3)
    expected = {(0, 0, 0, 2, 2), (0, 1, 1, 2, 2), (0, 0, 2, 2, 2), (0, 0, 1, 1, 2)}
    assert focused(chain, [0, 0, 1, 2, 2], NEIGHBOUR) == expected
    pinned = barred(chain, {2: (1,)})  # where the group itself may not go, the neighbour comes
    assert focused(pinned, [0, 0, 1, 2, 2], NEIGHBOUR) == {(0, 1, 1, 2, 2), (0, 0, 1, 1, 2)}


def test_a_share_of_the_moves_is_focused() -> None:
    chain, start = chain_problem(40, 2), np.zeros((4000, 40), dtype=np.int32)
    near, generator = Neighbourhood.of(chain), np.random.default_rng(0)
    rows = near.propose(start, generator, only(ONE), 4, focus=FOCUS, focus_share=0.6)
    assert np.mean(rows[:, 2] == 1) == pytest.approx(0.6 + 0.4 / 40, abs=0.03)
    plain = near.propose(start, generator, only(ONE), 4, focus=FOCUS[:0], focus_share=0.6)
    assert np.mean(plain[:, 2] == 1) < 0.1
