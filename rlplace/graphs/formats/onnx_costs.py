"""What an ONNX node is and does in ATen's words: its target, its FLOPs and the bytes that it moves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Optional"})
"""Nodes whose (first) output shows the memory of their first input: no ops, as views of ATen are none."""
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
SHAPE_INPUTS: dict[str, int] = {
    "CenterCropPad": 1, "ConstantOfShape": 0, "Expand": 1, "EyeLike": 0, "Pad": 1, "RandomNormalLike": 0,
    "RandomUniformLike": 0, "Range": 0, "ReduceL1": 1, "ReduceL2": 1, "ReduceLogSum": 1, "ReduceLogSumExp": 1,
    "ReduceMax": 1, "ReduceMean": 1, "ReduceMin": 1, "ReduceProd": 1, "ReduceSum": 1, "ReduceSumSquare": 1,
    "Resize": 1, "Shape": 0, "Size": 0, "Slice": 1, "Split": 1, "Tile": 1, "TopK": 1, "Upsample": 1,
}  # fmt: skip
"""From which input on a node reads shapes and the like: known before the step, so no tensors that have to be there."""

_TARGETS = {
    "ArgMax": "aten.argmax", "ArgMin": "aten.argmin", "CumSum": "aten.cumsum",
    "Attention": "aten.scaled_dot_product_attention", "AveragePool": "aten.avg_pool2d",
    "BatchNormalization": "aten.native_batch_norm", "BitShift": "aten.bitwise_left_shift", "Conv": "aten.convolution",
    "ConvInteger": "aten.convolution", "ConvTranspose": "aten.convolution", "Einsum": "aten.einsum",
    "FusedGemm": "aten.addmm", "FusedMatMul": "aten.matmul", "GRU": "aten.gru", "Gather": "aten.embedding",
    "GatherElements": "aten.gather", "GatherND": "aten.gather", "Gemm": "aten.addmm",
    "GlobalAveragePool": "aten.adaptive_avg_pool2d", "GlobalMaxPool": "aten.adaptive_max_pool2d",
    "GroupNormalization": "aten.native_group_norm", "GroupQueryAttention": "aten.scaled_dot_product_attention",
    "InstanceNormalization": "aten.instance_norm", "LSTM": "aten.lstm", "LayerNormalization": "aten.native_layer_norm",
    "LogSoftmax": "aten._log_softmax", "LpNormalization": "aten.linalg_vector_norm", "MatMul": "aten.matmul",
    "MatMulInteger": "aten.matmul", "MatMulNBits": "aten.matmul", "Max": "aten.maximum", "MaxPool": "aten.max_pool2d",
    "Mean": "aten.add", "MeanVarianceNormalization": "aten.native_layer_norm", "Min": "aten.minimum",
    "MultiHeadAttention": "aten.scaled_dot_product_attention", "NonZero": "aten.nonzero",
    "QLinearConv": "aten.convolution", "QLinearMatMul": "aten.matmul", "RMSNormalization": "aten._fused_rms_norm",
    "RNN": "aten.rnn_tanh", "ReduceMax": "aten.amax", "ReduceMean": "aten.mean", "ReduceMin": "aten.amin",
    "ReduceProd": "aten.prod", "ScatterElements": "aten.scatter", "ScatterND": "aten.index_put",
    "SimplifiedLayerNormalization": "aten._fused_rms_norm", "SkipLayerNormalization": "aten.native_layer_norm",
    "Softmax": "aten._softmax", "Sum": "aten.add", "TopK": "aten.topk",
}  # fmt: skip
_PRODUCTS = frozenset({"MatMul", "MatMulInteger", "FusedMatMul"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def target_of(op_type: str, domain: str) -> str:
    """The ATen target that stands for an ONNX operator; `DOMAIN.name.default` for operators of others.

    Example:
        >>> target_of("Gemm", ""), target_of("LeakyRelu", ""), target_of("Fancy", "com.acme")
        ('aten.addmm.default', 'aten.leaky_relu.default', 'com_acme.fancy.default')
    """
    if op_type in _TARGETS:
        return f"{_TARGETS[op_type]}.default"
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op_type).lower()
    if op_type.startswith("Reduce"):
        return "aten.sum.default"
    namespace = "aten" if domain in ("", "ai.onnx") else re.sub(r"\W", "_", domain)
    return f"{namespace}.{re.sub(r'[^a-z0-9_]', '_', name)}.default"


def node_flops(
    op_type: str, inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, object]
) -> float:
    """Floating-point operations of one node; a multiply-add counts as two.

    Matrix products, convolutions, attention, recurrent layers and Einsum by their definitions in the ONNX operator
    documentation; any other node one operation for each element of its larger side.

    Args:
        op_type: of the ONNX operator.
        inputs: shapes of its inputs, `()` for one that is left out.
        outputs: shapes of its outputs.
        attributes: of the node.
    """
    out = math.prod(outputs[0]) if outputs else 0
    if op_type in _PRODUCTS and len(inputs) >= 2 and inputs[0]:
        depth = inputs[0][-2] if attributes.get("transA") and len(inputs[0]) > 1 else inputs[0][-1]
        return 2.0 * out * depth
    if op_type in ("Gemm", "FusedGemm") and len(inputs) >= 2 and len(inputs[0]) == 2:
        return 2.0 * out * inputs[0][0 if attributes.get("transA") else 1]
    if op_type == "QLinearMatMul" and inputs and inputs[0]:
        return 2.0 * out * inputs[0][-1]
    if op_type in ("Conv", "ConvInteger", "ConvTranspose", "QLinearConv") and len(inputs) >= 2:
        weight = inputs[3] if op_type == "QLinearConv" and len(inputs) > 3 else inputs[1]
        moved = math.prod(inputs[0]) if op_type == "ConvTranspose" else out
        return 2.0 * moved * math.prod(weight[1:])
    if op_type in _RECURRENT and len(inputs) >= 3 and len(inputs[0]) == 3:
        return 2.0 * inputs[0][0] * inputs[0][1] * (math.prod(inputs[1]) + math.prod(inputs[2]))
    if op_type in ("Attention", "MultiHeadAttention", "GroupQueryAttention") and inputs and len(inputs[0]) >= 3:
        return _attention_flops(inputs, out)
    if op_type == "Einsum":
        found = _einsum_flops(str(attributes.get("equation", "")), inputs, out)
        if found is not None:
            return found
    return float(max(sum(map(math.prod, inputs)), sum(map(math.prod, outputs))))


def node_bytes(op_type: str, input_bytes: Sequence[int], output_bytes: Sequence[int]) -> float:
    """Bytes that one node reads and writes: each input and output once, but of a table only the rows that are read."""
    if op_type.startswith("Gather") and len(input_bytes) >= 2:
        return float(2 * sum(output_bytes) + input_bytes[1])
    return float(sum(input_bytes) + sum(output_bytes))


def _attention_flops(inputs: Sequence[Shape], out: int) -> float:
    """Scores and their use, of (B, S, hidden) or (B, heads, S, width); with the projection where it is fused in."""
    query = inputs[0]
    fused = len(inputs) >= 2 and len(inputs[1]) == 2  # com.microsoft.Attention: inputs[1] is the weight of Q, K and V
    keys = query[-2] if fused or len(inputs) < 2 or len(inputs[1]) < 3 else inputs[1][-2]
    projection = 2.0 * math.prod(query) * inputs[1][1] if fused else 0.0
    return projection + 2.0 * keys * (math.prod(query) + out)


def _einsum_flops(equation: str, inputs: Sequence[Shape], out: int) -> float | None:
    terms, _, result = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms.split(","), inputs, strict=False):
        head, dots, tail = term.partition("...")
        if len(head) + len(tail) > len(shape) or (not dots and len(head) != len(shape)):
            return None
        sizes.update(zip(head, shape, strict=False))
        sizes.update(zip(reversed(tail), reversed(shape), strict=False))
    return 2.0 * out * math.prod(size for label, size in sizes.items() if label not in result) if result else None
