import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping import Grouping, group_ops


def groups_of(graph, cost_s, num_groups, rule="heavy-edge", **options):
    return group_ops(graph, np.asarray(cost_s, dtype=float), num_groups, rule, **options).op_group.tolist()


def test_chain_splits_at_the_cap():
    # Cap 1.5 * 4 / 2 = 3. Edges are equal: 0-1, then 2 joins them; 3 would make four.
    chain = op_graph([[], [0], [1], [2]])
    assert groups_of(chain, [1, 1, 1, 1], 2) == [0, 0, 0, 1]


def test_diamond_under_one_group():
    assert groups_of(op_graph([[], [0], [0], [1, 2]]), [1, 1, 1, 1], 1) == [0, 0, 0, 0]


def test_branches_above_the_cap_stay_apart():
    # Cap 1.5 * 22 / 2 = 16.5: a's 5 bytes to b merge the two (11), those to c would make 21, b's byte to d makes 12.
    fork = op_graph([[], [0], [0], [1, 2]], [5, 1, 1, 1])
    assert groups_of(fork, [1, 10, 10, 1], 2) == [0, 0, 1, 0]


def test_what_takes_longer_to_send_than_to_compute_is_merged_at_once():
    # 3 s to send from 0, which costs 1 s as 1 does: the two are merged. 2 s from 2 are less than three times 1 s. The
    # cap of an eighth of all cost (48 s) leaves room for six; op 4 costs 43 by itself.
    graph = op_graph([[], [0], [1], [2], [3]], [3, 0, 2, 0, 0])
    cost_s = [1, 1, 2, 1, 43]
    assert groups_of(graph, cost_s, 100, latency_s=0.0, s_per_byte=1.0) == [0, 0, 1, 2, 3]
    assert groups_of(graph, cost_s, 100, latency_s=1.0, s_per_byte=1.0) == [0, 0, 1, 1, 2]


def test_the_strongest_tie_goes_first_and_no_group_passes_an_eighth_of_the_cost():
    # Total 64, cap 8: op 1 (5 s) may take in 0 (3 s, 9 s to send) or 2 (3 s, 90 s to send), not both.
    graph = op_graph([[], [0], [1], [2]], [9, 90, 0, 0])
    assert groups_of(graph, [3, 5, 3, 53], 100, latency_s=0.0, s_per_byte=1.0) == [0, 1, 1, 2]


def test_heavy_edges_merge_first():
    # The cap is 1.5 * 5 / 3 = 2.5, two ops: 8 bytes merge 0, 1,
    # 8 more (0-2) and 4 (1-3, 1-4) would make three, 2 bytes merge 2 and 3.
    graph = op_graph([[], [0], [0], [1, 2], [1, 2]], [8, 4, 2, 1, 1])
    assert groups_of(graph, [1, 1, 1, 1, 1], 3) == [0, 0, 1, 1, 2]


def test_classes_merge_whatever_they_cost():
    graph = op_graph([[], [], [0], [1], [2, 3]], colocation=[0, 1, 1, 0, -1])
    op_group = groups_of(graph, [9, 1, 1, 9, 1], 3)
    assert op_group[0] == op_group[3]
    assert op_group[1] == op_group[2]


def test_source_without_class_joins_its_first_reader():
    # Op 0 is an input read by 2 and 3; op 1 an unread constant. Four groups are allowed, so nothing else must merge.
    graph = op_graph([[], [], [0], [0, 2], [2, 3], [2, 3]], targets=["input", "constant", *["aten.op"] * 4])
    assert groups_of(graph, [0, 0, 1, 1, 1, 1], 100) == [0, 1, 0, 2, 3, 4]


def test_unread_sources_share_a_group():
    assert groups_of(op_graph([[], [], []], targets=["parameter"] * 3), [0, 0, 0], 3) == [0, 0, 0]


def test_source_with_class_stays_with_its_class():
    graph = op_graph([[], [0], [1]], targets=["parameter", "aten.op", "update.sgd"], colocation=[0, -1, 0])
    assert groups_of(graph, [1, 9, 1], 1) == [0, 0, 0]
    assert groups_of(graph, [1, 9, 1], 3) == [0, 1, 0]


def test_cap_is_relaxed_to_honour_num_groups():
    # Two ops of half the cost each never fit under 1.5 * 2 / 4; the cap grows until they do.
    assert groups_of(op_graph([[], [0], [0], [1, 2], [1, 2]]), [1, 1, 0, 0, 0], 1) == [0] * 5


def test_groups_without_edges_merge_the_cheapest_two():
    # Two pairs of the cheapest: {2, 3} at 3, then {1, 2, 3} at 6.
    assert groups_of(op_graph([[], [], [], []]), [4, 3, 2, 1], 2) == [0, 1, 1, 1]


def test_groups_are_numbered_by_first_op():
    op_group = groups_of(fork_join(4, 6), [1.0] * 31, 9)
    first_ops = [op_group.index(group) for group in range(max(op_group) + 1)]
    assert first_ops == sorted(first_ops)


def test_the_rule_is_named():
    assert group_ops(op_graph([[]]), np.ones(1), 7).rule == "heavy-edge:7"


def test_expand_gives_every_op_its_groups_device():
    grouping = Grouping(np.array([0, 1, 0]))
    assert grouping.expand(np.array([[2, 1], [0, 3]])).tolist() == [[2, 1, 2], [0, 3, 0]]


@pytest.mark.parametrize(
    ("cost_s", "num_groups", "field"),
    [
        ([1.0], 1, "cost_s"),
        ([1.0, -1.0], 1, "cost_s"),
        ([1.0, float("nan")], 1, "cost_s"),
        ([1.0, 1.0], 0, "num_groups"),
    ],
)
def test_bad_input_is_named(cost_s, num_groups, field):
    with pytest.raises(InvalidValue) as caught:
        group_ops(op_graph([[], [0]]), np.array(cost_s), num_groups)
    assert caught.value.field == field


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_graph_gets_at_most_num_groups_and_whole_classes(data):
    num_ops = data.draw(st.integers(1, 30))
    reads = [sorted(data.draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(num_ops)]
    colocation = data.draw(st.lists(st.integers(-1, min(3, num_ops - 1)), min_size=num_ops, max_size=num_ops))
    cost_s = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=num_ops, max_size=num_ops)))
    num_groups = data.draw(st.integers(1, 12))
    graph = op_graph(reads, data.draw(st.integers(0, 9)), colocation=colocation)
    grouping = group_ops(graph, cost_s, num_groups)
    assert grouping.num_groups <= num_groups
    for label in set(colocation) - {-1}:
        assert len({int(grouping.op_group[i]) for i in range(num_ops) if colocation[i] == label}) == 1
    assert np.array_equal(grouping.op_group, group_ops(graph, cost_s, num_groups).op_group)


def test_expanding_gives_rows_in_memory_order() -> None:
    # kernels read rows: fancy indexing alone would give columns
    expanded = Grouping(np.array([0, 1, 1, 0])).expand(np.array([[0, 1], [1, 0], [1, 1]], dtype=np.int32))
    assert expanded.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]]
    assert expanded.flags.c_contiguous
