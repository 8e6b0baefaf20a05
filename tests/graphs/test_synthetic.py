"""Synthetic families: what every graph of them holds, and hand-worked small ones."""

from __future__ import annotations

import numpy as np
import pytest
from graph_files import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.statistics import describe_graph, op_depths
from rlplace.graphs.synthetic import FAMILIES, synthetic


def small(family: str) -> st.SearchStrategy[dict[str, int]]:
    names = {
        "layered": ("layers", "width", "fan_in"),
        "fork_join": ("stages", "width", "depth"),
        "series_parallel": ("ops",),
        "recurrent": ("layers", "steps"),
        "mixture_of_experts": ("layers", "experts"),
        "encoder_decoder": ("encoder", "decoder", "heads"),
    }
    return st.fixed_dictionaries({name: st.integers(1, 4) for name in names[family]})


graphs = st.sampled_from(sorted(FAMILIES)).flatmap(
    lambda family: st.builds(
        lambda seed, params, is_training, optimizer: synthetic(
            family, seed=seed, is_training=is_training, optimizer=optimizer, **params
        ),
        st.integers(0, 2**32 - 1),
        small(family),
        st.booleans(),
        st.sampled_from(["sgd", "adam"]),
    )
)


@settings(max_examples=60, deadline=None)
@given(graphs)
def test_every_graph_is_a_step_like_a_captured_one(graph: OpGraph) -> None:
    is_training = bool(np.any(graph.phases == UPDATE))
    weights = np.flatnonzero(np.array(graph.targets) == "parameter")
    updates = np.flatnonzero(graph.phases == UPDATE)
    assert len(updates) == (len(weights) if is_training else 0)
    assert is_training == (BACKWARD in graph.phases)
    assert graph.tensor_op[graph.mutation_tensor].tolist() == [w for w in weights if is_training]
    for update, weight in zip(graph.mutation_op, graph.tensor_op[graph.mutation_tensor], strict=True):
        members = np.flatnonzero(graph.colocation == graph.colocation[update])
        assert members.tolist() == sorted({*members.tolist(), int(update), int(weight)})
        assert len(members) == 3
        gradient = next(int(op) for op in members if op not in (update, weight))
        assert graph.phases[gradient] == BACKWARD
        assert graph.output_bytes[gradient] == graph.output_bytes[weight] == graph.gradient_bytes[weight]
    read = np.zeros(graph.num_tensors, dtype=bool)
    read[graph.input_tensors] = True
    read[graph.output_tensors] = True
    assert np.all(read)  # nothing is computed in vain
    assert np.all(graph.flops[graph.is_source] == 0)
    assert np.all(graph.flops[~graph.is_source] > 0)
    assert np.all(graph.bytes_moved[~graph.is_source] >= graph.output_bytes[~graph.is_source])
    assert op_depths(graph).max() >= 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_seed_is_a_graph(family: str) -> None:
    assert_same(synthetic(family, seed=3), synthetic(family, seed=3))
    assert synthetic(family, seed=3).fingerprint != synthetic(family, seed=4).fingerprint
    forward = synthetic(family, seed=3, is_training=False)
    step = synthetic(family, seed=3)
    kept = [name for name, phase in zip(step.names, step.phases, strict=True) if phase == FORWARD and name != "loss"]
    assert kept == list(forward.names)


def test_a_chain_has_a_twin_for_every_op() -> None:
    graph = synthetic("fork_join", stages=1, width=1, depth=1, optimizer="sgd")
    assert graph.names == (
        "input",
        "stem",
        "stage0.branch0.0",
        "stem.0.forward",
        "stage0.branch0.0.1.forward",
        "stage0.join.2.forward",
        "loss",
        "loss.backward",
        "stage0.join.2.backward",
        "stage0.branch0.0.1.backward",
        "stage0.branch0.0.1.backward.weight",
        "stem.0.backward.weight",
        "update_stem",
        "update_stage0.branch0.0",
    )
    reads = [
        [graph.names[graph.tensor_op[t]] for t in graph.input_tensors[a:b]]
        for a, b in zip(graph.input_offsets[:-1], graph.input_offsets[1:], strict=True)
    ]
    assert reads[9] == ["stage0.branch0.0", "stage0.join.2.backward"]
    assert reads[10] == ["stem.0.forward", "stage0.join.2.backward"]
    assert reads[11] == ["input", "stage0.branch0.0.1.backward"]
    assert reads[12] == ["stem", "stem.0.backward.weight"]


def test_a_shared_weight_adds_up_the_gradients_of_all_steps() -> None:
    graph = synthetic("recurrent", layers=1, steps=4, head=False)
    assert sum(name.startswith("layer0.weight.gradient.sum") for name in graph.names) == 3
    assert graph.parameter_bytes.astype(bool).sum() == 1
    found = describe_graph(synthetic("recurrent", layers=3, steps=5, head=False, is_training=False))
    assert (found.critical_path_ops, found.widest_level) == (2 * (3 + 5 - 1), 3)


@pytest.mark.parametrize(
    ("family", "params", "width", "path"),
    [
        ("layered", {"layers": 7, "width": 5, "fan_in": 5}, 5, 7),
        ("fork_join", {"stages": 3, "width": 4, "depth": 2}, 4, 1 + 3 * 3),
        ("mixture_of_experts", {"layers": 2, "experts": 6}, 6, 1 + 2 * 9),
        ("encoder_decoder", {"encoder": 1, "decoder": 1, "heads": 2}, 2, None),
    ],
)
def test_shapes_are_as_documented(family: str, params: dict[str, int], width: int, path: int | None) -> None:
    found = describe_graph(synthetic(family, is_training=False, **params))
    assert found.widest_level >= width
    assert found.critical_path_ops == path or path is None


def test_medians_and_spread_are_as_asked() -> None:
    graph = synthetic("layered", layers=40, width=20, flops=1e8, output_bytes=4096, is_training=False)
    is_product = np.array([target == "aten.mm.default" for target in graph.targets])
    assert np.median(graph.flops[is_product]) == pytest.approx(1e8, rel=0.25)
    assert np.std(np.log(graph.flops[is_product])) == pytest.approx(1.0, rel=0.15)
    assert np.median(graph.output_bytes[~graph.is_source]) == pytest.approx(4096, rel=0.25)
    even = synthetic("layered", spread=0.0, is_training=False)
    assert len(set(even.output_bytes[~even.is_source].tolist())) == 1


@pytest.mark.parametrize(
    ("family", "params", "error", "words"),
    [
        ("layerd", {}, UnknownName, "layered"),
        ("layered", {"layer": 3}, UnknownName, "layers"),
        ("layered", {"layers": 0}, InvalidValue, "layers"),
        ("layered", {"layers": 2.0}, InvalidValue, "layers"),
        ("layered", {"layers": 10**6, "width": 10**6}, InvalidValue, "at most"),
        ("recurrent", {"head": 1}, InvalidValue, "head"),
        ("series_parallel", {"series": 1.5}, InvalidValue, "series"),
        ("layered", {"optimizer": "adm"}, UnknownName, "adam"),
        ("layered", {"spread": 9.0}, InvalidValue, "spread"),
        ("layered", {"flops": 0.0}, InvalidValue, "flops"),
        ("layered", {"seed": -1}, InvalidValue, "seed"),
        ("layered", {"rows": 0}, InvalidValue, "rows"),
    ],
)
def test_mistakes_are_named(family: str, params: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        synthetic(family, **params)  # type: ignore[arg-type]
