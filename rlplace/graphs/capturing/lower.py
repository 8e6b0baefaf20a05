"""From a traced fx graph to an `OpGraph` and its `Program`: views folded, updates added, co-location set."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing import op_work as facts
from rlplace.graphs.capturing.builder import GraphBuilder
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.origins import module_of
from rlplace.graphs.capturing.refusals import check_apart
from rlplace.graphs.capturing.trace import Output, Trace
from rlplace.graphs.capturing.views import is_view
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.optimizers import state_bytes
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

aten = torch.ops.aten


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
        self.built = GraphBuilder()
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
                self.built.gradient_bytes[position] = facts.tensor_bytes(self._value(self._ref(gradient)))
        if self.is_training and self.optimizer is not None:
            self._add_updates(gradients, self.optimizer)
        names, producer = self.built.names, self.built.tensor_op
        check_apart(
            {names[op]: source.value for op, source in self.sources.items()},
            {names[producer[tensor]] for _, tensor in self.built.mutations},
        )
        num_tensors = len(self.built.tensor_op)
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
        return self.built.graph(program, sorted({self._base(ref) for ref in results}))

    # While lowering, view k is Ref(-1 - k), because the number of tensors is not known yet.

    def _final(self, ref: Ref, num_tensors: int) -> Ref:
        return ref if ref.id >= 0 else Ref(num_tensors - 1 - ref.id)

    def _renumber(self, item: Any, num_tensors: int) -> Any:
        def final(ref: Ref) -> Ref:
            return self._final(ref, num_tensors)

        if isinstance(item, Call):
            return Call(
                item.target,
                map_refs(final, item.args),
                map_refs(final, item.kwargs),
                item.outputs,
                item.returns_tuple,
                item.is_random,
                item.takes_device,
            )
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

    def _add_placeholders(self) -> None:
        trace = self.trace
        kinds: list[tuple[SourceKind, str]] = [("parameter", name) for name in (*trace.trainable, *trace.fixed)]
        kinds += [("buffer", name) for name in trace.buffers]
        kinds += [("input", str(k)) for k in range(len(trace.values) - len(kinds) - trace.num_targets)]
        kinds += [("target", str(k)) for k in range(trace.num_targets)]
        placeholders = [node for node in trace.module.graph.nodes if node.op == "placeholder"]
        for node, (kind, key), value in zip(placeholders, kinds, trace.values, strict=True):
            is_state = kind in ("parameter", "buffer")
            name = key if is_state else f"{kind}_{key}"
            module = key.rpartition(".")[0] if is_state else ""
            target = kind if is_state else "input"  # a target of the loss is placed as an input is
            size = facts.tensor_bytes(value) if kind == "parameter" else 0
            op = self.built.add_op(name, target, module, FORWARD, target, facts.NOTHING, parameter_bytes=size)
            self.sources[op] = Source(kind, key, value.detach())
            self.refs[node] = ref = Ref(self.built.add_tensor(op, 0, node.meta["val"]))
            # a recomputed forward reads the module's own tensors, and the loss of an autoencoder the user's input
            self.constants.setdefault(memory(value), ref)

    def _add_constant(self, node: torch.fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.trace.module)
        if not isinstance(value, torch.Tensor):
            reader = next(iter(node.users))
            raise CaptureError(
                f"op {reader.target} in module {module_of(reader) or 'the root'} takes a {type(value).__name__}, "
                f"expected tensors and plain arguments: ops that run a graph of their own (`torch.cond`, flex "
                f"attention) or hold packed weights (quantized layers) cannot be placed; use their plain counterparts.",
                op=str(reader.target),
            )
        shown = memory(value)
        if shown not in self.constants:  # tracing names a tensor anew wherever it is read
            op = self.built.add_op(node.name, "constant", module_of(node), FORWARD, "constant", facts.NOTHING)
            self.sources[op] = Source("constant", "", value.detach())
            self.constants[shown] = Ref(self.built.add_tensor(op, 0, value))
        self.refs[node] = self.constants[shown]

    def _add_call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            found = self.refs[source]  # type: ignore[index]
            if isinstance(found, list):
                self.refs[node] = found[index]  # type: ignore[index]
                return
            self._add_view(node, found)
        elif isinstance(node.target, torch._ops.OpOverload) and is_view(node.target):
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
        op = self.built.add_op(
            node.name,
            str(target),
            module_of(node),
            phase,
            facts.signature(str(target), *values),
            facts.call_facts(target, *values, output),
            reads,
        )
        outputs: tuple[int, ...] = ()
        returns_tuple = isinstance(output, (list, tuple))
        for position in (3, 4) if target is aten._native_batch_norm_legit.default else ():
            statistic = self._base(self._ref(node.args[position]))
            self.built.mutations.append((op, statistic))
            self.built.colocated.append((op, self.built.tensor_op[statistic]))
        if is_store:
            buffer = self._base(self._ref(node.args[0]))
            self.built.mutations.append((op, buffer))
            self.built.modules[op] = self.built.modules[self.built.tensor_op[buffer]]
            self.built.colocated.append((op, self.built.tensor_op[buffer], self._producer(self._ref(node.args[1]))))
        elif returns_tuple:
            refs = [
                Ref(self.built.add_tensor(op, k, value)) if isinstance(value, torch.Tensor) else None
                for k, value in enumerate(output)
            ]
            self.refs[node] = refs
            outputs = tuple(-1 if ref is None else ref.id for ref in refs)
        elif isinstance(output, torch.Tensor):
            ref = Ref(self.built.add_tensor(op, 0, output))
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
            value = self.built.tensor_values[position]
            op = self.built.add_op(
                f"update_{name}",
                f"update.{optimizer.name}",
                name.rpartition(".")[0],
                UPDATE,
                facts.signature(f"update.{optimizer.name}", (value, self._value(gradient)), {}),
                facts.update_facts(optimizer, value, self._value(gradient)),
                (parameter.id, self._base(gradient)),
                state=state_bytes(optimizer, value),
            )
            self.calls[op] = Update(parameter, gradient)
            self.built.mutations.append((op, parameter.id))
            self.built.colocated.append((op, self.built.tensor_op[parameter.id], self._producer(gradient)))

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
        value = self.built.tensor_values[ref.id] if ref.id >= 0 else self.view_nodes[-1 - ref.id].meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def _producer(self, ref: Ref) -> int:
        return self.built.tensor_op[self._base(ref)]


def _is_store(node: torch.fx.Node) -> bool:
    return (
        node.target is aten.copy_.default
        and isinstance(node.args[0], torch.fx.Node)
        and node.args[0].op == "placeholder"
    )


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
