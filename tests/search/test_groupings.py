"""Groups on the devices of their ops, worked out by hand.

Finer groupings cut and never join; coarser ones join and never cut; both by hand and at random.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from bench_problems import synthetic_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_problem
from search_problems import barred, chain_problem

from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.groupings import (
    allowed_devices,
    atoms,
    by_module,
    by_role,
    coarser,
    finer,
    majority_devices,
    meet,
    nested,
    split,
)


def grouped_chain() -> Problem:
    """Four ops of 5, 1, 1 and 1 seconds, the first three in one group."""
    chain = chain_problem(4, 2)
    costs = Costs(np.array([[5.0, 5.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), "estimated")
    return Problem(chain.graph, chain.host, costs, Grouping(np.array([0, 0, 0, 1])))


def test_a_group_goes_where_most_of_its_time_is_unless_it_may_not() -> None:
    problem = grouped_chain()
    devices = np.array([1, 0, 0, 0], dtype=np.int32)
    assert majority_devices(problem, devices).tolist() == [1, 0]
    assert majority_devices(barred(problem, {1: (0,)}), devices).tolist() == [0, 0]
    assert majority_devices(problem, devices, Grouping(np.arange(4))).tolist() == devices.tolist()


def test_equal_times_go_to_the_first_device_and_ops_without_time_count_too() -> None:
    problem = grouped_chain()
    assert majority_devices(problem, np.array([0, 0, 1, 1]), Grouping(np.array([0, 1, 1, 2]))).tolist() == [0, 0, 1]
    free = Problem(problem.graph, problem.host, Costs(np.zeros((4, 2)), "estimated"), problem.grouping)
    assert majority_devices(free, np.array([0, 1, 1, 0], dtype=np.int32)).tolist() == [1, 0]


def test_a_group_may_be_where_all_of_its_ops_may() -> None:
    problem = barred(grouped_chain(), {1: (0,), 3: (1,)})
    assert allowed_devices(problem, problem.grouping).tolist() == [[True, False], [False, True]]
    alone = allowed_devices(problem, Grouping(np.arange(4)))
    assert alone.tolist() == [[True, True], [True, False], [True, True], [False, True]]


def test_a_meet_by_hand() -> None:
    met = meet(Grouping(np.array([1, 1, 0, 0])), Grouping(np.array([0, 1, 1, 1])), "both")
    assert met.op_group.tolist() == [0, 1, 2, 2]
    assert met.rule == "both"


def test_a_split_by_devices_by_hand() -> None:
    cut = split(Grouping(np.array([0, 0, 0, 1, 1])), np.array([2, 0, 2, 2, 2], dtype=np.int32))
    assert cut.op_group.tolist() == [0, 1, 0, 2, 2]


def test_atoms_keep_classes_and_put_a_source_with_its_first_reader() -> None:
    graph = op_graph(
        [[], [], [0, 1], [0], [2]],
        targets=["input", "parameter", "aten.a", "aten.b", "update.sgd"],
        colocation=[-1, 0, -1, -1, 0],
    )
    costs = Costs(np.ones((5, 1)), "estimated")
    whole = Problem(graph, plain_host(1), costs, Grouping(np.zeros(5)))
    assert atoms(whole).op_group.tolist() == [0, 1, 0, 2, 1]
    apart = Problem(graph, plain_host(1), costs, Grouping(np.array([0, 1, 1, 1, 1])))
    assert atoms(apart).op_group.tolist() == [0, 1, 2, 3, 1]


def test_the_heaviest_edge_is_merged_first() -> None:
    chain = chain_problem(4, 2, output_bytes=[1, 9, 5, 1])
    assert coarser(chain, chain.grouping, 3).op_group.tolist() == [0, 1, 1, 2]
    # an even share for 2 is 2 seconds and the cap 3: all but one may be together
    assert coarser(chain, chain.grouping, 2).op_group.tolist() == [0, 1, 1, 1]


def test_what_no_device_may_hold_together_is_not_merged() -> None:
    chain = barred(chain_problem(4, 2, output_bytes=[1, 9, 5, 1]), {1: (0,), 2: (1,)})
    assert coarser(chain, chain.grouping, 3).op_group.tolist() == [0, 1, 2, 2]


def test_a_module_is_one_group_unless_it_costs_more_than_its_share() -> None:
    chain = chain_problem(6, 2)
    modules = ("a", "a", "b", "b", "a", "b")
    graph = replace(chain.graph, modules=modules)
    problem = Problem(graph, chain.host, chain.costs, chain.grouping)
    assert by_module(problem, 2).op_group.tolist() == [0, 0, 1, 1, 2, 3]  # merged over tensors only
    assert by_module(problem, 6).num_groups == 6


def test_a_role_is_what_repeats_in_a_module_cut_into_even_parts() -> None:
    chain = chain_problem(8, 2, output_bytes=[8, 4, 8, 4, 8, 4, 8, 4])  # two ops a step, over four steps, of one second
    problem = Problem(replace(chain.graph, modules=("cell",) * 8), chain.host, chain.costs, chain.grouping)
    assert by_role(problem, 1).op_group.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert by_role(problem, 4).op_group.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert by_role(problem, 8).num_groups == 8
    apart = Problem(replace(chain.graph, modules=("a",) * 4 + ("b",) * 4), chain.host, chain.costs, chain.grouping)
    assert by_role(apart, 1).op_group.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_role_is_cut_where_no_device_may_hold_all_of_it() -> None:
    chain = chain_problem(4, 2, output_bytes=[4, 4, 4, 4])
    problem = Problem(replace(chain.graph, modules=("cell",) * 4), chain.host, chain.costs, chain.grouping)
    assert by_role(problem, 1).num_groups == 1
    assert by_role(barred(problem, {1: (0,), 2: (1,)}), 1).op_group.tolist() == [0, 1, 2, 0]


def test_a_cut_group_has_parts_of_an_even_share() -> None:
    chain = chain_problem(6, 2)
    whole = Problem(chain.graph, chain.host, chain.costs, Grouping(np.zeros(6)))
    parts = finer(whole, whole.grouping, 3)  # shares of 2 seconds, a cap of 3
    assert np.bincount(parts.op_group).max() <= 3
    assert parts.num_groups == 3


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_placements_carry_over(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = random_problem(rng, 12, plain_host(2))
    grouping = Grouping(np.unique(rng.integers(0, 4, 12), return_inverse=True)[1])
    problem = Problem(plain.graph, plain.host, plain.costs, grouping)
    for fine, coarse in (
        (finer(problem, grouping, 6), grouping),
        (atoms(problem), finer(problem, grouping, 6)),
        (grouping, coarser(problem, grouping, 2)),
    ):
        assert fine.num_groups >= coarse.num_groups
        parent = np.full(fine.num_groups, -1)
        parent[fine.op_group] = coarse.op_group
        assert np.array_equal(parent[fine.op_group], coarse.op_group)


def test_levels_nest_from_coarse_to_fine() -> None:
    plain = synthetic_problem(400, 3)
    problem = replace(plain, grouping=group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 100))
    ladder = nested(problem)
    counts = [grouping.num_groups for grouping in ladder]
    assert counts == sorted(counts)
    assert any(grouping is problem.grouping for grouping in ladder)
    assert counts[0] < problem.grouping.num_groups < counts[-1] == 400
    for coarse, fine in itertools.pairwise(ladder):
        both = np.unique(np.stack((fine.op_group, coarse.op_group)), axis=1)
        assert both.shape[1] == fine.num_groups


def test_a_problem_of_single_ops_has_coarser_levels_only() -> None:
    plain = synthetic_problem(30, 2)
    ladder = nested(replace(plain, grouping=Grouping(np.arange(30))))
    assert ladder[-1].num_groups == 30
    assert [grouping.num_groups for grouping in ladder] == sorted({grouping.num_groups for grouping in ladder})
