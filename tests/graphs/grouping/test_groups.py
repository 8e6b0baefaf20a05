"""Groups by every rule, on graphs worked out by hand and on any; micro-batches stay apart."""

from __future__ import annotations

import sys
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_batched import cut_graph, layered_step
from micrographs import fork_join, op_graph
from random_problems import random_graph

from rlplace.errors import InvalidValue, MissingExtra, UnknownName
from rlplace.graphs.grouping.groups import RULES, Grouping, GroupingRule, group_ops, metis_parts


def groups_of(graph, cost_s, num_groups, rule="heavy-edge", **options):
    return group_ops(graph, np.asarray(cost_s, dtype=float), num_groups, rule, **options).op_group.tolist()


@pytest.mark.parametrize(
    ("reads", "num_bytes", "cost_s", "num_groups", "expected"),
    [
        # Cap 1.5 * 4 / 2 = 3. Edges are equal: 0-1, then 2 joins them; 3 would make four.
        ([[], [0], [1], [2]], 1, [1, 1, 1, 1], 2, [0, 0, 0, 1]),
        ([[], [0], [0], [1, 2]], 1, [1, 1, 1, 1], 1, [0, 0, 0, 0]),
        # Cap 1.5 * 22 / 2 = 16.5: a's 5 bytes to b merge the two (11), to c would make 21, b's byte to d makes 12.
        ([[], [0], [0], [1, 2]], [5, 1, 1, 1], [1, 10, 10, 1], 2, [0, 0, 1, 0]),
        # The cap is 1.5 * 5 / 3 = 2.5, two ops: 8 bytes merge 0, 1,
        # 8 more (0-2) and 4 (1-3, 1-4) would make three, 2 bytes merge 2 and 3.
        ([[], [0], [0], [1, 2], [1, 2]], [8, 4, 2, 1, 1], [1] * 5, 3, [0, 0, 1, 1, 2]),
        # Two ops of half the cost each never fit under 1.5 * 2 / 4; the cap grows until they do.
        ([[], [0], [0], [1, 2], [1, 2]], 1, [1, 1, 0, 0, 0], 1, [0] * 5),
        # Without edges two pairs of the cheapest: {2, 3} at 3, then {1, 2, 3} at 6.
        pytest.param([[], [], [], []], 1, [4, 3, 2, 1], 2, [0, 1, 1, 1], marks=pytest.mark.slow),
    ],
)
def test_heavy_edges_merge_first_under_a_cap(reads, num_bytes, cost_s, num_groups, expected):
    assert groups_of(op_graph(reads, num_bytes), cost_s, num_groups) == expected


def test_what_takes_longer_to_send_than_to_compute_is_merged_at_once():
    # 2 s to send from 0, which costs 1 s as 1 does: the two are merged. 1 s from 2 is less than twice the 1 s of 3. The
    # cap of an eighth of all cost (48 s) leaves room for six; op 4 costs 43 by itself.
    graph = op_graph([[], [0], [1], [2], [3]], [2, 0, 1, 0, 0])
    cost_s = [1, 1, 2, 1, 43]
    assert groups_of(graph, cost_s, 100, latency_s=0.0, s_per_byte=1.0) == [0, 0, 1, 2, 3]
    assert groups_of(graph, cost_s, 100, latency_s=1.0, s_per_byte=1.0) == [0, 0, 1, 1, 2]


def test_the_strongest_tie_goes_first_and_no_group_passes_an_eighth_of_the_cost():
    # Total 64, cap 8: op 1 (5 s) may take in 0 (3 s, 9 s to send) or 2 (3 s, 90 s to send), not both.
    graph = op_graph([[], [0], [1], [2]], [9, 90, 0, 0])
    assert groups_of(graph, [3, 5, 3, 53], 100, latency_s=0.0, s_per_byte=1.0) == [0, 1, 1, 2]


def test_classes_merge_whatever_they_cost():
    graph = op_graph([[], [], [0], [1], [2, 3]], colocation=[0, 1, 1, 0, -1])
    op_group = groups_of(graph, [9, 1, 1, 9, 1], 3)
    assert op_group[0] == op_group[3]
    assert op_group[1] == op_group[2]


def test_source_without_class_joins_its_first_reader():
    # Op 0 is an input read by 2 and 3; op 1 an unread constant. Four groups are allowed, so nothing else must merge.
    graph = op_graph([[], [], [0], [0, 2], [2, 3], [2, 3]], targets=["input", "constant", *["aten.op"] * 4])
    assert groups_of(graph, [0, 0, 1, 1, 1, 1], 100) == [0, 1, 0, 2, 3, 4]


def test_unread_sources_share_a_group_and_one_with_a_class_stays_with_it():
    assert groups_of(op_graph([[], [], []], targets=["parameter"] * 3), [0, 0, 0], 3) == [0, 0, 0]
    graph = op_graph([[], [0], [1]], targets=["parameter", "aten.op", "update.sgd"], colocation=[0, -1, 0])
    assert groups_of(graph, [1, 9, 1], 1) == [0, 0, 0]
    assert groups_of(graph, [1, 9, 1], 3) == [0, 1, 0]


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


def with_modules(graph, modules):
    return replace(graph, modules=tuple(modules))


def test_only_consumers_are_joined_to_a_fixpoint():
    # c and d are read by e alone, then b by c and d alone; a is read by f as well.
    graph = op_graph([[], [0], [1], [1], [2, 3], [0]])
    assert groups_of(graph, [1] * 6, 100, "colocation") == [0, 1, 1, 1, 1, 2]


def test_an_op_is_with_its_gradient():
    # Module a runs 0, 1 and, backwards, 4, 5; module b runs 2 and 3. Ops 6 and 7 read everything: nobody has an only
    # consumer.
    everything = [0, 1, 2, 3, 4, 5]
    graph = op_graph([[], [0], [1], [2], [1, 3], [0, 4], everything, everything], phases=[0, 0, 0, 1, 1, 1, 2, 2])
    graph = with_modules(graph, ["a", "a", "b", "b", "a", "a", "", ""])
    assert groups_of(graph, [1] * 8, 100, "colocation") == [0, 1, 2, 2, 1, 0, 3, 4]


def test_a_saved_tensor_says_whose_gradient_it_is():
    # By position alone op 3, the first of two backward ops, mirrors op 1, the middle one of three; but it reads what
    # op 2 made. Op 4 reads nothing of the forward: it mirrors op 0.
    everything = [0, 1, 2, 3, 4]
    graph = op_graph([[], [0], [1], [2], [3], everything, everything], phases=[0, 0, 0, 1, 1, 2, 2])
    graph = with_modules(graph, [*["a"] * 5, "", ""])
    assert groups_of(graph, [1] * 7, 100, "colocation") == [0, 1, 2, 2, 0, 3, 4]


def test_cells_are_all_steps_of_a_module():
    modules = ["layers.0.gates", "layers.1", "layers.0", "layers.1.gates", "out", "out", "", ""]
    everything = list(range(6))
    graph = with_modules(op_graph([[], [0], [1], [2], [3], [4], everything, everything]), modules)
    assert groups_of(graph, [1] * 8, 100, "colocation:layers.*") == [0, 1, 0, 1, 2, 3, 4, 5]
    assert groups_of(graph, [1] * 8, 100, "colocation:layers,out") == [0, 0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("module", [0, 1, 2, 2, 1, 0]),
        ("module:1", [0, 0, 1, 1, 0, 0]),
        ("module:2:apart", [0, 1, 2, 3, 4, 5]),
        ("module:1:apart", [0, 0, 1, 2, 3, 4]),
    ],
)
def test_modules_are_groups_at_any_depth(rule, expected):
    graph = op_graph([[], [0], [1], [2], [3], [4]], phases=[0, 0, 0, 1, 1, 2])
    graph = with_modules(graph, ["a.x", "a.y", "b", "b", "a.y", "a.x"])
    assert groups_of(graph, [1] * 6, 100, rule) == expected


def test_none_keeps_classes_only():
    graph = op_graph([[], [0], [1], []], colocation=[0, -1, 0, -1], targets=["parameter", "x", "update.sgd", "input"])
    assert groups_of(graph, [1] * 4, 1, "none") == [0, 1, 0, 2]


def test_metis_cuts_few_bytes():
    # Two rings of four with 100 bytes on every edge, and one edge of a byte between them.
    pytest.importorskip("pymetis")
    graph = op_graph([[], [0], [1], [0, 2], [3], [4], [5], [4, 6]], [100, 100, 100, 1, 100, 100, 100, 100])
    assert groups_of(graph, [1] * 8, 2, "metis") == [0, 0, 0, 0, 1, 1, 1, 1]


def test_rules_beyond_the_target_are_coarsened_to_it():
    graph = with_modules(fork_join(4, 6), [f"m{i % 13}" for i in range(31)])
    for rule in ("module", "colocation", "heavy-edge"):
        assert group_ops(graph, np.ones(31), 5, rule).num_groups <= 5


def test_groups_have_a_device_in_common():
    chain = op_graph([[], [0], [1]])
    allowed = np.array([[True, False], [True, True], [False, True]])
    assert groups_of(chain, [1, 1, 1], 1, allowed=allowed) == [0, 0, 1]
    assert groups_of(with_modules(chain, "aaa"), [1, 1, 1], 2, "module", allowed=allowed) == [0, 0, 1]
    with pytest.raises(InvalidValue, match="no device for op 'op0' and what lives with it"):
        group_ops(op_graph([[], [0], [1]], colocation=[0, -1, 0]), np.ones(3), allowed=allowed)
    with pytest.raises(InvalidValue, match="no device for op 'op1'"):
        group_ops(chain, np.ones(3), allowed=np.array([[True], [False], [True]]))


def test_a_class_takes_in_what_is_between_its_ops_where_cycles_matter():
    graph = op_graph([[], [0], [1], [2]], colocation=[0, -1, 0, -1])
    assert groups_of(graph, [1] * 4, 2, "none") == [0, 1, 0, 2]
    assert groups_of(graph, [1] * 4, 2, "none", acyclic=True) == [0, 0, 0, 1]
    allowed = np.array([[True, False], [False, True], [True, False], [True, True]])
    assert groups_of(graph, [1] * 4, 2, "none", allowed=allowed) == [0, 1, 0, 2]
    with pytest.raises(InvalidValue, match="what is between them"):
        group_ops(graph, np.ones(4), 2, "none", allowed=allowed, acyclic=True)


def test_a_parameter_that_lives_with_its_update_closes_no_cycle():
    graph = op_graph([[], [0], [0, 1]], targets=["parameter", "aten.op", "update.sgd"], colocation=[0, -1, 0])
    grouping = group_ops(graph, np.ones(3), 2, "none", acyclic=True)
    assert (grouping.op_group.tolist(), grouping.dropped) == ([0, 1, 0], ())


def test_a_gradient_leaves_its_op_where_cycles_are():
    everything = [0, 1, 2, 3]
    graph = op_graph([[], [0], [1], [0, 2], everything, everything], phases=[0, 0, 1, 1, 2, 2])
    graph = with_modules(graph, ["a", "b", "b", "a", "", ""])
    assert groups_of(graph, [1] * 6, 100, "colocation") == [0, 1, 1, 0, 2, 3]
    grouping = group_ops(graph, np.ones(6), 100, "colocation", acyclic=True)
    assert grouping.dropped == ("gradient",)
    assert grouping.op_group.tolist()[0] != grouping.op_group.tolist()[3]


def test_an_unknown_rule_is_named():
    with pytest.raises(UnknownName, match="did you mean 'module'"):
        group_ops(op_graph([[]]), np.ones(1), 1, "modules")


WORDS = ["heavy-edge", "colocation", "module", "module:1:apart", "metis", "none"]


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_graph_gets_at_most_num_groups_and_whole_classes(data):
    num_ops = data.draw(st.integers(1, 30))
    reads = [sorted(data.draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(num_ops)]
    colocation = data.draw(st.lists(st.integers(-1, min(3, num_ops - 1)), min_size=num_ops, max_size=num_ops))
    cost_s = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=num_ops, max_size=num_ops)))
    num_groups = data.draw(st.integers(1, 12))
    rule = data.draw(st.sampled_from(WORDS))
    phases = sorted(data.draw(st.lists(st.integers(0, 2), min_size=num_ops, max_size=num_ops)))
    graph = op_graph(reads, data.draw(st.integers(0, 9)), colocation=colocation, phases=phases)
    graph = with_modules(
        graph, data.draw(st.lists(st.sampled_from(["", "a", "a.b"]), min_size=num_ops, max_size=num_ops))
    )
    grouping = group_ops(graph, cost_s, num_groups, rule)
    assert grouping.num_groups <= (num_groups if rule != "none" else num_ops)
    for label in set(colocation) - {-1}:
        assert len({int(grouping.op_group[i]) for i in range(num_ops) if colocation[i] == label}) == 1
    assert np.array_equal(grouping.op_group, group_ops(graph, cost_s, num_groups, rule).op_group)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(WORDS), st.booleans())
def test_bytes_and_devices_bound_every_merge(seed, rule, acyclic):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 24)
    allowed = rng.random((24, 3)) < 0.6
    allowed[np.arange(24), rng.integers(0, 3, 24)] = True
    cap_bytes = 1500.0
    grouping = group_ops(graph, rng.random(24), 4, rule, allowed=allowed, cap_bytes=cap_bytes, acyclic=acyclic)
    held = graph.state_bytes + graph.parameter_bytes + graph.output_bytes  # all forward
    for group in range(grouping.num_groups):
        members = np.flatnonzero(grouping.op_group == group)
        assert allowed[members].all(axis=0).any()
        assert len(members) == 1 or held[members].sum() <= cap_bytes


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(st.integers(0, 10**6), st.sampled_from(WORDS), st.integers(1, 9))
def test_the_graph_of_groups_has_no_cycle_where_asked(seed, rule, num_groups):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 30)
    graph = replace(
        graph,
        colocation=np.where(rng.random(30) < 0.3, rng.integers(0, 4, 30), -1).astype(np.int32),
        phases=np.sort(rng.integers(0, 3, 30)).astype(np.int8),
        modules=tuple(rng.choice(["a", "a.b", "c"], 30)),
    )
    grouping = group_ops(graph, rng.random(30), num_groups, rule, acyclic=True)
    groups = nx.DiGraph()
    for tensor, reader in zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True):
        producer = int(graph.tensor_op[tensor])
        ends = int(grouping.op_group[producer]), int(grouping.op_group[reader])
        if ends[0] != ends[1] and not (graph.is_resident[producer] and graph.colocation[producer] >= 0):
            groups.add_edge(*ends)
    assert nx.is_directed_acyclic_graph(groups)
    assert rule == "none" or grouping.num_groups <= num_groups
    assert all(len(set(grouping.op_group[graph.colocation == label].tolist())) <= 1 for label in range(4))


def test_expanding_gives_rows_in_memory_order() -> None:
    # kernels read rows: fancy indexing alone would give columns
    expanded = Grouping(np.array([0, 1, 1, 0])).expand(np.array([[0, 1], [1, 0], [1, 1]], dtype=np.int32))
    assert expanded.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]]
    assert expanded.flags.c_contiguous


def parts_of(num_parts, node_weight):
    # a path of six nodes whose edges weigh 5, 1, 5, 1, 5
    path = np.arange(5)
    return metis_parts(6, path, path + 1, np.array([5.0, 1.0, 5.0, 1.0, 5.0]), np.array(node_weight), num_parts)


def test_light_edges_are_cut():
    pytest.importorskip("pymetis")
    parts = parts_of(3, [1.0] * 6).tolist()
    assert parts[0] == parts[1]
    assert parts[2] == parts[3]
    assert parts[4] == parts[5]
    assert len(set(parts)) == 3


def test_as_many_parts_as_nodes_need_no_metis():
    pytest.importorskip("pymetis")
    assert parts_of(9, [1.0] * 6).tolist() == list(range(6))


def test_absence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingExtra, match=r"rlplace\[metis\]"):
        parts_of(2, [1.0] * 6)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_a_word_and_options_follow_colons(name):
    assert GroupingRule.parse(name) == GroupingRule(name)
    assert GroupingRule.parse("module:3:apart") == GroupingRule("module", depth=3, is_apart=True)
    assert GroupingRule.parse("colocation:enc.*,out") == GroupingRule("colocation", cells=("enc.*", "out"))


@pytest.mark.parametrize(
    "word", ["module:0", "module:x", "module:1:away", "module:1:apart:2", "metis:3", "colocation:", "none:1", "module:"]
)
def test_options_that_are_not_there_are_refused(word):
    with pytest.raises(InvalidValue, match="grouping rule is"):
        GroupingRule.parse(word)


def test_an_unknown_word_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'heavy-edge'"):
        GroupingRule.parse("heavyedge")


@pytest.mark.parametrize("rule", ["heavy-edge", "colocation", "module", "metis", "none"])
@pytest.mark.parametrize("acyclic", [False, True])
def test_no_group_holds_ops_of_two_micro_batches(rule: str, acyclic: bool) -> None:
    if rule == "metis":
        pytest.importorskip("pymetis")
    graph = cut_graph(layered_step(6), 4)
    # sending takes much longer than computing: all that may be merged is
    grouping = group_ops(graph, np.ones(graph.num_ops), 12, rule, acyclic=acyclic, s_per_byte=1.0)
    follows = np.where(graph.colocation >= 0, -1, graph.micro_batch)
    for group in range(grouping.num_groups):
        assert len(np.unique(follows[grouping.op_group == group])) == 1
    if rule != "none":
        assert grouping.num_groups <= 16


def test_parameters_are_merged_with_those_that_are_read_next_to_them() -> None:
    graph = cut_graph(layered_step(8), 2)
    grouping = group_ops(graph, np.ones(graph.num_ops), 16)
    of_parameters = grouping.op_group[:8]
    assert len(np.unique(of_parameters)) == 4
    assert (np.diff(of_parameters) >= 0).all()
