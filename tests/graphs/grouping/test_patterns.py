from dataclasses import replace

from micrographs import op_graph

from rlplace.graphs.grouping.constraints import modules_matching, nearest_modules, ops_matching

GRAPH = replace(
    op_graph([[], [0], [1], [2], [3]], targets=["input", "aten.mm.default", "aten.add.Tensor", "aten.mm.default", "x"]),
    modules=("", "enc.layers.0.gates", "enc.layers.0", "enc.layers.1", "dec"),
)


def test_ops_are_picked_by_module_name_or_target():
    assert ops_matching(GRAPH, "enc").tolist() == [1, 2, 3]
    assert ops_matching(GRAPH, "*.0").tolist() == [1, 2]
    assert ops_matching(GRAPH, "aten.mm*").tolist() == [1, 3]
    assert ops_matching(GRAPH, "op[34]").tolist() == [3, 4]
    assert ops_matching(GRAPH, "layers").tolist() == []
    assert ops_matching(GRAPH, "*").tolist() == [0, 1, 2, 3, 4]


def test_a_module_counts_with_all_below_it():
    assert modules_matching(GRAPH, "enc.layers.?").tolist() == [-1, 0, 0, 1, -1]
    assert modules_matching(GRAPH, "enc").tolist() == [-1, 0, 0, 0, -1]
    assert modules_matching(GRAPH, "nothing").tolist() == [-1] * 5


def test_the_nearest_modules_are_offered():
    assert nearest_modules(GRAPH, "enc.layer.0")[0] == "enc.layers.0"
    assert nearest_modules(GRAPH, "zzzzzzz") == []
