"""`OpGraph`: an immutable DAG of ops and tensors, as arrays; `GraphBuilder`: the same grown op by op.

`check_columns`: the types, lengths, ranges and order that the columns of an `OpGraph` must have. `gradient_sums`: the
tree in which the gradients of K micro-batches are added up.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, refuse_if
from rlplace.say import counted

if TYPE_CHECKING:
    import networkx as nx

    from rlplace.graphs.program import Program

PHASES = ("forward", "backward", "update")
FORWARD, BACKWARD, UPDATE = range(3)
RESIDENT_TARGETS = ("parameter", "buffer", "state")
SOURCE_TARGETS = (*RESIDENT_TARGETS, "input", "constant")

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A computation as N ops, T tensors and E edges (an edge joins a tensor to an op that reads it).

    Op indices are a topological order, tensors are sorted by producer, and an op reads a tensor at most once.
    Views and `getitem` are folded into their base. Arrays are read-only.

    Attributes:
        names: (N,) unique op names.
        targets: (N,) ATen target (`aten.convolution.default`), or `parameter`, `buffer`, `input`, `constant`,
            or `update.sgd`, `update.adam`, ... for an optimizer update.
        modules: (N,) dotted path of the module that the op came from, `""` at the root.
        signatures: (N,) target, shapes, dtypes and plain arguments: ops of one signature cost the same.
        phases: (N,) int8, index into `PHASES`.
        flops: (N,) float64, floating-point operations.
        bytes_moved: (N,) float64, bytes read and written.
        parameter_bytes: (N,) int64, bytes of a parameter; 0 for other ops.
        gradient_bytes: (N,) int64, bytes of the gradient of a parameter; 0 for other ops.
        state_bytes: (N,) int64, bytes of optimizer state of an update; 0 for other ops.
        workspace_bytes: (N,) int64, scratch bytes held while the op runs.
        colocation: (N,) int32, ops with the same value >= 0 share a device; -1 is free.
        tensor_op: (T,) int32, producer of each tensor, ascending.
        tensor_output: (T,) int32, output index of each tensor at its producer.
        tensor_bytes: (T,) int64.
        tensor_shapes: (T,) shape tuples.
        tensor_dtypes: (T,) dtype names, e.g. `float32`.
        input_offsets: (N + 1,) int32, CSR offsets into `input_tensors`.
        input_tensors: (E,) int32, tensors read by each op, ascending within an op.
        mutation_op: (M,) int32, ops that update a tensor in place ...
        mutation_tensor: (M,) int32, ... and the (resident) tensors that they update. Such an op starts after all other
            readers and all transfers of the tensor have ended.
        output_tensors: (O,) int32, tensors that the step returns: they stay allocated.
        micro_batch: (N,) int32, the slice of the batch of each op; -1 for ops that all slices share (parameters, sums
            of gradients, updates), and for all ops if the batch is not cut. An empty array means -1 for all ops.
        shard: (N,) int32, the shard of each op of a step that is split (`SplitPlan`); -1 for ops that are whole,
            and for all ops if nothing is split. An empty array means -1 for all ops.
        program: the executable graph, if the step was captured in this process; never saved.
        name: a display name, e.g. `nmt@small`; neither saved nor in the fingerprint.
        notes: what the file of the graph left open, such as ops of unknown cost, in sentences; not in the fingerprint.
    """

    names: tuple[str, ...]
    targets: tuple[str, ...]
    modules: tuple[str, ...]
    signatures: tuple[str, ...]
    phases: NDArray[np.int8]
    flops: FloatArray
    bytes_moved: FloatArray
    parameter_bytes: LongArray
    gradient_bytes: LongArray
    state_bytes: LongArray
    workspace_bytes: LongArray
    colocation: IntArray
    tensor_op: IntArray
    tensor_output: IntArray
    tensor_bytes: LongArray
    tensor_shapes: tuple[tuple[int, ...], ...]
    tensor_dtypes: tuple[str, ...]
    input_offsets: IntArray
    input_tensors: IntArray
    mutation_op: IntArray
    mutation_tensor: IntArray
    output_tensors: IntArray
    micro_batch: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    shard: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    program: Program | None = field(default=None, repr=False)
    name: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("micro_batch", "shard"):
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, np.full(self.num_ops, -1, dtype=np.int32))
        for name, dtype in DTYPES.items():
            object.__setattr__(self, name, read_only(getattr(self, name), dtype))
        check_columns(vars(self), num_phases=len(PHASES))

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle it: without its program, which runs in this process alone."""
        return partial(
            OpGraph, **{each.name: getattr(self, each.name) for each in fields(self)} | {"program": None}
        ), ()

    def __copy__(self) -> OpGraph:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OpGraph:
        return self

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        slices = f"{self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        shards = f"{self.num_shards} shards" if self.num_shards > 1 else ""
        facts = (counted(self.num_ops, "op"), counted(self.num_edges, "edge"), slices, shards, self.label)
        return f"OpGraph({', '.join(filter(None, facts))})"

    @property
    def label(self) -> str:
        """Its name, or else the class name of the captured model; empty if neither is known."""
        return self.name or ("" if self.program is None else type(self.program.origin.model).__name__)

    @property
    def num_ops(self) -> int:
        return len(self.names)

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_op)

    @property
    def num_edges(self) -> int:
        return len(self.input_tensors)

    @cached_property
    def num_micro_batches(self) -> int:
        """K, the number of slices of the batch; 1 if it is not cut."""
        return max(int(self.micro_batch.max(initial=0)) + 1, 1)

    @cached_property
    def num_shards(self) -> int:
        """P, the number of shards of an op that is split; 1 if none is."""
        return max(int(self.shard.max(initial=0)) + 1, 1)

    @property
    def is_in_parts(self) -> bool:
        """Whether the step is cut into micro-batches, or ops of it are split into shards."""
        return self.num_micro_batches > 1 or self.num_shards > 1

    @cached_property
    def output_offsets(self) -> IntArray:
        """(N + 1,) int32: op i produces tensors `output_offsets[i]` up to `output_offsets[i + 1]`."""
        return np.concatenate(([0], np.cumsum(np.bincount(self.tensor_op, minlength=self.num_ops)))).astype(np.int32)

    @cached_property
    def edge_op(self) -> IntArray:
        """(E,) int32: the reading op of each edge, aligned with `input_tensors`."""
        return edge_readers(self.input_offsets)

    @cached_property
    def readers(self) -> tuple[IntArray, IntArray]:
        """CSR (T + 1,), (E,): the ops that read each tensor, ascending."""
        order = np.argsort(self.input_tensors, kind="stable")
        counts = np.bincount(self.input_tensors, minlength=self.num_tensors)
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32), self.edge_op[order]

    def readers_of(self, op: int) -> IntArray:
        """The ops that read an output of `op`, tensor by tensor."""
        offsets, readers = self.readers
        return readers[offsets[self.output_offsets[op]] : offsets[self.output_offsets[op + 1]]]

    @cached_property
    def output_bytes(self) -> LongArray:
        """(N,) int64: bytes of all the outputs of each op."""
        return np.bincount(self.tensor_op, weights=self.tensor_bytes, minlength=self.num_ops).astype(np.int64)

    @cached_property
    def is_resident(self) -> NDArray[np.bool_]:
        """(N,) bool: parameters and buffers, which stay on their devices from step to step."""
        return np.array([target in RESIDENT_TARGETS for target in self.targets], dtype=np.bool_)

    @cached_property
    def is_source(self) -> NDArray[np.bool_]:
        """(N,) bool: parameters, buffers, inputs and constants, which exist when the step starts and take no time."""
        return np.array([target in SOURCE_TARGETS for target in self.targets], dtype=np.bool_)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits: a hash of targets, shapes, dtypes and edges, without measured values."""
        digest = hashlib.sha256()
        for part in (self.targets, self.tensor_shapes, self.tensor_dtypes):
            for piece in _tuple_text(part):
                digest.update(piece.encode())
        for array in (
            self.tensor_op,
            self.tensor_output,
            self.input_offsets,
            self.input_tensors,
            self.mutation_op,
            self.mutation_tensor,
            self.output_tensors,
        ):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def to_networkx(self) -> nx.DiGraph[Any]:
        """A `networkx.DiGraph` of op indices, with everything except the program.

        A node carries the attributes of its op and its `tensors`; an edge the `tensors` read over it and their summed
        `bytes`; the graph its `schema`, `fingerprint`, `mutations` and `outputs`.
        """
        from rlplace.graphs.formats.networkx_graph import to_networkx

        return to_networkx(self)

    @classmethod
    def from_networkx(cls, graph: nx.DiGraph[Any]) -> OpGraph:
        """The graph of a `networkx.DiGraph`, from `to_networkx` or elsewhere (defaults: `docs/graph-files.md`).

        Raises:
            InvalidValue: the graph is cyclic or undirected, or an attribute is wrong, or misspelt.
        """
        from rlplace.graphs.formats.networkx_graph import from_networkx

        return from_networkx(graph)


DTYPES: dict[str, type[np.generic]] = {
    "phases": np.int8,
    "flops": np.float64,
    "bytes_moved": np.float64,
    "parameter_bytes": np.int64,
    "gradient_bytes": np.int64,
    "state_bytes": np.int64,
    "workspace_bytes": np.int64,
    "colocation": np.int32,
    "tensor_op": np.int32,
    "tensor_output": np.int32,
    "tensor_bytes": np.int64,
    "input_offsets": np.int32,
    "input_tensors": np.int32,
    "mutation_op": np.int32,
    "mutation_tensor": np.int32,
    "output_tensors": np.int32,
    "micro_batch": np.int32,
    "shard": np.int32,
}
"""The dtype of each array."""
LARGEST_COUNT = 2**53
"""Bytes and sizes beyond this are no sizes: sums of them would not be exact in float64."""
LARGEST_TOTAL = 2.0**60
"""FLOPs or bytes of a whole graph beyond this would overflow sums of int64."""
LONGEST_TEXT = 4096
"""Characters of a name, a target, a module or a dtype."""
MOST_TEXT = 1 << 28
"""Characters of all texts of a graph, each counted for every op and tensor that has it: a file may say it only once."""
MOST_DIMENSIONS = 64
"""Of a tensor; PyTorch's own limit."""
_OF_OPS = (
    *("targets", "modules", "signatures", "phases", "flops", "bytes_moved", "parameter_bytes", "gradient_bytes"),
    *("state_bytes", "workspace_bytes", "colocation", "micro_batch", "shard"),
)
_TEXTS = ("names", "targets", "modules", "signatures", "tensor_dtypes")
_OF_TENSORS = ("tensor_output", "tensor_bytes", "tensor_shapes", "tensor_dtypes")
_AMOUNTS = (
    *("flops", "bytes_moved", "parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes"),
    "tensor_bytes",
)


def read_only(values: Any, dtype: Any) -> NDArray[Any]:
    """The values as a contiguous array that cannot be written to; one that is already so comes back itself."""
    array = np.ascontiguousarray(values, dtype=dtype)
    array.flags.writeable = False
    return array


def edge_readers(input_offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """(E,) int32: the reading op of each edge.

    Args:
        input_offsets: (N + 1,) where the edges of each op begin.
    """
    return np.repeat(np.arange(len(input_offsets) - 1, dtype=np.int32), np.diff(input_offsets))


def _tuple_text(items: tuple[object, ...]) -> Iterator[str]:
    """The `repr` of a tuple, piece by piece: all of it at once would take memory for every repetition of an item."""
    for start in range(0, len(items), 1024):
        yield ("(", ", ")[start > 0] + ", ".join(map(repr, items[start : start + 1024]))
    yield {0: "()", 1: ",)"}.get(len(items), ")")


def check_texts(texts: Iterable[str], where: str = "graph") -> None:
    """Refuses texts of more than `MOST_TEXT` characters in sum.

    Raises:
        InvalidValue: they are.
    """
    total = sum(map(len, texts))
    refuse_if(total > MOST_TEXT, "text", f"of {total} characters altogether", f"at most {MOST_TEXT:,}", where=where)


def check_columns(columns: Mapping[str, Any], *, num_phases: int) -> None:
    """Checks that columns make a graph.

    Args:
        columns: the fields of an `OpGraph` by name, arrays as `DTYPES` has them.
        num_phases: how many phases there are.

    Raises:
        InvalidValue: they do not; names the first column that is wrong.
    """
    n, t = len(columns["names"]), len(columns["tensor_op"])
    lengths = {
        **dict.fromkeys(_OF_OPS, n),
        **dict.fromkeys(_OF_TENSORS, t),
        "input_offsets": n + 1,
        "mutation_tensor": len(columns["mutation_op"]),
    }
    if wrong := next((name for name, length in lengths.items() if len(columns[name]) != length), ""):
        raise InvalidValue(wrong, len(columns[wrong]), f"{lengths[wrong]} entries", where="graph")
    if len(set(columns["names"])) != n:
        repeated = next(name for name, count in Counter(columns["names"]).items() if count > 1)
        raise InvalidValue("names", f"{repeated[:60]!r} more than once", "unique op names", where="graph")
    for name in ("names", "targets", "modules", "tensor_dtypes"):
        longest = max(columns[name], key=len, default="")
        if len(longest) > LONGEST_TEXT:
            raise InvalidValue(
                name, f"{longest[:60]}...", f"texts of at most {LONGEST_TEXT:,} characters", where="graph"
            )
    check_texts(chain.from_iterable(columns[name] for name in _TEXTS))
    rank = max(map(len, columns["tensor_shapes"]), default=0)
    refuse_if(
        rank > MOST_DIMENSIONS,
        "tensor_shapes",
        f"of {rank} dimensions",
        f"at most {MOST_DIMENSIONS} dimensions",
        where="graph",
    )
    ranges = {
        **dict.fromkeys(("colocation", "micro_batch", "shard"), (-1, n - 1)),
        **dict.fromkeys(("tensor_op", "mutation_op"), (0, n - 1)),
        **dict.fromkeys(("input_tensors", "mutation_tensor", "output_tensors"), (0, t - 1)),
        "phases": (0, num_phases - 1),
        "tensor_output": (0, np.iinfo(np.int32).max),
    }
    for name, (low, high) in ranges.items():
        array = columns[name]
        if len(array) and (array.min() < low or array.max() > high):
            raise InvalidValue(name, f"{array.min()}..{array.max()}", f"entries in {low}..{high}", where="graph")
    for name in _AMOUNTS:
        array = columns[name]
        refuse_if(
            not np.all(np.isfinite(array)) or np.any(array < 0),
            name,
            "a negative or non-finite entry",
            "finite numbers >= 0",
            where="graph",
        )
        refuse_if(
            float(np.sum(array, dtype=np.float64)) > LARGEST_TOTAL,
            name,
            "more altogether",
            f"at most {LARGEST_TOTAL:.1e} in sum",
            where="graph",
        )
    _check_order(columns)


def _check_order(columns: Mapping[str, Any]) -> None:
    """Tensors by producer, ops in a topological order, an op's inputs ascending."""
    tensor_op, offsets, read = columns["tensor_op"], columns["input_offsets"], columns["input_tensors"]
    refuse_if(np.any(np.diff(tensor_op) < 0), "tensor_op", "out of order", "tensors sorted by producer", where="graph")
    refuse_if(
        offsets[0] != 0 or np.any(np.diff(offsets) < 0) or offsets[-1] != len(read),
        "input_offsets",
        "not a CSR",
        "offsets from 0 up to the number of edges",
        where="graph",
    )
    readers = edge_readers(offsets)
    late = np.flatnonzero(tensor_op[read] >= readers)
    if len(late):
        raise InvalidValue(
            "input_tensors",
            f"op {int(readers[late[0]])} reads op {int(tensor_op[read[late[0]]])}",
            "op indices in topological order (the graph is cyclic, or out of order)",
            where="graph",
        )
    unsorted = (np.diff(read) <= 0) & (np.diff(readers) == 0)
    if np.any(unsorted):
        raise InvalidValue(
            "input_tensors",
            f"not ascending at op {int(readers[int(np.argmax(unsorted))])}",
            "each tensor once, ascending within an op",
            where="graph",
        )


@dataclass(slots=True)
class OpRow:
    """One op: a row of the columns of an `OpGraph`, which describes them; `reads` are tensors, ascending."""

    name: str
    target: str
    module: str = ""
    phase: int = FORWARD
    signature: str = ""
    reads: Sequence[int] = ()
    flops: float = 0.0
    bytes_moved: float = 0.0
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    micro_batch: int = -1
    colocation: int = -1
    shard: int = -1


@dataclass(slots=True)
class TensorRow:
    """One output of an op, likewise; `value` is the fake tensor that it was traced with."""

    op: int
    output: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    value: Any = None


class GraphBuilder:
    """The rows of a graph.

    Attributes:
        ops: in a topological order.
        tensors: by their producers.
        mutations: (op, tensor) for every update in place.
        together: ops that share a device, a tuple for each reason; ops with a reason in common are one class.
    """

    def __init__(self) -> None:
        self.ops: list[OpRow] = []
        self.tensors: list[TensorRow] = []
        self.mutations: list[tuple[int, int]] = []
        self.together: list[Sequence[int]] = []

    def add(self, row: OpRow) -> int:
        """Adds an op, whose index comes back; its `reads` may come in any order, and repeat."""
        row.reads = sorted(set(row.reads))
        self.ops.append(row)
        return len(self.ops) - 1

    def add_tensor(self, row: TensorRow) -> int:
        """Adds an output of the last op, whose index comes back."""
        self.tensors.append(row)
        return len(self.tensors) - 1

    def add_outputs(self, op: int, num_bytes: Iterable[int], *, item_bytes: int = 1, dtype: str = "uint8") -> list[int]:
        """Adds flat outputs of the last op, of so many bytes each; returns their indices."""
        first = len(self.tensors)
        self.tensors += [
            TensorRow(op, place, size, (size // item_bytes,), dtype) for place, size in enumerate(num_bytes)
        ]
        return list(range(first, len(self.tensors)))

    def bytes_of(self, tensors: Iterable[int]) -> int:
        """Bytes of several tensors together."""
        return sum(self.tensors[tensor].bytes for tensor in tensors)

    def graph(self, outputs: Iterable[int] = (), program: Program | None = None) -> OpGraph:
        """The graph of all that was added; the step returns tensors `outputs`.

        Raises:
            InvalidValue: the rows make no graph; see `OpGraph`.
        """

        def column(rows: Sequence[object], name: str, field: str = "") -> NDArray[Any]:
            return np.array([getattr(row, name) for row in rows], dtype=DTYPES[field or name])

        ops, tensors = self.ops, self.tensors
        return OpGraph(
            names=tuple(row.name for row in ops),
            targets=tuple(row.target for row in ops),
            modules=tuple(row.module for row in ops),
            signatures=tuple(row.signature for row in ops),
            phases=column(ops, "phase", "phases"),
            flops=column(ops, "flops"),
            bytes_moved=column(ops, "bytes_moved"),
            parameter_bytes=column(ops, "parameter_bytes"),
            gradient_bytes=column(ops, "gradient_bytes"),
            state_bytes=column(ops, "state_bytes"),
            workspace_bytes=column(ops, "workspace_bytes"),
            colocation=joined_classes(len(ops), self.together) if self.together else column(ops, "colocation"),
            tensor_op=column(tensors, "op", "tensor_op"),
            tensor_output=column(tensors, "output", "tensor_output"),
            tensor_bytes=column(tensors, "bytes", "tensor_bytes"),
            tensor_shapes=tuple(row.shape for row in tensors),
            tensor_dtypes=tuple(row.dtype for row in tensors),
            input_offsets=np.cumsum([0, *(len(row.reads) for row in ops)], dtype=np.int32),
            input_tensors=np.array([tensor for row in ops for tensor in row.reads], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self.mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self.mutations], dtype=np.int32),
            output_tensors=np.array([*outputs], dtype=np.int32),
            micro_batch=column(ops, "micro_batch"),
            shard=column(ops, "shard"),
            program=program,
        )


def joined_classes(num_ops: int, together: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    """(N,) int32: one number for all ops that `together` joins, by their first op; -1 for an op that it does not name.

    Union-find whose roots are the first ops of their classes.
    """
    parent = list(range(num_ops))

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = op = parent[parent[op]]
        return op

    classes = np.full(num_ops, -1, dtype=np.int32)
    for members in together:
        roots = sorted(map(find, members))
        for root in roots:
            parent[root] = roots[0]
        classes[list(members)] = 0
    named = np.flatnonzero(classes == 0)
    classes[named] = np.unique([find(op) for op in named.tolist()], return_inverse=True)[1]
    return classes


def unique_names(names: Sequence[str]) -> list[str]:
    """The names as they are where no two are the same, else with the number of each behind it."""
    return [*names] if len(set(names)) == len(names) else [f"{name}#{i}" for i, name in enumerate(names)]


LATER_HALF = -1
"""A `turn` with which every sum goes with its later half: the micro-batch that completes it."""


@dataclass(frozen=True)
class GradientSum:
    """One addition of two parts; a part below K is a micro-batch's own gradient, K + i is the i-th sum.

    Attributes:
        left: the part of the earlier micro-batches.
        right: the part of the later ones.
        micro_batch: which of them it goes with; -1 for the last sum, which lives with the parameter.
        last: the latest micro-batch in it: the sum can be computed once the gradient of that one is there.
    """

    left: int
    right: int
    micro_batch: int
    last: int


def gradient_sums(count: int, turn: int = 0) -> tuple[GradientSum, ...]:
    """The K - 1 additions of a balanced tree over micro-batches in order, each after its parts; the last is the root.

    Micro-batches that follow each other are added first. So where a device holds a run of them, their gradients are
    added there before anything is sent, and no more than log2(K) + 1 are there at a time. Each sum goes with one of
    its halves, the bits of `turn` say which: dealt out over parameters they spread the sums, and the transfers to them,
    evenly over replicas (recursive halving: Thakur, Rabenseifner and Gropp 2005).

    Args:
        count: K, at least 1.
        turn: a number of the parameter.

    >>> [(one.left, one.right, one.micro_batch) for one in gradient_sums(4, turn=1)]
    [(0, 1, 1), (2, 3, 3), (4, 5, -1)]
    """
    found: list[GradientSum] = []

    def add(first: int, end: int) -> tuple[int, int, int]:
        """The part that holds micro-batches `first` to `end - 1`, the one that it goes with, and its height."""
        if end - first == 1:
            return first, first, 0
        middle = first + (end - first + 1) // 2
        (left, near, height), (right, far, other) = add(first, middle), add(middle, end)
        height = max(height, other)
        goes_with = far if turn >> height & 1 else near
        found.append(GradientSum(left, right, goes_with, end - 1))
        return count + len(found) - 1, goes_with, height + 1

    add(0, count)
    return tuple(replace(one, micro_batch=-1) if one is found[-1] else one for one in found)
