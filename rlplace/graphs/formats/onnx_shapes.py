"""Shapes of an ONNX model's values: inputs fixed, then node by node, with what only computes shapes worked out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.decode import described, shortened
from rlplace.errors import InvalidValue
from rlplace.graphs.formats.fields import LARGEST_COUNT

_LARGEST_FOLDED = 1024
"""Values of at most that many elements may be shapes, and are worked out where everything they come from is known."""
_FOLDED = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not",
    "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Split", "Sqrt", "Squeeze",
    "Sub", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
"""Nodes that shapes are computed with."""
_DTYPES = {
    1: ("float32", 8), 2: ("uint8", 2), 3: ("int8", 2), 4: ("uint16", 4), 5: ("int16", 4), 6: ("int32", 8),
    7: ("int64", 16), 9: ("bool", 2), 10: ("float16", 4), 11: ("float64", 16), 12: ("uint32", 8), 13: ("uint64", 16),
    14: ("complex64", 16), 15: ("complex128", 32), 16: ("bfloat16", 4), 17: ("float8_e4m3fn", 2),
    18: ("float8_e4m3fnuz", 2), 19: ("float8_e5m2", 2), 20: ("float8_e5m2fnuz", 2), 21: ("uint4", 1), 22: ("int4", 1),
    23: ("float4_e2m1fn", 1),
}  # fmt: skip
"""Name and half bytes of an element, by `TensorProto.DataType`."""


@dataclass(frozen=True)
class Value:
    """What is known of a value before anything runs."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def fix_inputs(model: Any, dims: Mapping[str, int], path: Path) -> None:
    """Gives every dimension of every input a size, and the same to whatever else has a dimension of that name.

    Args:
        model: a `ModelProto`, changed in place.
        dims: see `load_onnx`.
        path: for messages.

    Raises:
        InvalidValue: an input that is no tensor of a known rank, a dynamic dimension without a size, or a size for
            nothing.
    """
    sizes = dict(dims)
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= LARGEST_COUNT:
            raise InvalidValue(f"dims[{name!r}]", described(size), "an integer >= 1", where=str(path))
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    used: set[str] = set()
    for value in graph.input:
        if value.name in weights:
            continue
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            field = f"input {shortened(value.name)!r}"
            raise InvalidValue(field, "no tensor of a known rank", "a tensor with a shape", where=str(path))
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                continue
            place = f"{value.name}.{axis}"
            label = dim.dim_param or place
            key = place if place in sizes else label
            if key not in sizes:
                if axis > 0:
                    raise _no_size(value, axis, label, path)
                sizes[key] = 1
            used.add(key)
            dim.dim_value = sizes[key]
            sizes.setdefault(label, sizes[key])
    unused = next((name for name in dims if name not in used), None)
    if unused is not None:
        raise InvalidValue(f"dims[{unused!r}]", "of no input", "names of dynamic dimensions", where=str(path))
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def infer_values(model: Any, path: Path) -> tuple[dict[str, Value], dict[str, str]]:
    """Shape and dtype of every value that has both; and why the others have none, as far as onnx says.

    onnx infers the outputs of one node after the other. A node that computes a shape (`Shape`, `Gather`, `Concat`, ...)
    is worked out at once, so that what it shapes is known, too.

    Args:
        model: a `ModelProto` whose inputs have sizes.
        path: for messages.

    Raises:
        InvalidValue: a size is negative or beyond all reason.
    """
    return _Inference(model, path).run()


class _Inference:
    def __init__(self, model: Any, path: Path) -> None:
        self.model = model
        self.path = path
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        self.types: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}  # small TensorProtos, by value
        self.reasons: dict[str, str] = {}

    def run(self) -> tuple[dict[str, Value], dict[str, str]]:
        from onnx import TensorProto, helper

        graph = self.model.graph
        given = {info.name: info.type for info in (*graph.value_info, *graph.output) if _is_complete(info.type)}
        self.types = {info.name: info.type for info in graph.input if _is_complete(info.type)}
        for tensor in graph.initializer:
            self.types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            if tensor.data_location != TensorProto.EXTERNAL and _num_elements(tensor.dims) <= _LARGEST_FOLDED:
                self.constants[tensor.name] = tensor
        for sparse in graph.sparse_initializer:
            self.types[sparse.values.name] = helper.make_tensor_type_proto(sparse.values.data_type, list(sparse.dims))
        for node in graph.node:
            inferred = self._infer(node)
            for name in node.output:
                kind = inferred.get(name)
                if kind is not None and _is_complete(kind):
                    self.types[name] = kind
                elif name in given:
                    self.types[name] = given[name]
            self._fold(node, inferred)
        return {name: self._value(name, kind.tensor_type) for name, kind in self.types.items()}, self.reasons

    def _infer(self, node: Any) -> dict[str, Any]:
        import onnx

        domain = "" if node.domain == "ai.onnx" else node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
            return onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: self.types[name] for name in node.input if name},
                {name: self.constants[name] for name in node.input if name in self.constants},
                opset_imports=list(self.model.opset_import),
                ir_version=self.model.ir_version,
            )
        except Exception as error:  # onnx raises classes of its own and of pybind11, of no common root
            if isinstance(error, KeyError):
                reason = f"the shape of its input {described(error.args[0])!r} is unknown"
            else:
                reason = shortened(str(error)) or type(error).__name__
            self.reasons |= {name: self.reasons.get(next(iter(node.input), ""), reason) for name in node.output}
            return {}

    def _fold(self, node: Any, inferred: Mapping[str, Any]) -> None:
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator

        if node.op_type in ("Shape", "Size") and len(node.output) == 1 and len(node.input) == 1:
            result = self._shape(node)
            if result is not None:
                self.constants[node.output[0]] = numpy_helper.from_array(result, node.output[0])
            return
        names = [name for name in node.input if name]
        if node.op_type not in _FOLDED or node.domain or not all(map(self._is_constant, names)):
            return
        shapes = [_shape_of(inferred[name]) if name in inferred else None for name in node.output]
        if not all(shape is not None and _is_small(shape) for shape in shapes):
            return  # what a file declares of an output is not believed: the node would run, whatever it gives
        if node.op_type == "Range" and (0,) in shapes:
            return  # onnx says 0, too, where the count of its elements overflows
        try:
            with np.errstate(all="ignore"):
                arrays = {name: numpy_helper.to_array(self.constants[name]) for name in names}
                made = ReferenceEvaluator(node, opsets=self.opsets or {"": 18}).run(None, arrays)
                for name, array in zip(node.output, made, strict=True):
                    self.constants[name] = numpy_helper.from_array(np.asarray(array), name)
        except Exception as error:  # a malformed node: what it shapes stays unknown, and is reported where it is needed
            self.reasons |= {name: shortened(str(error)) for name in node.output}

    def _is_constant(self, name: str) -> bool:
        """Whether its elements are known, and are those of the value of that name, not of an earlier one."""
        kind, constant = self.types.get(name), self.constants.get(name)
        return kind is not None and constant is not None and _shape_of(kind) == tuple(constant.dims)

    def _shape(self, node: Any) -> np.ndarray[Any, Any] | None:
        shape = _shape_of(self.types[node.input[0]]) if node.input[0] in self.types else None
        if shape is None:
            return None
        if node.op_type == "Size":
            size = math.prod(shape)
            return np.array(size, dtype=np.int64) if size <= LARGEST_COUNT else None
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], dtype=np.int64)

    def _value(self, name: str, kind: Any) -> Value:
        shape = tuple(dim.dim_value for dim in kind.shape.dim)
        dtype, half_bytes = _DTYPES.get(kind.elem_type, ("uint8", 2))
        num_bytes = (_num_elements(shape) * half_bytes + 1) // 2
        if any(not 0 <= size <= LARGEST_COUNT for size in shape) or num_bytes > LARGEST_COUNT:
            expected = f"sizes of at most {LARGEST_COUNT} bytes"
            raise InvalidValue(f"shape of {shortened(name)!r}", described(str(shape)), expected, where=str(self.path))
        return Value(shape, dtype, num_bytes)


def _is_complete(kind: Any) -> bool:
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape") and _shape_of(kind) is not None


def _shape_of(kind: Any) -> tuple[int, ...] | None:
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _num_elements(shape: Any) -> int:
    return math.prod(max(size, 0) for size in shape)


def _is_small(shape: tuple[int, ...]) -> bool:
    """Whether a value can be worked out; a size of 0 hides no large one, which a step in between may have."""
    return math.prod(max(size, 1) for size in shape) <= _LARGEST_FOLDED


def _no_size(value: Any, axis: int, label: str, path: Path) -> InvalidValue:
    sizes = ", ".join(str(dim.dim_value or dim.dim_param or "?") for dim in value.type.tensor_type.shape.dim)
    return InvalidValue(
        f"input {shortened(value.name)!r}",
        f"of shape ({shortened(sizes)})",
        "sizes that are known",
        where=str(path),
        hint=f"Say the size of its dimension {axis}: dims={{{label!r}: 128}}, or --dims {label}=128.",
    )
