"""From a traced fx graph to ops with their calls: views folded, co-location set."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing import op_work as facts
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.lowered import Lowered
from rlplace.graphs.capturing.origins import module_of
from rlplace.graphs.capturing.trace import Output, Trace
from rlplace.graphs.capturing.views import is_view
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.program import Call, OptimizerSpec, Origin, Ref, Source, SourceKind, View, refs_in

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweredStep:
    """A traced step as ops, its updates not among them.

    Attributes:
        ops: what runs; its first tensors are the placeholders of the trace, in their order.
        results: what the trace's `Output`s stand for.
        gradients: of each trainable parameter; None for one that the step does not reach.
        input_gradients: of the inputs that have one, likewise.
        statistics: of batch norms that hand out theirs, in the order of the trace.
        trace: what was lowered.
    """

    ops: Lowered
    results: list[Ref]
    gradients: list[Ref | None]
    input_gradients: list[Ref | None]
    statistics: list[Ref]
    trace: Trace


def lower(trace: Trace, optimizer: OptimizerSpec | None, origin: Origin, *, is_training: bool) -> OpGraph:
    """The `OpGraph` of a traced step, its `program` attached.

    Args:
        trace: what `trace_step` returned.
        optimizer: adds an update for each parameter with a gradient; None adds none.
        origin: what was traced.
        is_training: whether the step has a backward.
    """
    step = lower_step(trace)
    ops = step.ops
    found = zip(trace.trainable, step.gradients, strict=True)
    gradients = {name: gradient for name, gradient in found if gradient is not None} if is_training else {}
    for position, name in enumerate(trace.trainable):
        if name in gradients:
            gradient = gradients[name]
            if optimizer is None:
                ops.keep_together(Ref(position), gradient)
            else:
                ops.add_update(name, Ref(position), gradient, optimizer, (ops.producer(gradient),))
    ops.check_apart()
    result = pytree.tree_map_only(Output, lambda output: step.results[output.index], trace.result)
    return ops.graph(
        result,
        step.results,
        optimizer,
        origin,
        is_training=is_training,
        gradients=gradients,
        input_gradients={
            position: gradient
            for position, gradient in zip(trace.input_gradients, step.input_gradients, strict=True)
            if gradient is not None
        },
    )


def lower_step(trace: Trace) -> LoweredStep:
    """The ops of a traced step."""
    return _Lowering(trace).run()


class _Lowering:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops = Lowered()
        self.built, self.sources, self.calls = self.ops.built, self.ops.sources, self.ops.calls
        self.constants: dict[tuple[Any, ...], Ref] = {}  # by the memory that they show
        self.refs: dict[torch.fx.Node, Any] = {}  # a Ref, or for an op with several outputs a list of Ref | None

    def run(self) -> LoweredStep:
        live = self._live_nodes()
        self._add_placeholders()
        for node in self.trace.module.graph.nodes:
            if node.op == "get_attr" and node in live:
                self._add_constant(node)
            elif node.op == "call_function" and node in live:
                self._add_call(node)
        (output,) = (node for node in self.trace.module.graph.nodes if node.op == "output")
        flat: Any = output.args[0]
        num_results, num_trainable = self.trace.num_results, len(self.trace.trainable)
        end = num_results + num_trainable + len(self.trace.input_gradients)
        gradients = [None if node is None else self._ref(node) for node in flat[num_results:end]]
        for position, gradient in enumerate(gradients[:num_trainable]):  # of the first placeholders, in their order
            if gradient is not None:
                self.built.gradient_bytes[position] = facts.tensor_bytes(self.ops.value(gradient))
        return LoweredStep(
            ops=self.ops,
            results=[self._ref(node) for node in flat[:num_results]],
            gradients=gradients[:num_trainable],
            input_gradients=gradients[num_trainable:],
            statistics=[self._ref(node) for node in flat[end:]],
            trace=self.trace,
        )

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
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        self.ops.views.append(View(self.ops.base(source), node.target, args, kwargs))  # type: ignore[arg-type]
        self.ops.view_values.append(node.meta.get("val"))
        self.refs[node] = Ref(-len(self.ops.views))

    def _add_compute(self, node: torch.fx.Node) -> None:
        target, custom = node.target, node.meta.get("custom") or {}
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        reads = tuple(self.ops.base(ref) for ref in refs_in((args, kwargs)))
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
            statistic = self.ops.base(self._ref(node.args[position]))
            self.built.mutations.append((op, statistic))
            self.built.colocated.append((op, self.built.tensor_op[statistic]))
        if is_store:
            buffer = self.ops.base(self._ref(node.args[0]))
            self.built.mutations.append((op, buffer))
            self.built.modules[op] = self.built.modules[self.built.tensor_op[buffer]]
            self.built.colocated.append((op, self.built.tensor_op[buffer], self.ops.producer(self._ref(node.args[1]))))
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
        if custom.get("seed"):
            self.ops.seeds.add(op)
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

    def _ref(self, node: Any) -> Ref:
        ref = self.refs[node]
        if not isinstance(ref, Ref):
            raise CaptureError(f"output {node} of the traced step is a list, expected a tensor.", op=str(node.target))
        return ref

    def _refs(self, value: Any) -> Any:
        return _plain(torch.fx.node.map_arg(value, self._ref))  # type: ignore[arg-type]


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
