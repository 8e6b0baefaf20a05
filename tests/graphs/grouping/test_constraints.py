""" """

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.grouping.constraints import Constraints, modules_matching, nearest_modules, ops_matching

NAMES, KINDS = ("cuda:0", "cuda:1", "cpu:0"), ("V100", "V100", "EPYC")
MODULES = ["encoder.embedding", "encoder.layers.0", "encoder.layers.1", "decoder", "encoder.embedding"]
TARGETS = ["parameter", "aten.embedding.default", "aten.mm.default", "aten.mm.default", "update.sgd"]


@pytest.fixture
def graph():
    # the parameter and its update live together
    graph = op_graph([[], [0], [1], [2], [3]], targets=TARGETS, colocation=[0, -1, -1, -1, 0])
    return replace(graph, modules=tuple(MODULES), names=("table", "look", "up", "out", "update_table"))


def resolve(graph, **words):
    return Constraints.parse(**words).resolve(graph, NAMES, KINDS)


@pytest.mark.parametrize(
    ("pattern", "ops"),
    [
        ("encoder", [0, 1, 2, 4]),
        ("encoder.layers", [1, 2]),
        ("encoder.layers.?", [1, 2]),
        ("*.0", [1]),
        ("decoder", [3]),
        ("aten.mm.*", [2, 3]),
        ("out", [3]),
        ("[lu]*p", [2]),
    ],
)
def test_a_pattern_is_a_glob_over_modules_names_and_targets(graph, pattern, ops):
    allowed, _ = resolve(graph, pins=[f"{pattern}=cuda:1"])
    assert np.flatnonzero(~allowed[:, 0]).tolist() == ops
    assert np.array_equal(allowed[:, 0], allowed[:, 2])
    assert allowed[:, 1].all()


@pytest.mark.parametrize(
    ("device", "row"), [("cuda:1", [0, 1, 0]), ("cuda", [1, 1, 0]), ("*:0", [1, 0, 1]), ("EPYC", [0, 0, 1])]
)
def test_a_device_is_a_name_a_glob_a_family_or_a_kind(graph, device, row):
    assert resolve(graph, pins=[f"decoder={device}"])[0][3].tolist() == [bool(x) for x in row]
    assert resolve(graph, exclusions=[f"decoder={device}"])[0][3].tolist() == [not x for x in row]


def test_what_lives_together_may_be_where_all_of_it_may(graph):
    allowed, _ = resolve(graph, pins=["update_table=cpu"], exclusions=["decoder=cuda:0"])
    assert allowed.tolist() == [[False, False, True], *[[True] * 3] * 2, [False, True, True], [False, False, True]]


def test_together_merges_classes_and_devices(graph):
    allowed, colocation = resolve(
        graph, together=["decoder,update_*"], pins=["decoder=cuda"], exclusions=["table=cuda:0"]
    )
    assert colocation.tolist() == [0, -1, -1, 0, 0]
    assert allowed.tolist() == [[False, True, False], *[[True] * 3] * 2, *[[False, True, False]] * 2]


def test_pairs_that_share_an_op_are_one(graph):
    assert resolve(graph, together=["look,up", "up,out"])[1].tolist() == [0, 1, 1, 1, 0]


def test_no_constraints_allow_everything(graph):
    assert not Constraints()
    allowed, colocation = Constraints().resolve(graph, NAMES, KINDS)
    assert allowed.all()
    assert colocation.tolist() == graph.colocation.tolist()


def test_a_pattern_that_matches_nothing_names_what_comes_close(graph):
    with pytest.raises(InvalidValue, match=r"pin is 'encodr', expected .* Did you mean encoder"):
        resolve(graph, pins=["encodr=cpu"])
    with pytest.raises(InvalidValue, match="together is 'zzzzzz'"):
        resolve(graph, together=["decoder,zzzzzz"])


def test_a_device_that_is_not_there_is_named(graph):
    with pytest.raises(UnknownName, match="did you mean 'cuda:1'"):
        resolve(graph, exclusions=["decoder=cuda:11"])
    with pytest.raises(UnknownName, match="unknown device 'tpu'"):
        Constraints.parse(pins=["nothing=tpu"]).check_devices(NAMES, KINDS)


def test_a_contradiction_names_all_that_led_to_it(graph):
    with pytest.raises(InvalidValue) as caught:
        resolve(graph, pins=["table=cuda:0", "look=cpu"], exclusions=["update_*=cuda:0"])
    assert "no device for op 'table' (tied to 1 other ops)" in str(caught.value)
    assert "pin table=cuda:0; exclude update_*=cuda:0" in str(caught.value)
    assert "look" not in str(caught.value)


@pytest.mark.parametrize(
    "words", [{"pins": ["encoder"]}, {"pins": ["=cpu"]}, {"exclusions": ["a="]}, {"together": ["a,"]}]
)
def test_malformed_words_are_refused(words):
    with pytest.raises(InvalidValue):
        Constraints.parse(**words)


def test_a_pattern_may_hold_an_equals_sign():
    assert Constraints.parse(pins=["a=b=cpu"]).pins == (("a=b", "cpu"),)


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
