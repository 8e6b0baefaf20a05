"""ONNX models as graphs: shapes inferred, costs in principle from them; weights are not needed and never read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.decode import described, shortened
from rlplace.errors import FileProblem, InvalidValue, MissingExtra, RlplaceError
from rlplace.graphs.formats.onnx_costs import CONTROL_FLOW, SHAPE_INPUTS, VIEWS, node_bytes, node_flops, target_of
from rlplace.graphs.formats.onnx_shapes import Value, fix_inputs, infer_values
from rlplace.graphs.opgraph import FORWARD, OpGraph

LARGEST_BYTES = 2**31 - 1
"""What a protobuf message can hold; models with more keep their weights in other files."""
MOST_NODES = 100_000
"""Of a model with functions, theirs counted as often as they are called: a kilobyte may stand for millions."""
MOST_FUNCTION_BYTES = 256 << 20
"""Of functions, each counted as often as it is called."""
_DEEPEST = 100
"""Functions that call one another in turn."""


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
    """Values that it makes, in their places; `""` for one that nobody asked for."""
    node: Any = None


def load_onnx(path: str | os.PathLike[str], *, dims: Mapping[str, int] | None = None) -> OpGraph:
    """The inference graph of an ONNX model.

    Nodes become ops under the ATen names that cost the same, reshapes are views, initializers are parameters, and what
    only computes shapes is left out. Modules come from node names (`/encoder/layer.0/MatMul`).

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
    values, reasons = infer_values(model, path)
    return _Builder(model, values, reasons, path).graph()


def _read(path: Path) -> Any:
    try:
        import onnx
        from onnx import inliner
    except ImportError as error:
        raise MissingExtra("onnx", "onnx") from error
    try:
        if not path.is_file():
            raise FileProblem(path, "no such file.")
        if path.stat().st_size > LARGEST_BYTES:
            raise FileProblem(path, f"{path.stat().st_size} bytes, expected at most {LARGEST_BYTES}.")
        model = onnx.load_model_from_string(path.read_bytes())
        _check_functions(model, path)
        if model.functions:
            model = inliner.inline_local_functions(model)
        is_text = all(isinstance(text, str) for text in _texts(model.graph))
    except RlplaceError:
        raise
    except OSError as error:
        raise FileProblem(path, f"cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # protobuf and onnx raise classes of their own, of no common root
        raise FileProblem(path, f"not a valid ONNX model: {shortened(str(error))}") from error
    if not is_text:  # protobuf gives bytes then
        raise FileProblem(path, "not a valid ONNX model: a name is no UTF-8 text.")
    if not model.graph.node:
        raise InvalidValue("graph.node", "empty", "at least one node", where=str(path))
    return model


def _check_functions(model: Any, path: Path) -> None:
    """Refuses a model that is small only as long as its functions are not put where they are called.

    Raises:
        FileProblem: too many nodes or bytes, or functions that call one another too deeply, or themselves.
    """

    def key_of(holder: Any, name: str) -> tuple[str, str, str]:
        domain = "" if holder.domain == "ai.onnx" else holder.domain  # two names of one
        return domain, name, getattr(holder, "overload", "")

    functions = {key_of(each, each.name): each for each in model.functions}
    known: dict[object, tuple[int, int]] = {}  # nodes and bytes, all that they call included

    def total(nodes: Iterable[Any], depth: int) -> tuple[int, int]:
        if depth > _DEEPEST:
            raise FileProblem(path, f"functions or graphs in one another, more than {_DEEPEST} deep, or in a circle.")
        count = size = 0
        for node in nodes:
            count, size = count + 1, size + node.ByteSize()
            graphs = [graph for each in node.attribute for graph in ([each.g] if each.HasField("g") else each.graphs)]
            inner = [total(graph.node, depth + 1) for graph in graphs]
            key = key_of(node, node.op_type)
            if key in functions:
                if key not in known:
                    known[key] = total(functions[key].node, depth + 1)
                inner.append(known[key])
            count, size = count + sum(each[0] for each in inner), size + sum(each[1] for each in inner)
            if functions and count > MOST_NODES:
                raise FileProblem(
                    path, f"too many nodes once its functions are called, expected at most {MOST_NODES:,}."
                )
            if functions and size - own_bytes > MOST_FUNCTION_BYTES:
                raise FileProblem(
                    path, f"too large once its functions are called, expected {MOST_FUNCTION_BYTES} bytes."
                )
        return count, size

    own_bytes = model.ByteSize()
    total(model.graph.node, 0)


class _Builder:
    """Walks the nodes of one model."""

    def __init__(self, model: Any, values: Mapping[str, Value], reasons: Mapping[str, str], path: Path) -> None:
        self.onnx_graph = model.graph
        self.values = values
        self.reasons = reasons
        self.path = path
        self.base: dict[str, str] = {}  # the value whose memory a value shows; itself if it is no view
        self.items: list[_Item] = []

    def graph(self) -> OpGraph:
        graph = self.onnx_graph
        tensors = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
        weights = {tensor.name for tensor in tensors}
        for value in graph.input:
            if value.name not in weights:
                self._add_source(value.name, "input")
        for tensor in tensors:
            is_index = self.values[tensor.name].dtype in ("int64", "int32", "bool") and len(tensor.dims) <= 1
            self._add_source(tensor.name, "constant" if is_index else "parameter")
        for place, node in enumerate(graph.node):
            self._add_node(node, place)
        results = []
        for value in graph.output:
            if value.name not in self.base:
                raise InvalidValue(
                    "graph.output", described(value.name), "a value that a node makes", where=str(self.path)
                )
            results.append(self.base[value.name])
        return self._assemble(*self._live(results), results)

    def _add_source(self, name: str, kind: str) -> None:
        if name in self.base:
            raise InvalidValue("name", described(name), f"a name of its own for each {kind}", where=str(self.path))
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
        for name in node.input:
            if name and name not in self.base:
                expected = "a value that an input, an initializer or an earlier node makes"
                raise InvalidValue("input", described(name), expected, where=where)
        for name in node.output:
            if name and name in self.base:
                raise InvalidValue("output", described(name), "a name that no other value has", where=where)
        self.base |= {name: name for name in node.output if name}
        if node.op_type in VIEWS and node.input and node.input[0] and node.output:
            self.base[node.output[0]] = self.base[node.input[0]]
        arguments = tuple(node.input[: SHAPE_INPUTS.get(node.op_type, len(node.input))])
        is_constant = node.op_type in ("Constant", "Shape", "Size")
        self.items.append(
            _Item(
                name=node.name or f"{node.op_type}_{place}",
                target="constant" if is_constant else target_of(node.op_type, node.domain),
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
        needed = set(results)
        live = []
        for item in reversed(self.items):
            if item.target == "input" or any(name in needed for name in item.outputs):
                live.append(item)
                needed.update(item.reads)
        return live[::-1], needed

    def _assemble(self, items: list[_Item], needed: set[str], results: list[str]) -> OpGraph:
        tensors = [
            (op, place, name)
            for op, item in enumerate(items)
            for place, name in enumerate(item.outputs)
            if name in needed or item.target == "input"
        ]
        ids = {name: number for number, (_, _, name) in enumerate(tensors)}
        sizes = [self._known(name, items[op]) for op, _, name in tensors]
        reads = [sorted(ids[name] for name in item.reads) for item in items]
        facts = [self._facts(item, needed) for item in items]
        zeros = np.zeros(len(items), dtype=np.int64)
        parameters = [self.values[i.outputs[0]].num_bytes if i.target == "parameter" else 0 for i in items]
        try:
            return OpGraph(
                names=_unique([item.name for item in items]),
                targets=tuple(item.target for item in items),
                modules=_modules(items),
                signatures=tuple(signature for signature, _, _ in facts),
                phases=np.full(len(items), FORWARD),
                flops=np.array([flops for _, flops, _ in facts]),
                bytes_moved=np.array([moved for _, _, moved in facts]),
                parameter_bytes=np.array(parameters, dtype=np.int64),
                gradient_bytes=zeros,
                state_bytes=zeros,
                workspace_bytes=zeros,
                colocation=np.full(len(items), -1),
                tensor_op=np.array([op for op, _, _ in tensors], dtype=np.int32),
                tensor_output=np.array([place for _, place, _ in tensors], dtype=np.int32),
                tensor_bytes=np.array([value.num_bytes for value in sizes], dtype=np.int64),
                tensor_shapes=tuple(value.shape for value in sizes),
                tensor_dtypes=tuple(value.dtype for value in sizes),
                input_offsets=np.cumsum([0, *map(len, reads)]),
                input_tensors=np.array([tensor for read in reads for tensor in read], dtype=np.int32),
                mutation_op=np.empty(0, dtype=np.int32),
                mutation_tensor=np.empty(0, dtype=np.int32),
                output_tensors=np.array(sorted({ids[name] for name in results}), dtype=np.int32),
            )
        except InvalidValue as error:
            raise InvalidValue(error.field, error.actual, error.expected, where=str(self.path)) from error

    def _facts(self, item: _Item, needed: set[str]) -> tuple[str, float, float]:
        """Signature, FLOPs and bytes moved."""
        if item.node is None or item.target == "constant":
            return item.target, 0.0, 0.0
        op_type, attributes = item.node.op_type, dict(_attributes(item.node))
        given = [self._known(name, item) if name else Value((), "", 0) for name in item.arguments]
        made = [self._known(name, item) for name in item.outputs if name in needed]
        parts = [f"{value.dtype}{value.shape}" for value in given if value.dtype]
        parts += [f"{name}={value}" for name, value in sorted(attributes.items())]
        return (
            f"{item.target}({', '.join(parts)})",
            node_flops(op_type, [value.shape for value in given], [value.shape for value in made], attributes),
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


def _texts(graph: Any) -> Iterator[object]:
    """Every name that is made use of."""
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
        yield from (text for entry in node.metadata_props for text in (entry.key, entry.value))
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield tensor.name
    for info in (*graph.input, *graph.value_info, *graph.output):
        yield from (info.name, *(dim.dim_param for dim in info.type.tensor_type.shape.dim))


def _attributes(node: Any) -> Iterator[tuple[str, object]]:
    """Plain attributes; a tensor among them is data, not a kind of op."""
    for attribute in node.attribute:
        if attribute.type == attribute.INT:
            yield attribute.name, attribute.i
        elif attribute.type == attribute.INTS:
            yield attribute.name, tuple(attribute.ints)[:16]
        elif attribute.type == attribute.FLOAT:
            yield attribute.name, attribute.f
        elif attribute.type == attribute.STRING:
            yield attribute.name, shortened(attribute.s.decode("utf-8", "replace"))


def _module(node: Any) -> str:
    """`encoder.layer.0` of a node that TorchScript's exporter named `/encoder/layer.0/MatMul`.

    The newer exporter keeps the modules on the way to a node in its metadata, from the root to the node itself.
    """
    scopes = next((entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"), "")
    found = re.findall(r"'([^']*)'", scopes)
    if len(found) > 1:
        return str(found[-2])
    return str(node.name).strip("/").rpartition("/")[0].replace("/", ".")


def _modules(items: list[_Item]) -> tuple[str, ...]:
    """Modules; that of a parameter whose name tells none is its first reader's."""
    first: dict[str, str] = {}
    for item in items:
        for name in item.reads:
            first.setdefault(name, item.module)
    return tuple(
        item.module or (first.get(item.outputs[0], "") if item.target in ("parameter", "constant") else "")
        for item in items
    )


def _unique(names: list[str]) -> tuple[str, ...]:
    return tuple(names) if len(set(names)) == len(names) else tuple(f"{name}#{i}" for i, name in enumerate(names))
