"""Limits of an ONNX model: its size before it is parsed, with its functions called, and of single lists.

An empty protobuf message of two bytes takes a hundred times as much in memory once it is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlplace.errors import FileProblem, InvalidValue
from rlplace.graphs.opgraph import MOST_DIMENSIONS

MOST_MESSAGES = 1_000_000
"""Messages within one, at any depth: nodes, attributes, tensors, types, sizes."""
MOST_FIELDS = 50_000_000
"""Values of all kinds; each takes about half a microsecond to be skipped."""
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
"""Wire types that are in use (protobuf.dev, "Encoding")."""
MOST_NODES = 100_000
"""Those of functions are counted as often as they are called: a kilobyte may stand for millions."""
MOST_FUNCTION_BYTES = 256 << 20
"""Of functions, each counted as often as it is called."""
_MOST_VALUES = 10_000
"""Inputs of a node, and likewise outputs."""
_MOST_OPSETS = 100
_DEEPEST = 100
"""Functions that call one another in turn."""


def check_message(data: bytes, kind: Any) -> int:
    """How many messages an encoded one holds.

    Args:
        data: as on the wire.
        kind: the `google.protobuf.descriptor.Descriptor` of the message.

    Raises:
        ValueError: too many messages or values, or no such message.
    """
    inner_of: dict[Any, dict[int, Any]] = {}  # message fields by number, by descriptor
    num_messages = num_fields = at = 0
    open_messages = [(len(data), kind)]  # end and descriptor; the last is read
    try:
        while open_messages:
            end, kind = open_messages[-1]
            if kind not in inner_of:
                inner_of[kind] = {f.number: f.message_type for f in kind.fields if f.message_type}
            inner = inner_of[kind]
            while at < end:
                key, at = _varint(data, at)
                num_fields += 1
                wire_type = key & 7
                if wire_type == _VARINT:
                    _, at = _varint(data, at)
                elif wire_type == _BYTES:
                    size, at = _varint(data, at)
                    if key >> 3 in inner:
                        num_messages += 1
                        if at + size > end:
                            raise ValueError("cut off")
                        open_messages.append((at + size, inner[key >> 3]))
                        break
                    at += size
                elif wire_type in (_FIXED_32, _FIXED_64):
                    at += 4 if wire_type == _FIXED_32 else 8
                else:
                    raise ValueError(f"wire type {wire_type}")
                if num_fields > MOST_FIELDS:
                    raise ValueError(f"too many values, expected at most {MOST_FIELDS:,}")
            else:
                if at > end:
                    raise ValueError("cut off")
                open_messages.pop()
            if num_messages > MOST_MESSAGES:
                raise ValueError(f"too many messages, expected at most {MOST_MESSAGES:,}")
    except IndexError:
        raise ValueError("cut off") from None
    return num_messages


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, and the place behind it."""
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        at += 1
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
    raise ValueError("a number of more than ten bytes")


def check_functions(model: Any, path: Path) -> None:
    """Refuses a model of too many nodes, or small only as long as its functions are not put where they are called.

    Raises:
        FileProblem: too many nodes, bytes or messages, or functions that call one another too deeply, or themselves.
    """

    def key_of(holder: Any, name: str) -> tuple[str, str, str]:
        domain = "" if holder.domain == "ai.onnx" else holder.domain  # two names of one
        return domain, name, getattr(holder, "overload", "")

    functions = {key_of(each, each.name): each for each in model.functions}
    known: dict[object, tuple[int, int, int]] = {}  # nodes, bytes and messages, all that they call included

    def total(nodes: Iterable[Any], depth: int) -> tuple[int, int, int]:
        if depth > _DEEPEST:
            raise FileProblem(path, f"functions or graphs in one another, more than {_DEEPEST} deep, or in a circle.")
        count = size = num_messages = 0
        for node in nodes:
            own = check_message(node.SerializeToString(), node.DESCRIPTOR) if functions else 0
            parts = [(count, size, num_messages), (1, node.ByteSize(), own)]
            graphs = [graph for each in node.attribute for graph in ([each.g] if each.HasField("g") else each.graphs)]
            parts += [total(graph.node, depth + 1) for graph in graphs]
            key = key_of(node, node.op_type)
            if key in functions:
                if key not in known:
                    known[key] = total(functions[key].node, depth + 1)
                parts.append(known[key])
            count, size, num_messages = map(sum, zip(*parts, strict=True))
            if count > MOST_NODES:
                called = " once its functions are called" if functions else ""
                raise FileProblem(path, f"too many nodes{called}, expected at most {MOST_NODES:,}.")
            if functions and (size - own_bytes > MOST_FUNCTION_BYTES or num_messages > MOST_MESSAGES):
                raise FileProblem(
                    path, f"too large once its functions are called, expected {MOST_FUNCTION_BYTES} bytes."
                )
        return count, size, num_messages

    own_bytes = model.ByteSize()
    total(model.graph.node, 0)


def check_lengths(model: Any, path: Path) -> None:
    """Refuses lists that shape inference and signatures go through again for each node or input.

    Raises:
        InvalidValue: too many of something.
    """
    graph = model.graph
    tensors = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    infos = (*graph.input, *graph.value_info, *graph.output)
    ranks = [len(tensor.dims) for tensor in (*tensors, *graph.sparse_initializer)]
    ranks += [len(info.type.tensor_type.shape.dim) for info in infos]
    for field, actual, most in (
        ("opset_import", len(model.opset_import), _MOST_OPSETS),
        ("inputs of a node", max((len(node.input) for node in graph.node), default=0), _MOST_VALUES),
        ("outputs of a node", max((len(node.output) for node in graph.node), default=0), _MOST_VALUES),
        ("dimensions of a value", max(ranks, default=0), MOST_DIMENSIONS),
    ):
        if actual > most:
            raise InvalidValue(field, actual, f"at most {most:,}", where=str(path))


def check_names(graph: Any, path: Path) -> None:
    """Refuses names that are no text; protobuf gives bytes then.

    Raises:
        FileProblem: there is one.
    """
    if not all(isinstance(text, str) for text in _texts(graph)):
        raise FileProblem(path, "not a valid ONNX model: a name is no UTF-8 text.")


def _texts(graph: Any) -> Iterator[object]:
    """Every name that is made use of."""
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
        yield from (text for entry in node.metadata_props for text in (entry.key, entry.value))
    yield from (each.name for each in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)))
    for info in (*graph.input, *graph.value_info, *graph.output):
        yield from (info.name, *(dim.dim_param for dim in info.type.tensor_type.shape.dim))
