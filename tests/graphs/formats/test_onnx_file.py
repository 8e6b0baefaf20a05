"""ONNX models: shapes, FLOPs, parameters and modules by hand, and every model that comes with the package."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.errors import FileProblem, InvalidValue, UserError
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.graphs.formats.onnx_file import load_onnx, node_bytes, node_flops, target_of
from rlplace.graphs.opgraph import OpGraph

onnx = pytest.importorskip("onnx")
FLOAT, INT = 1, 7
helper = onnx.helper


def write(
    path: Path, nodes: list[Any], inputs: dict[str, list[Any]], outputs: list[str], weights: dict[str, Any], **more: Any
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], **more).SerializeToString())
    return path


def mlp(tmp_path: Path, batch: object = 4) -> Path:
    """x (batch, 8) -> Gemm -> Relu -> reshape by a shape that is computed -> MatMul."""
    node = helper.make_node
    nodes = [
        node("Gemm", ["x", "enc.fc.weight", "enc.fc.bias"], ["h"], name="/enc/fc/Gemm"),
        node("Relu", ["h"], ["r"], name="/enc/Relu"),
        node("Shape", ["x"], ["s"], name="/Shape"),
        node("Gather", ["s", "zero"], ["b"], name="/Gather", axis=0),
        node("Div", ["b", "two"], ["half"], name="/Div"),
        node("Concat", ["half", "minus"], ["shape"], name="/Concat", axis=0),
        node("Reshape", ["r", "shape"], ["v"], name="/Reshape"),
        node("MatMul", ["v", "w"], ["y"], name="/dec/MatMul"),
        node("Exp", ["y"], ["nobody"], name="/dead/Exp"),
    ]
    weights = {
        "enc.fc.weight": np.zeros((8, 16), np.float32),
        "enc.fc.bias": np.zeros(16, np.float32),
        "w": np.zeros((32, 5), np.float32),
        "zero": np.array([0]),
        "two": np.array([2]),
        "minus": np.array([32]),
    }
    return write(tmp_path / "mlp.onnx", nodes, {"x": [batch, 8]}, ["y"], weights)


def test_a_model_becomes_ops_parameters_and_costs(tmp_path: Path) -> None:
    graph = load_graph(mlp(tmp_path))
    assert graph.names == ("x", "enc.fc.weight", "enc.fc.bias", "w", "/enc/fc/Gemm", "/enc/Relu", "/dec/MatMul")
    assert graph.targets == (
        "input",
        "parameter",
        "parameter",
        "parameter",
        "aten.addmm.default",
        "aten.relu.default",
        "aten.matmul.default",
    )
    assert graph.modules == ("", "enc.fc", "enc.fc", "dec", "enc.fc", "enc", "dec")
    assert graph.parameter_bytes.tolist() == [0, 512, 64, 640, 0, 0, 0]
    assert graph.flops.tolist() == [0, 0, 0, 0, 2 * 4 * 8 * 16, 64, 2 * 2 * 32 * 5]
    assert graph.bytes_moved[4] == 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert graph.tensor_shapes == ((4, 8), (8, 16), (16,), (32, 5), (4, 16), (4, 16), (2, 5))
    assert graph.output_tensors.tolist() == [6]
    assert graph.input_tensors[graph.input_offsets[6] :].tolist() == [3, 5]  # the reshape is a view of the Relu


def test_weights_in_constant_nodes_are_parameters_as_initializers_are(tmp_path: Path) -> None:
    def constant(name: str, array: Any) -> Any:
        return helper.make_node("Constant", [], [name], name=f"/enc/{name}", value=onnx.numpy_helper.from_array(array))

    nodes = [
        constant("w", np.zeros((8, 16), np.float32)),
        constant("rows", np.array([2, 1])),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/enc/MatMul"),
        helper.make_node("Gather", ["h", "rows"], ["y"], name="/enc/Gather", axis=0),
    ]
    graph = load_graph(write(tmp_path / "c.onnx", nodes, {"x": [4, 8]}, ["y"], {}))
    assert graph.names == ("x", "/enc/w", "/enc/rows", "/enc/MatMul", "/enc/Gather")
    assert graph.targets[:3] == ("input", "parameter", "constant")
    assert graph.parameter_bytes.tolist() == [0, 4 * 8 * 16, 0, 0, 0]
    assert (graph.modules[1], graph.flops[1], graph.bytes_moved[1]) == ("enc", 0, 0)
    weights = {"w": np.zeros((8, 16), np.float32), "rows": np.array([2, 1])}
    given = load_graph(write(tmp_path / "g.onnx", nodes[2:], {"x": [4, 8]}, ["y"], weights))
    assert given.targets == graph.targets
    assert given.parameter_bytes.tolist() == graph.parameter_bytes.tolist()


def test_a_dimension_of_zero_is_a_size(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["x", "cache"], ["y"], axis=1)]
    path = write(tmp_path / "z.onnx", nodes, {"x": [2, 3], "cache": [2, 0]}, ["y"], {})
    graph = load_onnx(path)
    assert graph.tensor_shapes == ((2, 3), (2, 0), (2, 3))
    assert graph.tensor_bytes.tolist() == [24, 0, 24]
    assert load_onnx(path, dims={"cache.1": 5}).tensor_shapes == ((2, 3), (2, 5), (2, 8))
    with pytest.raises(InvalidValue, match=r"dims\['x.0'\].*of no input"):
        load_onnx(path, dims={"x.0": 1})


def test_a_dynamic_batch_is_one_or_what_dims_say(tmp_path: Path) -> None:
    path = mlp(tmp_path, "N")
    assert load_graph(path, dims={"N": 4}).fingerprint == load_graph(mlp(tmp_path, 4)).fingerprint
    path = mlp(tmp_path, "N")
    assert load_onnx(path, dims={"x.0": 4}).tensor_shapes[0] == (4, 8)
    with pytest.raises(InvalidValue, match=r"dims\['M'\].*of no input"):
        load_onnx(path, dims={"M": 4})
    with pytest.raises(InvalidValue, match="an integer >= 1"):
        load_onnx(path, dims={"N": 0})
    with pytest.raises(InvalidValue, match="only an ONNX model"):
        load_graph(tmp_path / "other.json", dims={"N": 1})
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    assert load_onnx(write(tmp_path / "r.onnx", relu, {"x": ["N", 3]}, ["y"], {})).tensor_shapes == ((1, 3), (1, 3))


def test_another_dynamic_dimension_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", "seq"]}, ["y"], {})
    with pytest.raises(InvalidValue, match=r"input 'x'.*\(1, seq\).*dims=\{'seq': 128\}"):
        load_onnx(path)
    assert load_onnx(path, dims={"seq": 7}).tensor_shapes == ((1, 7), (1, 7))
    path = write(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", None]}, ["y"], {})
    with pytest.raises(InvalidValue, match=r"dims=\{'x.1': 128\}"):
        load_onnx(path)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([("Relu", ["nowhere"], ["y"])], r"node 0 \(Relu ''\): input is 'nowhere'"),
        ([("Relu", ["x"], ["y"]), ("Exp", ["x"], ["y"])], r"node 1 \(Exp ''\): output is 'y'"),
        ([("Relu", ["x"], ["z"])], "graph.output is 'y'"),
        ([("Mystery", ["x"], ["y"])], r"node 0 \(Mystery ''\): shape of 'y' is 'unknown'"),
        ([("MatMul", ["x", "w"], ["y"])], r"shape of 'y' is 'unknown'.*onnx says"),
        ([], r"graph\.node is 'empty'"),
    ],
)
def test_what_is_wrong_is_named(nodes: list[Any], message: str, tmp_path: Path) -> None:
    made = [helper.make_node(*node) for node in nodes]
    path = write(tmp_path / "m.onnx", made, {"x": [2, 3]}, ["y"], {"w": np.zeros((2, 2), np.float32)})
    with pytest.raises(InvalidValue, match=message):
        load_onnx(path)


def test_control_flow_and_what_is_no_model_is_refused(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["b"])], "b", [], [helper.make_tensor_value_info("b", FLOAT, [2])]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    path = write(tmp_path / "m.onnx", [node], {"c": [1], "x": [2]}, ["y"], {})
    with pytest.raises(FileProblem, match=r"node 0 \(If ''\).*control flow"):
        load_onnx(path)
    (tmp_path / "m.onnx").write_bytes(b"\x08 this is no protobuf")
    with pytest.raises(FileProblem, match="not a valid ONNX model"):
        load_onnx(path)


def test_weights_in_other_files_are_not_needed(tmp_path: Path) -> None:
    path = mlp(tmp_path)
    expected = load_onnx(path)
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="w.bin", size_threshold=100)
    (tmp_path / "w.bin").unlink()
    assert load_onnx(path).fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("op_type", "inputs", "output", "attributes", "flops"),
    [
        ("MatMul", [(7, 2, 3), (3, 5)], (7, 2, 5), {}, 2 * 7 * 2 * 3 * 5),
        ("Gemm", [(3, 2), (3, 5), (5,)], (2, 5), {"transA": 1}, 2 * 2 * 3 * 5),
        ("Conv", [(2, 8, 9, 9), (16, 4, 3, 3)], (2, 16, 7, 7), {"group": 2}, 2 * 2 * 16 * 49 * 4 * 9),
        ("ConvTranspose", [(2, 8, 4, 4), (8, 6, 2, 2)], (2, 6, 8, 8), {}, 2 * 2 * 8 * 16 * 6 * 4),
        ("Attention", [(2, 4, 10, 8), (2, 4, 12, 8), (2, 4, 12, 6)], (2, 4, 10, 6), {}, 2 * 2 * 4 * 10 * 12 * (8 + 6)),
        ("Attention", [(2, 10, 8), (8, 24), (24,)], (2, 10, 8), {}, 2 * 20 * 8 * 24 + 2 * 2 * 2 * 10 * 10 * 8),
        ("LSTM", [(5, 2, 3), (1, 16, 3), (1, 16, 4)], (5, 1, 2, 4), {}, 2 * 10 * (48 + 64)),
        ("Einsum", [(2, 3, 4), (2, 4, 5)], (2, 3, 5), {"equation": "bij,bjk->bik"}, 2 * 2 * 3 * 4 * 5),
        ("Einsum", [(2, 3, 4), (4, 5)], (2, 3, 5), {"equation": "...j,jk->...k"}, 2 * 2 * 3 * 4 * 5),
        ("Relu", [(2, 3)], (2, 3), {}, 6),
        ("ReduceSum", [(2, 3)], (1,), {}, 6),
        ("MatMulInteger", [(3, 4), (4, 5)], (3, 5), {}, 2 * 3 * 4 * 5),
        ("QLinearMatMul", [(4, 6), (), (), (6, 5), (), (), (), ()], (4, 5), {}, 2 * 4 * 6 * 5),
        ("QGemm", [(6, 4), (), (), (6, 5)], (4, 5), {"transA": 1}, 2 * 4 * 6 * 5),
        ("MatMulNBits", [(3, 64), (8, 2, 16), (16,)], (3, 8), {"K": 64, "N": 8, "bits": 4}, 2 * 3 * 64 * 8),
        ("MatMulBnb4", [(2, 8), (64,), (2,)], (2, 16), {"K": 8, "N": 16}, 2 * 2 * 8 * 16),
        ("FusedMatMul", [(7, 2, 3), (7, 2, 5)], (7, 3, 5), {"transA": 1}, 2 * 7 * 3 * 2 * 5),
        ("FusedMatMul", [(6, 2, 4), (2, 4, 5)], (2, 6, 5), {"transBatchA": 1}, 2 * 2 * 6 * 4 * 5),
        ("FusedMatMul", [(6, 2, 4), (2, 6, 5)], (2, 4, 5), {"transA": 1, "transBatchA": 1}, 2 * 2 * 4 * 6 * 5),
        ("FusedGemm", [(2, 3), (3, 5), (5,)], (2, 5), {"activation": "Relu"}, 2 * 2 * 3 * 5),
        ("ConvInteger", [(1, 3, 6, 6), (4, 3, 3, 3)], (1, 4, 4, 4), {}, 2 * 4 * 16 * 27),
        ("QLinearConv", [(1, 3, 6, 6), (), (), (4, 3, 3, 3)], (1, 4, 4, 4), {}, 2 * 4 * 16 * 27),
        ("NhwcFusedConv", [(1, 6, 6, 3), (4, 3, 3, 3)], (1, 4, 4, 4), {}, 2 * 4 * 16 * 27),
        ("DeformConv", [(1, 4, 6, 6), (8, 2, 3, 3), (1, 36, 4, 4)], (1, 8, 4, 4), {"group": 2}, 2 * 8 * 16 * 18),
        ("CausalConvWithState", [(2, 8, 10), (8, 1, 4)], (2, 8, 10), {}, 2 * 2 * 8 * 10 * 4),
        ("DynamicQuantizeLSTM", [(5, 2, 3), (1, 3, 16), (1, 4, 16)], (5, 1, 2, 4), {}, 2 * 10 * (48 + 64)),
        ("Einsum", [(2, 3), (3, 4)], (2, 4), {"equation": "ij, jk"}, 2 * 2 * 3 * 4),
        ("Einsum", [(2, 3), (4, 3)], (2, 4), {"equation": "ab,cb"}, 2 * 2 * 3 * 4),
        ("Einsum", [(5, 2, 3), (3, 4)], (5, 2, 4), {"equation": "...ij,jk"}, 2 * 5 * 2 * 3 * 4),
        ("Einsum", [(6, 5, 3), (5, 3)], (6, 5), {"equation": "...i,...i->..."}, 2 * 6 * 5 * 3),
        ("Einsum", [(2, 3, 3), (2, 3, 3)], (), {"equation": "bij,bij->"}, 2 * 2 * 3 * 3),
        ("Einsum", [(2, 3), (3, 4), (4, 5)], (2, 5), {"equation": "ij,jk,kl->il"}, 2 * (2 * 3 * 4 + 2 * 4 * 5)),
        ("Einsum", [(2, 3, 7), (3, 4)], (2, 4), {"equation": "ijm,jk->ik"}, 2 * 2 * 3 * 4),  # m is summed before
        ("Einsum", [(2, 3)], (3, 2), {"equation": "ij->ji"}, 6),
    ],
)
def test_flops(op_type: str, inputs: list[Any], output: Any, attributes: dict[str, object], flops: float) -> None:
    assert node_flops(op_type, inputs, [output], attributes) == flops


NONE: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "attributes", "flops"),
    [
        # 4 heads of width 2 over 2 of keys and values, 7 earlier tokens and 5 new ones
        (
            *("Attention", [(2, 5, 8), (2, 5, 4), (2, 5, 4), NONE, (2, 2, 7, 2), (2, 2, 7, 2)], [(2, 5, 8)]),
            *({"q_num_heads": 4, "kv_num_heads": 2}, 2 * 2 * 5 * 12 * (8 + 8)),
        ),
        # the hidden state times the weight of Q, K and V; 9 earlier tokens and 3 new ones
        (
            *("Attention", [(2, 3, 8), (8, 24), (24,), NONE, (2, 2, 2, 9, 4)], [(2, 3, 8)], {"num_heads": 2}),
            2 * 6 * 8 * 24 + 2 * 12 * 6 * (8 + 8),
        ),
        # Q and K of 4 in all, V of 8
        (
            *("Attention", [(2, 3, 8), (8, 16), (16,)], [(2, 3, 8)]),
            *({"num_heads": 2, "qkv_hidden_sizes": (4, 4, 8)}, 2 * 6 * 8 * 16 + 2 * 3 * 6 * (4 + 8)),
        ),
        ("QAttention", [(1, 3, 8), (8, 24), *[NONE] * 6, (2, 1, 2, 5, 4)], [(1, 3, 8)], {}, 1152 + 2 * 8 * 3 * 16),
        # keys and values of 5 tokens, as one and in heads; 6 tokens more in the cache
        ("MultiHeadAttention", [(2, 3, 8), (2, 5, 8), (2, 5, 8)], [(2, 3, 8)], {}, 2 * 5 * (48 + 48)),
        ("MultiHeadAttention", [(2, 3, 8), (2, 5, 2, 2, 4)], [(2, 3, 8)], {}, 2 * 5 * (48 + 48)),
        ("MultiHeadAttention", [(2, 3, 2, 3, 4)], [(2, 3, 8)], {}, 2 * 3 * (48 + 48)),
        (
            *("MultiHeadAttention", [(2, 3, 8), (2, 3, 8), (2, 3, 8), *[NONE] * 3, (2, 2, 6, 4)], [(2, 3, 8)]),
            *({}, 2 * 9 * (48 + 48)),
        ),
        # one token, 4 heads of width 2 over 1; without a cache that is returned, and with one of 32 places
        (
            *("GroupQueryAttention", [(1, 1, 8), (1, 1, 2), (1, 1, 2), (1, 1, 15, 2)], [(1, 1, 8)]),
            *({"num_heads": 4, "kv_num_heads": 1}, 2 * 16 * (8 + 8)),
        ),
        (
            *("GroupQueryAttention", [(1, 1, 12), NONE, NONE, (1, 1, 32, 2)], [(1, 1, 8), (1, 1, 32, 2)]),
            *({"num_heads": 4, "kv_num_heads": 1}, 2 * 32 * (8 + 8)),
        ),
    ],
)
def test_attention_reads_earlier_keys_in_groups_of_heads(
    op_type: str, inputs: list[Any], outputs: list[Any], attributes: dict[str, object], flops: float
) -> None:
    assert node_flops(op_type, inputs, outputs, attributes) == flops


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("MoE", [(4, 8), (4, 2), (2, 16, 8)], {}),
        ("DFT", [(1, 64, 1)], {}),
        ("NonMaxSuppression", [(1, 50, 4), (1, 3, 50)], {}),
        ("LinearAttention", [(1, 4, 8)] * 3, {}),
        ("Einsum", [(2, 3, 4), (4, 5)], {"equation": "ij,jk"}),
        ("Conv", [(1, 3, 6, 6), NONE], {}),
        ("GroupQueryAttention", [(1, 1, 12)], {}),
        ("Gemm", [NONE], {}),
    ],
)
def test_what_has_no_definition_has_no_flops(op_type: str, inputs: list[Any], attributes: dict[str, object]) -> None:
    assert node_flops(op_type, inputs, [(4, 8)], attributes) is None


def made_by_others(path: Path, nodes: list[Any]) -> Path:
    """A model whose values are all (2, 3), with operators that onnx does not know."""
    names = ["x", *(name for node in nodes for name in node.output)]
    values = [helper.make_tensor_value_info(name, FLOAT, [2, 3]) for name in names]
    graph = helper.make_graph(nodes, "g", values[:1], values[-1:], value_info=values[1:-1])
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def test_nodes_of_unknown_cost_are_counted_and_said(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("MoE", ["x"], ["a"], domain="com.microsoft"),
        node("Relu", ["a"], ["b"]),
        node("Relu", ["b"], ["c"], domain="com.acme"),
        node("Gelu", ["c"], ["d"], domain="com.microsoft"),
        node("MoE", ["d"], ["y"], domain="com.microsoft"),
    ]
    path = made_by_others(tmp_path / "m.onnx", nodes)
    with pytest.warns(RuntimeWarning, match=r"3 nodes of unknown cost: MoE \(2\), Relu"):
        graph = load_graph(path)
    assert graph.flops[1:].tolist() == [6.0] * 5
    assert load_graph(made_by_others(tmp_path / "known.onnx", [node("Relu", ["x"], ["y"])])).notes == ()


@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_a_graph_that_is_saved_keeps_what_is_unknown(ending: str, tmp_path: Path) -> None:
    path = made_by_others(tmp_path / "m.onnx", [helper.make_node("MoE", ["x"], ["y"], domain="com.microsoft")])
    graph = load_onnx(path)
    save_graph(graph, tmp_path / f"m.{ending}")
    with pytest.warns(RuntimeWarning, match="1 node of unknown cost: MoE"):
        again = load_graph(tmp_path / f"m.{ending}")
    assert again.notes == graph.notes


def test_a_gather_moves_only_the_rows_that_it_reads() -> None:
    assert node_bytes("Gather", [1_000_000, 8], [40]) == 88
    assert node_bytes("Add", [40, 8], [40]) == 88


@pytest.mark.parametrize(
    ("op_type", "kind"),
    [
        ("MatMul", "matmul"), ("Gemm", "matmul"), ("LSTM", "matmul"), ("Conv", "convolution"),
        ("Attention", "attention"), ("Softmax", "reduction"), ("LayerNormalization", "reduction"),
        ("BatchNormalization", "reduction"), ("ReduceMean", "reduction"), ("MaxPool", "reduction"),
        ("GlobalAveragePool", "reduction"), ("ArgMax", "reduction"), ("Gather", "gather"), ("ScatterND", "gather"),
        ("Max", "elementwise"), ("Sum", "elementwise"), ("Relu", "elementwise"), ("Transpose", "elementwise"),
    ],
)  # fmt: skip
def test_targets_are_of_the_class_that_costs_the_same(op_type: str, kind: str) -> None:
    from rlplace.measure.costs.costs import op_class

    assert op_class(target_of(op_type, "")) == kind


def test_an_exported_model_does_the_work_that_torch_counts(tmp_path: Path) -> None:
    """Exported with a dynamic batch and length: shapes go through Shape, Gather, Div, Concat, Reshape."""
    import warnings

    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(50, 16), nn.Linear(16, 48)
            self.conv = nn.Conv1d(16, 8, 3, groups=2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            b, t, d = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            return self.conv(y.transpose(1, 2).reshape(b, t, d).transpose(1, 2))

    model, ids = Attention().eval(), torch.zeros(2, 7, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids)
    axes = {"ids": {0: "batch", 1: "length"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (ids,), str(tmp_path / "a.onnx"), dynamo=False, input_names=["ids"], dynamic_axes=axes)
        torch.onnx.export(model, (ids,), str(tmp_path / "s.onnx"), dynamo=False, input_names=["ids"])
    graph = load_onnx(tmp_path / "a.onnx", dims={"batch": 2, "length": 7})
    products = [t in ("aten.matmul.default", "aten.addmm.default", "aten.convolution.default") for t in graph.targets]
    assert graph.flops[np.array(products)].sum() == counter.get_total_flops()
    assert graph.parameter_bytes.sum() == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert {"embed", "qkv", "conv"} <= set(graph.modules)
    assert graph.tensor_shapes[graph.output_tensors[0]] == tuple(model(ids).shape)
    fixed = load_onnx(tmp_path / "s.onnx")
    assert sorted(fixed.targets) == sorted(graph.targets)
    assert fixed.flops.sum() == graph.flops.sum()


def outcome(path: Path) -> str:
    """`loaded`, or the kind of error."""
    with warnings.catch_warnings(action="ignore"):
        try:
            found: OpGraph | UserError = load_onnx(path)
        except UserError as error:
            found = error
    if isinstance(found, UserError):
        assert "\n" not in str(found)
        assert len(str(found)) < 2000
        return type(found).__name__
    assert found.num_ops > 0
    return "loaded"


@pytest.mark.slow
def test_models_of_files() -> None:
    paths = sorted(Path(onnx.__file__).parent.rglob("*.onnx"))
    counts = Counter(map(outcome, paths))
    print(counts)
    assert len(paths) > 100
    assert counts["loaded"] > 0.8 * len(paths)


@pytest.mark.slow
def test_models_of_the_tests_of_operators(tmp_path: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(action="ignore"):
        models = [case.model for case in collect_testcases(None)]
    path, counts = tmp_path / "m.onnx", Counter[str]()
    for model in models:
        path.write_bytes(model.SerializeToString())
        counts[outcome(path)] += 1
    print(counts)
    assert len(models) > 1000
    assert counts["loaded"] > 0.8 * len(models)
