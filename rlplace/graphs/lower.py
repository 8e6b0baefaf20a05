"""From a traced fx graph to an `OpGraph` and its `Program`: views folded, updates added, co-location set."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs import facts
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.optimizers import state_bytes
from rlplace.graphs.origins import module_of
from rlplace.graphs.program import (
    Call,
    OptimizerSpec,
    Origin,
    Program,
    Ref,
    Source,
    SourceKind,
    Update,
    View,
    map_refs,
    refs_in,
)
from rlplace.graphs.trace import Output, Trace

aten = torch.ops.aten
_ALIASES = {
    aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}  # fmt: skip
"""They return views of their argument and do not say so: nothing writes to either, here."""


def lower(trace: Trace, optimizer: OptimizerSpec | None, origin: Origin, *, is_training: bool) -> OpGraph:
    """The `OpGraph` of a traced step, its `program` attached.

    Args:
        trace: what `trace_step` returned.
        optimizer: adds an update for each parameter with a gradient; None adds none.
        origin: what was traced.
        is_training: whether the step has a backward.
    """
    return _Lowering(trace, optimizer, origin, is_training=is_training).run()


class _Lowering:
    def __init__(self, trace: Trace, optimizer: OptimizerSpec | None, origin: Origin, *, is_training: bool) -> None:
        self.trace = trace
        self.optimizer = optimizer
        self.origin = origin
        self.is_training = is_training
        self.names: list[str] = []
        self.targets: list[str] = []
        self.modules: list[str] = []
        self.signatures: list[str] = []
        self.phases: list[int] = []
        self.facts: list[facts.Facts] = []
        self.parameter_bytes: list[int] = []
        self.gradient_bytes: list[int] = []
        self.state_bytes: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.colocated: list[tuple[int, ...]] = []
        self.tensor_op: list[int] = []
        self.tensor_output: list[int] = []
        self.tensor_values: list[torch.Tensor] = []
        self.mutations: list[tuple[int, int]] = []
        self.sources: dict[int, Source] = {}
        self.constants: dict[tuple[Any, ...], Ref] = {}  # by the memory that they show
        self.calls: dict[int, Call | Update] = {}
        self.refs: dict[torch.fx.Node, Any] = {}  # a Ref, or for an op with several outputs a list of Ref | None
        self.views: list[View] = []
        self.view_nodes: list[torch.fx.Node] = []

    def run(self) -> OpGraph:
        live = self._live_nodes()
        self._add_placeholders()
        for node in self.trace.module.graph.nodes:
            if node.op == "get_attr" and node in live:
                self._add_constant(node)
            elif node.op == "call_function" and node in live:
                self._add_call(node)
        (output,) = (node for node in self.trace.module.graph.nodes if node.op == "output")
        flat: Any = output.args[0]
        results = [self._ref(node) for node in flat[: self.trace.num_results]]
        gradients = flat[self.trace.num_results :]
        for position, gradient in enumerate(gradients):  # of the first placeholders, in their order
            if gradient is not None:
                self.gradient_bytes[position] = facts.tensor_bytes(self._value(self._ref(gradient)))
        if self.is_training and self.optimizer is not None:
            self._add_updates(gradients, self.optimizer)
        num_tensors = len(self.tensor_op)
        program = Program(
            sources=self.sources,
            calls={op: self._renumber(call, num_tensors) for op, call in self.calls.items()},
            views=tuple(self._renumber(view, num_tensors) for view in self.views),
            num_tensors=num_tensors,
            result=pytree.tree_map_only(
                Output, lambda output: self._final(results[output.index], num_tensors), self.trace.result
            ),
            optimizer=self.optimizer,
            is_training=self.is_training,
            origin=self.origin,
        )
        return self._graph(program, sorted({self._base(ref) for ref in results}))

    # While lowering, view k is Ref(-1 - k), because the number of tensors is not known yet.

    def _final(self, ref: Ref, num_tensors: int) -> Ref:
        return ref if ref.id >= 0 else Ref(num_tensors - 1 - ref.id)

    def _renumber(self, item: Any, num_tensors: int) -> Any:
        def final(ref: Ref) -> Ref:
            return self._final(ref, num_tensors)

        if isinstance(item, Call):
            return Call(item.target, map_refs(final, item.args), map_refs(final, item.kwargs), item.outputs,
                        item.returns_tuple, item.is_random, item.takes_device)  # fmt: skip
        if isinstance(item, View):
            return View(item.base, item.target, map_refs(final, item.args), map_refs(final, item.kwargs))
        return Update(final(item.parameter), final(item.gradient))

    def _live_nodes(self) -> set[torch.fx.Node]:
        nodes = self.trace.module.graph.nodes
        live: set[torch.fx.Node] = set()
        for node in reversed(nodes):
            if node.op == "output" or node in live or _is_store(node):
                live.add(node)
                live.update(node.all_input_nodes)
        return live

    def _add_op(
        self, name: str, target: str, module: str, phase: int, signature: str, op_facts: facts.Facts,
        reads: tuple[int, ...] = (), parameter_bytes: int = 0, state: int = 0,
    ) -> int:  # fmt: skip
        self.names.append(name)
        self.targets.append(target)
        self.modules.append(module)
        self.phases.append(phase)
        self.signatures.append(signature)
        self.facts.append(op_facts)
        self.reads.append(tuple(sorted(set(reads))))
        self.parameter_bytes.append(parameter_bytes)
        self.gradient_bytes.append(0)
        self.state_bytes.append(state)
        return len(self.names) - 1

    def _add_tensor(self, op: int, output: int, value: torch.Tensor) -> Ref:
        if value.layout is not torch.strided:
            raise CaptureError(
                f"output {output} of op {self.targets[op]} in module {self.modules[op] or 'the root'} is sparse "
                f"({value.layout}), expected a dense tensor; compute it densely, or densify the input outside.",
                op=self.targets[op],
            )
        self.tensor_op.append(op)
        self.tensor_output.append(output)
        self.tensor_values.append(value)
        return Ref(len(self.tensor_op) - 1)

    def _add_placeholders(self) -> None:
        trace = self.trace
        kinds: list[tuple[SourceKind, str]] = [("parameter", name) for name in (*trace.trainable, *trace.fixed)]
        kinds += [("buffer", name) for name in trace.buffers]
        kinds += [("input", str(k)) for k in range(len(trace.values) - len(kinds))]
        placeholders = [node for node in trace.module.graph.nodes if node.op == "placeholder"]
        for node, (kind, key), value in zip(placeholders, kinds, trace.values, strict=True):
            name = key if kind in ("parameter", "buffer") else f"input_{key}"
            module = key.rpartition(".")[0] if kind in ("parameter", "buffer") else ""
            size = facts.tensor_bytes(value) if kind == "parameter" else 0
            op = self._add_op(name, kind, module, FORWARD, kind, facts.NOTHING, parameter_bytes=size)
            self.sources[op] = Source(kind, key, value.detach())
            self.refs[node] = self._add_tensor(op, 0, node.meta["val"])

    def _add_constant(self, node: torch.fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.trace.module)
        memory = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if memory not in self.constants:  # tracing names a tensor anew wherever it is read
            op = self._add_op(node.name, "constant", module_of(node), FORWARD, "constant", facts.NOTHING)
            self.sources[op] = Source("constant", "", value.detach())
            self.constants[memory] = self._add_tensor(op, 0, value)
        self.refs[node] = self.constants[memory]

    def _add_call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            found = self.refs[source]  # type: ignore[index]
            if isinstance(found, list):
                self.refs[node] = found[index]  # type: ignore[index]
                return
            self._add_view(node, found)
        elif isinstance(node.target, torch._ops.OpOverload) and _is_view(node.target):
            self._add_view(node, self._ref(node.args[0]))
        else:
            self._add_compute(node)

    def _add_view(self, node: torch.fx.Node, source: Ref) -> None:
        self.views.append(
            View(self._base(source), node.target, self._refs(node.args), self._refs(node.kwargs))  # type: ignore[arg-type]
        )
        self.view_nodes.append(node)
        self.refs[node] = Ref(-len(self.views))

    def _add_compute(self, node: torch.fx.Node) -> None:
        target, custom = node.target, node.meta.get("custom") or {}
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        reads = tuple(self._base(ref) for ref in refs_in((args, kwargs)))
        values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val", _constant(self.trace, n)))
        is_store = _is_store(node)
        phase = UPDATE if is_store else FORWARD if custom.get("phase", "forward") == "forward" else BACKWARD
        output: Any = node.meta.get("val")
        op = self._add_op(
            node.name, str(target), module_of(node), phase,
            facts.signature(str(target), *values), facts.call_facts(target, *values, output), reads,
        )  # fmt: skip
        outputs: tuple[int, ...] = ()
        returns_tuple = isinstance(output, (list, tuple))
        for position in (3, 4) if target is aten._native_batch_norm_legit.default else ():
            statistic = self._base(self._ref(node.args[position]))
            self.mutations.append((op, statistic))
            self.colocated.append((op, self.tensor_op[statistic]))
        if is_store:
            buffer = self._base(self._ref(node.args[0]))
            self.mutations.append((op, buffer))
            self.modules[op] = self.modules[self.tensor_op[buffer]]
            self.colocated.append((op, self.tensor_op[buffer], self._producer(self._ref(node.args[1]))))
        elif returns_tuple:
            refs = [self._add_tensor(op, k, v) if isinstance(v, torch.Tensor) else None for k, v in enumerate(output)]
            self.refs[node] = refs
            outputs = tuple(-1 if ref is None else ref.id for ref in refs)
        elif isinstance(output, torch.Tensor):
            ref = self._add_tensor(op, 0, output)
            self.refs[node] = ref
            outputs = (ref.id,)
        else:
            raise CaptureError(
                f"op {target} returns a {type(output).__name__}, expected tensors; a graph cannot hold a plain number "
                f"that is computed on the way (`.item()`, `.size()` of a data-dependent shape).",
                op=str(target),
            )
        schema = getattr(target, "_schema", None)
        self.calls[op] = Call(
            target=target,  # type: ignore[arg-type]
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            returns_tuple=returns_tuple,
            is_random=torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()),
            takes_device=schema is not None and any(argument.name == "device" for argument in schema.arguments),
        )

    def _add_updates(self, gradients: list[torch.fx.Node | None], optimizer: OptimizerSpec) -> None:
        for position, (name, node) in enumerate(zip(self.trace.trainable, gradients, strict=True)):
            if node is None:
                continue
            parameter, gradient = Ref(position), self._ref(node)
            value = self.tensor_values[position]
            op = self._add_op(
                f"update_{name}", f"update.{optimizer.name}", name.rpartition(".")[0], UPDATE,
                facts.signature(f"update.{optimizer.name}", (value, self._value(gradient)), {}),
                facts.update_facts(optimizer, value, self._value(gradient)),
                (parameter.id, self._base(gradient)), state=state_bytes(optimizer, value),
            )  # fmt: skip
            self.calls[op] = Update(parameter, gradient)
            self.mutations.append((op, parameter.id))
            self.colocated.append((op, self.tensor_op[parameter.id], self._producer(gradient)))

    def _ref(self, node: Any) -> Ref:
        ref = self.refs[node]
        if not isinstance(ref, Ref):
            raise CaptureError(f"output {node} of the traced step is a list, expected a tensor.", op=str(node.target))
        return ref

    def _refs(self, value: Any) -> Any:
        return _plain(torch.fx.node.map_arg(value, self._ref))  # type: ignore[arg-type]

    def _base(self, ref: Ref) -> int:
        return ref.id if ref.id >= 0 else self.views[-1 - ref.id].base

    def _value(self, ref: Ref) -> torch.Tensor:
        value = self.tensor_values[ref.id] if ref.id >= 0 else self.view_nodes[-1 - ref.id].meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def _producer(self, ref: Ref) -> int:
        return self.tensor_op[self._base(ref)]

    def _graph(self, program: Program, outputs: list[int]) -> OpGraph:
        flops, moved, workspace = zip(*self.facts, strict=True)
        return OpGraph(
            names=_unique(self.names),
            targets=tuple(self.targets),
            modules=tuple(self.modules),
            signatures=tuple(self.signatures),
            phases=np.array(self.phases, dtype=np.int8),
            flops=np.array(flops),
            bytes_moved=np.array(moved),
            parameter_bytes=np.array(self.parameter_bytes, dtype=np.int64),
            gradient_bytes=np.array(self.gradient_bytes, dtype=np.int64),
            state_bytes=np.array(self.state_bytes, dtype=np.int64),
            workspace_bytes=np.array(workspace, dtype=np.int64),
            colocation=_classes(len(self.names), self.colocated),
            tensor_op=np.array(self.tensor_op, dtype=np.int32),
            tensor_output=np.array(self.tensor_output, dtype=np.int32),
            tensor_bytes=np.array([facts.tensor_bytes(value) for value in self.tensor_values], dtype=np.int64),
            tensor_shapes=tuple(tuple(value.shape) for value in self.tensor_values),
            tensor_dtypes=tuple(str(value.dtype).removeprefix("torch.") for value in self.tensor_values),
            input_offsets=np.concatenate(([0], np.cumsum([len(read) for read in self.reads]))).astype(np.int32),
            input_tensors=np.array([tensor for read in self.reads for tensor in read], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self.mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self.mutations], dtype=np.int32),
            output_tensors=np.array(outputs, dtype=np.int32),
            program=program,
        )


def _is_store(node: torch.fx.Node) -> bool:
    return (
        node.target is aten.copy_.default
        and isinstance(node.args[0], torch.fx.Node)
        and node.args[0].op == "placeholder"
    )


def _is_view(target: torch._ops.OpOverload) -> bool:
    if target in _ALIASES:
        return True
    aliases = [result.alias_info for result in target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _constant(trace: Trace, node: torch.fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(trace.module) if node.op == "get_attr" else None


def _plain(value: Any) -> Any:
    """fx's immutable lists and dicts as plain ones."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    return value


def _unique(names: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        unique.append(name if not count else f"{name}#{count}")
    return tuple(unique)


def _classes(num_ops: int, together: list[tuple[int, ...]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    parent = list(range(num_ops))

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for members in together:
        for other in members[1:]:
            low, high = sorted((find(members[0]), find(other)))
            parent[high] = low
    touched = sorted({op for members in together for op in members})
    roots = {root: index for index, root in enumerate(dict.fromkeys(find(op) for op in touched))}
    classes = np.full(num_ops, -1, dtype=np.int32)
    for op in touched:
        classes[op] = roots[find(op)]
    return classes
