"""ONNX models as graphs: shapes inferred, costs in principle from them; weights are not needed and never read.

Shapes of an ONNX model's values: inputs fixed, then node by node, with computations of shapes worked out.

ONNX nodes in ATen's terms: target, FLOPs and bytes moved of each.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.errors import FileProblem, InvalidValue, MissingExtra, RlplaceError, refuse_if
from rlplace.files import read_plain
from rlplace.graphs.formats.networkx_graph import note_on
from rlplace.graphs.formats.onnx_limits import check_functions, check_lengths, check_message, check_names
from rlplace.graphs.opgraph import (
    FORWARD,
    LARGEST_COUNT,
    MOST_DIMENSIONS,
    MOST_TEXT,
    GraphBuilder,
    OpGraph,
    OpRow,
    TensorRow,
    unique_names,
)
from rlplace.records import described, shortened


@dataclass(frozen=True)
class _Item:
    """A source or a node, on its way to be an op."""

    name: str
    target: str
    module: str
    where: str
    arguments: tuple[str, ...]
    """Values as the node names them, in their places; `""` for one that is left out."""
    reads: tuple[str, ...]
    """Base values of the arguments, each once."""
    outputs: tuple[str, ...]
    """Values that it makes, in their places; `""` for an optional one that is left out."""
    node: Any = None


def load_onnx(path: str | os.PathLike[str], *, dims: Mapping[str, int] | None = None) -> OpGraph:
    """The inference graph of an ONNX model.

    Nodes become ops under the ATen names that cost the same, reshapes are views, initializers and weights in `Constant`
    nodes are parameters, and computations of shapes are left out. Modules come from node names
    (`/encoder/layer.0/MatMul`).

    Args:
        path: of the model; external data need not be there.
        dims: sizes of dynamic dimensions by their names (`{"batch": 8, "sequence": 128}`), or by input and axis
            (`{"input_ids.1": 128}`). A dynamic first dimension that is not named here is 1.

    Raises:
        MissingExtra: `onnx` is not installed.
        FileProblem: the file is missing or no ONNX model, or it has control flow.
        InvalidValue: a dynamic dimension without a size, or a shape that cannot be inferred.
    """
    path = Path(path)
    model = _read(path)
    fix_inputs(model, dims or {}, path)
    return _Builder(model, *_Inference(model, path).run(), path).graph()


def _read(path: Path) -> Any:
    try:
        import onnx
        from onnx import inliner
    except ImportError as error:
        raise MissingExtra("onnx", "onnx") from error
    try:
        # what a protobuf message can hold; models with more keep their weights in other files
        content = read_plain(path, largest_bytes=2**31 - 1, holds="ONNX", follows_links=True)
        check_message(content, onnx.ModelProto.DESCRIPTOR)
        model = onnx.load_model_from_string(content)
        del content
        check_functions(model, path)
        if model.functions:
            model = inliner.inline_local_functions(model)
        check_lengths(model, path)
        check_names(model.graph, path)
    except RlplaceError:
        raise
    except Exception as error:  # protobuf and onnx raise classes of their own, of no common root
        raise FileProblem(path, f"not a valid ONNX model: {shortened(str(error))}") from error
    refuse_if(not model.graph.node, "graph.node", "empty", "at least one node", where=str(path))
    return model


class _Builder:
    """Walks the nodes of one model."""

    def __init__(self, model: Any, values: Mapping[str, Value], reasons: Mapping[str, str], path: Path) -> None:
        self.onnx_graph, self.path = model.graph, path
        self.values, self.reasons = values, reasons
        self.base: dict[str, str] = {}  # the value whose memory a value shows; itself if it is no view
        self.items: list[_Item] = []
        self.num_characters = 0  # of signatures
        self.unknown: Counter[str] = Counter()  # nodes whose cost is not known, by operator

    def graph(self) -> OpGraph:
        graph = self.onnx_graph
        tensors = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
        weights = {tensor.name for tensor in tensors}
        for value in graph.input:
            if value.name not in weights:
                self._add_source(value.name, "input")
        for tensor in tensors:
            self._add_source(tensor.name, self._kind_of(tensor.name))
        for place, node in enumerate(graph.node):
            self._add_node(node, place)
        returned = [value.name for value in graph.output]
        if unmade := [name for name in returned if name not in self.base]:
            raise InvalidValue("graph.output", described(unmade[0]), "a value that a node makes", where=str(self.path))
        results = [self.base[name] for name in returned]
        return self._assemble(*self._live(results), results)

    def _kind_of(self, name: str) -> str:
        """Of a value that the file gives: a weight, or what computes shapes."""
        value = self.values.get(name)
        is_index = value is None or (value.dtype in ("int64", "int32", "bool") and len(value.shape) <= 1)
        return "constant" if is_index else "parameter"

    def _add_source(self, name: str, kind: str) -> None:
        refuse_if(
            name in self.base, "name", described(name), f"a name of its own for each {kind}", where=str(self.path)
        )
        module = name.rpartition(".")[0] if kind == "parameter" and re.fullmatch(r"[\w.]+", name) else ""
        self.base[name] = name
        self.items.append(
            _Item(name or kind, kind, module, f"{self.path}, {kind} {described(name)!r}", (), (), (name,))
        )

    def _add_node(self, node: Any, place: int) -> None:
        where = f"{self.path}, node {place} ({shortened(node.op_type)} {shortened(node.name)!r})"
        if node.op_type in CONTROL_FLOW or any(a.HasField("g") or a.graphs for a in node.attribute):
            raise FileProblem(
                where,
                "it holds a graph of its own, and control flow cannot be placed: export the model with its "
                "loops unrolled and its branches taken.",
            )
        if unknown := next((name for name in node.input if name and name not in self.base), ""):
            raise InvalidValue(
                "input",
                described(unknown),
                "a value that an input, an initializer or an earlier node makes",
                where=where,
            )
        if taken := next((name for name in node.output if name and name in self.base), ""):
            raise InvalidValue("output", described(taken), "a name that no other value has", where=where)
        self.base |= {name: name for name in node.output if name}
        if node.op_type in VIEWS and node.input and node.input[0] and node.output:
            self.base[node.output[0]] = self.base[node.input[0]]
        arguments = tuple(node.input[: SHAPE_INPUTS.get(node.op_type, len(node.input))])
        is_given, first = node.op_type in ("Constant", "Shape", "Size"), next(iter(node.output), "")
        self.items.append(
            _Item(
                name=node.name or f"{node.op_type}_{place}",
                target=self._kind_of(first) if is_given else target_of(node.op_type, node.domain),
                module=_module(node),
                where=where,
                arguments=arguments,
                reads=tuple(dict.fromkeys(self.base[name] for name in arguments if name)),
                outputs=tuple(name if self.base.get(name) == name else "" for name in node.output),
                node=node,
            )
        )

    def _live(self, results: list[str]) -> tuple[list[_Item], set[str]]:
        """Items that the results depend on, and all inputs; and the values that are read or returned."""
        needed, live = set(results), list[_Item]()
        for item in reversed(self.items):
            if item.target == "input" or not needed.isdisjoint(item.outputs):
                live.append(item)
                needed.update(item.reads)
        return live[::-1], needed

    def _assemble(self, items: list[_Item], needed: set[str], results: list[str]) -> OpGraph:
        builder = GraphBuilder()
        names = unique_names([item.name for item in items])
        first = {name: item.module for item in reversed(items) for name in item.reads}  # module of the first reader
        ids: dict[str, int] = {}
        for op, (item, name) in enumerate(zip(items, names, strict=True)):
            is_parameter, is_held = item.target == "parameter", item.target in ("parameter", "constant")
            module = item.module or (first.get(item.outputs[0], "") if is_held else "")
            signature, flops, moved = self._facts(item, needed)
            row = OpRow(name, item.target, module, FORWARD, signature, [ids[each] for each in item.reads], flops, moved)
            row.parameter_bytes = self.values[item.outputs[0]].num_bytes if is_parameter else 0
            builder.add(row)
            for place, output in enumerate(item.outputs):
                if output in needed or item.target == "input":
                    value = self._known(output, item)
                    ids[output] = builder.add_tensor(TensorRow(op, place, value.num_bytes, value.shape, value.dtype))
        try:
            graph = builder.graph(sorted({ids[name] for name in results}))
        except InvalidValue as error:
            raise InvalidValue(error.field, error.actual, error.expected, where=str(self.path)) from error
        return replace(graph, notes=note_on(self.unknown, "each counts as one operation for each element"))

    def _facts(self, item: _Item, needed: set[str]) -> tuple[str, float, float]:
        """Signature, FLOPs and bytes moved."""
        if item.target in ("input", "parameter", "constant"):
            return item.target, 0.0, 0.0
        op_type, attributes = item.node.op_type, dict(_attributes(item.node))
        given = [self._known(name, item) if name else Value((), "", 0) for name in item.arguments]
        made = [self._known(name, item) for name in item.outputs if name in needed]
        # a cache says how long it is, whoever reads it
        told = item.node.output if op_type in _ATTENTION else [name for name in item.outputs if name in needed]
        shapes = [value.shape for value in given], [self.values[name].shape for name in told if name in self.values]
        parts = [f"{value.dtype}{value.shape}" for value in given if value.dtype]
        parts += [f"{name}={value}" for name, value in sorted(attributes.items())]
        signature = f"{item.target}({', '.join(parts)})"
        self.num_characters += len(signature)
        if self.num_characters > MOST_TEXT:
            raise FileProblem(self.path, "nodes with too many inputs or attributes.")
        flops = node_flops(op_type, *shapes, attributes)
        if flops is None or item.node.domain not in ("", "ai.onnx", "ai.onnx.ml", "com.microsoft"):
            flops = _num_of_each(*shapes)
            self.unknown[shortened(op_type)] += 1
        return (
            signature,
            flops,
            node_bytes(op_type, [value.num_bytes for value in given], [value.num_bytes for value in made]),
        )

    def _known(self, name: str, item: _Item) -> Value:
        if name not in self.values:
            reason = f"onnx says: {self.reasons[name]}. " if self.reasons.get(name) else ""
            raise InvalidValue(
                f"shape of {shortened(name)!r}",
                "unknown",
                "a shape that can be inferred",
                where=item.where,
                hint=f"{reason}Simplify the model (onnxsim), or give the shape in its value_info.",
            )
        return self.values[name]


def _attributes(node: Any) -> Iterator[tuple[str, object]]:
    """Plain attributes; a tensor among them is data, not a kind of op."""
    for each in node.attribute:
        if each.type in (each.INT, each.FLOAT):
            yield each.name, each.i if each.type == each.INT else each.f
        elif each.type == each.INTS:
            yield each.name, tuple(each.ints)[:16]
        elif each.type == each.STRING:
            yield each.name, shortened(each.s.decode("utf-8", "replace"))


def _module(node: Any) -> str:
    """`encoder.layer.0` of a node that TorchScript's exporter named `/encoder/layer.0/MatMul`.

    The newer exporter keeps the modules on the way to a node in its metadata, from the root to the node itself.
    """
    scopes = next((entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"), "")
    found = re.findall(r"'([^']*)'", scopes)
    return str(found[-2] if len(found) > 1 else node.name.strip("/").rpartition("/")[0].replace("/", "."))


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
    """Shape, dtype and size of a value, known before a run."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def fix_inputs(model: Any, dims: Mapping[str, int], path: Path) -> None:
    """Gives every dimension of every input a size, and the same to all other dimensions of that name.

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
        refuse_if(
            type(size) is not int or not 1 <= size <= LARGEST_COUNT,
            f"dims[{name!r}]",
            described(size),
            "an integer >= 1",
            where=str(path),
        )
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    used: set[str] = set()
    for value in graph.input:
        if value.name in weights:
            continue
        refuse_if(
            not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"),
            f"input {shortened(value.name)!r}",
            "no tensor of a known rank",
            "a tensor with a shape",
            where=str(path),
        )
        for axis, dim in enumerate(shape := value.type.tensor_type.shape.dim):
            place = f"{value.name}.{axis}"
            if dim.dim_value > 0 or (dim.HasField("dim_value") and dim.dim_value == 0 and place not in sizes):
                continue
            label = dim.dim_param or place
            key = place if place in sizes else label
            if key not in sizes:
                if axis > 0:
                    known = [one.dim_param or (one.dim_value if one.HasField("dim_value") else "?") for one in shape]
                    raise InvalidValue(
                        f"input {shortened(value.name)!r}",
                        f"of shape ({shortened(', '.join(map(str, known)))})",
                        "sizes that are known",
                        where=str(path),
                        hint=f"Say the size of its dimension {axis}: dims={{{label!r}: 128}}, or --dims {label}=128.",
                    )
                sizes[key] = 1
            used.add(key)
            dim.dim_value = sizes[key]
            sizes.setdefault(label, sizes[key])
    unused = next((name for name in dims if name not in used), None)
    refuse_if(unused is not None, f"dims[{unused!r}]", "of no input", "names of dynamic dimensions", where=str(path))
    others = (dim for each in (*graph.value_info, *graph.output) for dim in each.type.tensor_type.shape.dim)
    for dim in (each for each in others if each.dim_param in sizes):
        dim.dim_value = sizes[dim.dim_param]


class _Inference:
    """Infers shape and dtype of every value.

    onnx infers the outputs of one node after the other. A node that computes a shape (`Shape`, `Gather`, `Concat`, ...)
    is worked out at once, so that shapes that depend on it are known, too.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self.model, self.path = model, path
        self.opset_imports = list(model.opset_import)
        self.opsets = {entry.domain: entry.version for entry in self.opset_imports}
        self.types: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}  # small TensorProtos, by value
        self.reasons: dict[str, str] = {}

    def run(self) -> tuple[dict[str, Value], dict[str, str]]:
        """Every value of a known shape and dtype; and why the others have none, as far as onnx says."""
        from onnx import TensorProto, helper

        graph = self.model.graph
        given = {info.name: info.type for info in (*graph.value_info, *graph.output) if _is_complete(info.type)}
        self.types = {info.name: info.type for info in graph.input if _is_complete(info.type)}
        for tensor in graph.initializer:
            self.types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            if tensor.data_location != TensorProto.EXTERNAL and _num_elements(tensor.dims) <= _LARGEST_FOLDED:
                self.constants[tensor.name] = tensor
        self.types |= {
            sparse.values.name: helper.make_tensor_type_proto(sparse.values.data_type, list(sparse.dims))
            for sparse in graph.sparse_initializer
        }
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
            return onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain),
                node,
                {name: self.types[name] for name in node.input if name},
                {name: self.constants[name] for name in node.input if name in self.constants},
                opset_imports=self.opset_imports,
                ir_version=self.model.ir_version,
            )
        except Exception as error:  # onnx raises classes of its own and of pybind11, of no common root
            reason = (
                f"the shape of its input {described(error.args[0])!r} is unknown"
                if isinstance(error, KeyError)  # of an input's type
                else shortened(str(error)) or type(error).__name__
            )
            self.reasons |= {name: self.reasons.get(next(iter(node.input), ""), reason) for name in node.output}
            return {}

    def _fold(self, node: Any, inferred: Mapping[str, Any]) -> None:
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator

        if node.op_type in ("Shape", "Size") and len(node.output) == 1 and len(node.input) == 1:
            if (result := self._shape(node)) is not None:
                self.constants[node.output[0]] = numpy_helper.from_array(result, node.output[0])
            return
        names = [name for name in node.input if name]
        # the elements of each must be known, and be those of the value of that name, not of an earlier one
        shape_of = {name: tuple(self.constants[name].dims) for name in names if name in self.constants}
        is_known = all(
            name in self.types and name in shape_of and _shape_of(self.types[name]) == shape_of[name] for name in names
        )
        if node.op_type not in _FOLDED or node.domain or not is_known:
            return
        shapes = [_shape_of(inferred[name]) if name in inferred else None for name in node.output]
        # What a file declares of an output is not believed: the node would run, whatever it gives. A size of 0 hides no
        # large one, which a step in between may have; and onnx says 0 where the number of a Range's elements overflows.
        if any(shape is None or _num_elements(shape, 1) > _LARGEST_FOLDED for shape in shapes) or (
            node.op_type == "Range" and (0,) in shapes
        ):
            return
        try:
            with np.errstate(all="ignore"):
                arrays = {name: numpy_helper.to_array(self.constants[name]) for name in names}
                made = ReferenceEvaluator(node, opsets=self.opsets or {"": 18}).run(None, arrays)
                for name, array in zip(node.output, made, strict=True):
                    self.constants[name] = numpy_helper.from_array(np.asarray(array), name)
        except Exception as error:  # a malformed node: what it shapes stays unknown, and is reported where it is needed
            self.reasons |= {name: shortened(str(error)) for name in node.output}

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
        refuse_if(
            len(shape) > MOST_DIMENSIONS,
            f"shape of {shortened(name)!r}",
            f"of {len(shape)} dimensions",
            f"at most {MOST_DIMENSIONS}",
            where=str(self.path),
        )
        num_bytes = (_num_elements(shape) * half_bytes + 1) // 2
        refuse_if(
            any(not 0 <= size <= LARGEST_COUNT for size in shape) or num_bytes > LARGEST_COUNT,
            f"shape of {shortened(name)!r}",
            described(str(shape)),
            f"sizes of at most {LARGEST_COUNT} bytes",
            where=str(self.path),
        )
        return Value(shape, dtype, num_bytes)


def _is_complete(kind: Any) -> bool:
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape") and _shape_of(kind) is not None


def _shape_of(kind: Any) -> tuple[int, ...] | None:
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _num_elements(shape: Any, least: int = 0) -> int:
    return math.prod(max(size, least) for size in shape)


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

_PRODUCTS = frozenset({
    "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "Gemm", "GemmFastGelu", "GemmFloat8",
    "MatMul", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QGemm",
    "QLinearMatMul", "QOrderedMatMul", "SparseToDenseMatMul", "TransposeMatMul",
})  # fmt: skip
_CONVOLUTIONS = {  # the place of the weight among inputs
    **dict.fromkeys(("CausalConvWithState", "Conv", "ConvInteger", "ConvTranspose", "ConvTransposeWithDynamicPads"), 1),
    **dict.fromkeys(("DeformConv", "FusedConv", "NhwcConv", "NhwcFusedConv"), 1),
    "QLinearConv": 3,
}
_ATTENTION = {
    "Attention": 4, "DecoderMaskedMultiHeadAttention": 5, "DecoderMaskedSelfAttention": 4, "GroupQueryAttention": 3,
    "MultiHeadAttention": 6, "QAttention": 8,
}  # fmt: skip
"""Which input holds the keys of earlier tokens."""
_EACH_ELEMENT = frozenset({  # about one operation for each element, or none
    "Abs", "Acos", "Acosh", "Add", "AffineGrid", "And", "ArgMax", "ArgMin", "ArrayFeatureExtractor", "Asin", "Asinh",
    "Atan", "Atanh", "AveragePool", "BatchNormalization", "Bernoulli", "BiasAdd", "BiasDropout", "BiasGelu",
    "BiasSoftmax", "BiasSplitGelu", "Binarizer", "BitCast", "BitShift", "BitmaskBiasDropout", "BitmaskDropout",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "BlackmanWindow", "Cast", "CastLike", "Ceil", "Celu",
    "CenterCropPad", "Clip", "Col2Im", "Compress", "Concat", "Constant", "ConstantOfShape", "Cos", "Cosh", "CumProd",
    "CumSum", "DepthToSpace", "DequantizeBFP", "DequantizeLinear", "Div", "Dropout", "DynamicQuantizeLinear", "Elu",
    "EmbedLayerNormalization", "Equal", "Erf", "Exp", "Expand", "ExpandDims", "EyeLike", "FastGelu",
    "FeatureVectorizer", "Flatten", "Floor", "Gather", "GatherBlockQuantized", "GatherElements", "GatherND", "Gelu",
    "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "GroupNorm",
    "GroupNormalization", "HammingWindow", "HannWindow", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "Imputer",
    "InstanceNormalization", "IsAllFinite", "IsInf", "IsNaN", "LRN", "LabelEncoder", "LayerNormalization", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "LpPool", "Max", "MaxPool", "MaxUnpool", "Mean",
    "MeanVarianceNormalization", "Min", "Mish", "Mod", "Mul", "Multinomial", "Neg", "NegativeLogLikelihoodLoss",
    "NhwcMaxPool", "NonZero", "Normalizer", "Not", "OneHot", "OneHotEncoder", "Optional", "Or", "PRelu", "Pad", "Pow",
    "QEmbedLayerNormalization", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool",
    "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
    "QOrderedGelu", "QOrderedLayerNormalization", "QuantizeBFP", "QuantizeLinear", "QuickGelu", "RMSNormalization",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Reciprocal", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumInteger", "ReduceSumSquare", "Relu", "Reshape", "Resize", "ReverseSequence", "RotaryEmbedding", "Round",
    "Scaler", "Scatter", "ScatterElements", "ScatterND", "Selu", "Shape", "Shrink", "Sigmoid", "Sign",
    "SimplifiedLayerNormalization", "Sin", "Sinh", "Size", "SkipGroupNorm", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Slice", "Softmax", "SoftmaxCrossEntropyLoss", "Softplus", "Softsign",
    "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "SwiGLU", "Swish", "Tan", "Tanh", "TensorScatter",
    "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Upsample", "Where", "Xor",
})  # fmt: skip
_TARGETS = {
    **dict.fromkeys(_PRODUCTS, "aten.matmul"), **dict.fromkeys(_CONVOLUTIONS, "aten.convolution"),
    **dict.fromkeys(_ATTENTION, "aten.scaled_dot_product_attention"),
    "DynamicQuantizeLSTM": "aten.lstm", "GRU": "aten.gru", "LSTM": "aten.lstm", "RNN": "aten.rnn_tanh",
    "ArgMax": "aten.argmax", "ArgMin": "aten.argmin", "AveragePool": "aten.avg_pool2d",
    "BatchNormalization": "aten.native_batch_norm", "BitShift": "aten.bitwise_left_shift", "CumSum": "aten.cumsum",
    "Einsum": "aten.einsum", "FusedGemm": "aten.addmm", "Gather": "aten.embedding", "GatherElements": "aten.gather",
    "GatherND": "aten.gather", "Gemm": "aten.addmm", "GlobalAveragePool": "aten.adaptive_avg_pool2d",
    "GlobalMaxPool": "aten.adaptive_max_pool2d", "GroupNormalization": "aten.native_group_norm",
    "InstanceNormalization": "aten.instance_norm", "LayerNormalization": "aten.native_layer_norm",
    "LogSoftmax": "aten._log_softmax", "LpNormalization": "aten.linalg_vector_norm", "Max": "aten.maximum",
    "MaxPool": "aten.max_pool2d", "Mean": "aten.add", "MeanVarianceNormalization": "aten.native_layer_norm",
    "Min": "aten.minimum", "NonZero": "aten.nonzero", "RMSNormalization": "aten._fused_rms_norm",
    "ReduceMax": "aten.amax", "ReduceMean": "aten.mean", "ReduceMin": "aten.amin", "ReduceProd": "aten.prod",
    "ScatterElements": "aten.scatter", "ScatterND": "aten.index_put",
    "SimplifiedLayerNormalization": "aten._fused_rms_norm", "SkipLayerNormalization": "aten.native_layer_norm",
    "Softmax": "aten._softmax", "Sum": "aten.add", "TopK": "aten.topk",
}  # fmt: skip


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
    op_type: str, inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Any]
) -> float | None:
    """Floating-point operations of one node; a multiply-add counts as two. None where the operator is not known.

    Products, convolutions, attention (masked scores too), recurrent layers and Einsum by their definitions in the
    documentation of ONNX, or of ONNX Runtime; others that are known one operation an element of the larger side.

    Args:
        op_type: of the ONNX operator.
        inputs: shapes of its inputs, `()` for one that is left out.
        outputs: shapes of its outputs.
        attributes: of the node.
    """
    try:
        if op_type in _EACH_ELEMENT:
            return _num_of_each(inputs, outputs)
        if op_type in _PRODUCTS:
            turned = (0 if attributes.get("transBatchA") else -2) if len(inputs[0]) > 1 else -1
            return 2.0 * math.prod(outputs[0]) * inputs[0][turned if attributes.get("transA") else -1]
        if op_type in _CONVOLUTIONS:
            _, channels, *kernel = inputs[_CONVOLUTIONS[op_type]]
            moved = (inputs if op_type.startswith("ConvTranspose") else outputs)[0]
            return 2.0 * math.prod((*moved, channels, *kernel))
        if op_type in ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"):
            return 2.0 * inputs[0][0] * inputs[0][1] * (math.prod(inputs[1]) + math.prod(inputs[2]))
        if op_type in _ATTENTION:
            return _attention_flops(_ATTENTION[op_type], inputs, outputs, attributes)
        return _einsum_flops(str(attributes["equation"]), inputs) if op_type == "Einsum" else None
    except (LookupError, TypeError, ValueError, ZeroDivisionError):  # a malformed node
        return None


def _num_of_each(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return float(max(sum(map(math.prod, inputs)), sum(map(math.prod, outputs))))


def node_bytes(op_type: str, input_bytes: Sequence[int], output_bytes: Sequence[int]) -> float:
    """Bytes that one node reads and writes: each input and output once, but of a table only the rows that are read."""
    if op_type.startswith("Gather") and len(input_bytes) >= 2:
        return float(2 * sum(output_bytes) + input_bytes[1])
    return float(sum(input_bytes) + sum(output_bytes))


def _attention_flops(
    past: int, inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Any]
) -> float:
    """Scores and their use, of (B, S, hidden) or (B, heads, S, width); with the projection where it is fused in.

    Keys are as many as the cache that is returned holds, else those of earlier tokens and the new ones.
    """
    query, key = inputs[0], inputs[1] if len(inputs) > 1 else ()
    scored, used, projection = float(math.prod(query)), math.prod(outputs[0]), 0.0
    if len(key) == 2:  # the weight of Q, K and V; the hidden state is in the place of the query
        tokens, new = math.prod(query[:-1]), query[-2]
        width = attributes["qkv_hidden_sizes"][0] if "qkv_hidden_sizes" in attributes else key[1] // 3
        scored, used, projection = tokens * width, tokens * (key[1] - 2 * width), 2.0 * math.prod(query) * key[1]
    elif not key:  # Q, K and V are packed: (B, S, heads, 3, width), or the heads of all three in a row
        heads, of_keys = (attributes["num_heads"], attributes["kv_num_heads"]) if len(query) == 3 else (1, 1)
        scored, new = scored * heads / (heads + 2 * of_keys), query[1]
    else:
        new = key[2] if len(key) == 4 else key[1]
    new += inputs[past][-2] if len(inputs) > past and inputs[past] else 0
    keys = outputs[1][-2] if len(outputs) > 1 and len(outputs[1]) > 3 else new
    return projection + 2.0 * keys * (scored + used)


def _einsum_flops(equation: str, inputs: Sequence[Shape]) -> float:
    """Products of pairs, from the left; what one input alone has and the result lacks is summed before.

    One input is only moved or summed. Without `->`, the result has the labels that are there once.
    """
    terms, arrow, result = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    labels: list[str] = []
    for term, shape in zip(terms.split(","), inputs, strict=True):
        axes = range(999 + len(shape) - len(term.replace("...", "")), 999, -1)  # characters that are no letters
        labels.append(term.replace("...", "".join(map(chr, axes))))
        sizes |= {label: max(size, sizes.get(label, 1)) for label, size in zip(labels[-1], shape, strict=True)}
    named, is_dotted = Counter("".join(labels)), "..." in result or not arrow
    kept = {
        label
        for label in sizes
        if (label in result if arrow else named[label] == 1) or (is_dotted and ord(label) > 999)
    }
    flops, held = 0.0, set(labels[0])
    for place, term in enumerate(labels[1:], 2):
        later = kept.union(*labels[place:])
        held = {label for label in held.union(term) if label in later or (label in held and label in term)}
        flops += 2.0 * math.prod(sizes[label] for label in held)
        held &= later
    return flops if len(labels) > 1 else _num_of_each(inputs, ())
