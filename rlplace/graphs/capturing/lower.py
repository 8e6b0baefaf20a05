"""From a traced fx graph to ops with their calls: views folded, co-location set.

`Lowered`: ops with what they run, before they are a graph.

`GraphBuilder`: an `OpGraph` grown op by op.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing import op_work as facts
from rlplace.graphs.capturing.constants import memory, module_of
from rlplace.graphs.capturing.functional import is_view
from rlplace.graphs.capturing.op_work import Facts, tensor_bytes
from rlplace.graphs.capturing.refusals import check_apart
from rlplace.graphs.capturing.trace import Output, Trace
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.optimizers import state_bytes
from rlplace.graphs.program import (
    Call,
    Folded,
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
        self.ops.folded.update({id(each.tensor): each for each in trace.folded})
        self.refs: dict[torch.fx.Node, Any] = {}  # a Ref, a list of Ref | None (of several outputs), or a complex number

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
            if isinstance(value, torch.Generator):
                raise CaptureError(
                    f"op {reader.target} in module {module_of(reader) or 'the root'} draws from a `torch.Generator`, "
                    f"whose state no graph holds. Leave `generator=` out: draws are seeded by the step.",
                    op=str(reader.target),
                )
            raise CaptureError(
                f"op {reader.target} in module {module_of(reader) or 'the root'} takes a {type(value).__name__}, "
                f"expected tensors and plain arguments: ops that run a graph of their own (`torch.cond`, flex "
                f"attention) or hold packed weights (quantized layers) cannot be placed; use their plain counterparts.",
                op=str(reader.target),
            )
        shown = memory(value)
        if shown not in self.constants:  # tracing names a tensor anew wherever it is read
            op = self.built.add_op(node.name, "constant", module_of(node), FORWARD, "constant", facts.NOTHING)
            self.sources[op] = Source("constant", "", value.detach(), held=value)
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
        elif node.target is aten._conj.default and isinstance(node.args[0], complex):  # by the backward of `x * 1j`
            self.refs[node] = node.args[0].conjugate()
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
        def of(node: torch.fx.Node) -> Any:
            return found if isinstance(found := self.refs[node], complex) else self._ref(node)

        return _plain(torch.fx.node.map_arg(value, of))  # type: ignore[arg-type]


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


class GraphBuilder:
    """The columns of a graph, as lists.

    Attributes:
        mutations: (op, tensor) for every update in place.
        colocated: ops that share a device, a tuple for each reason.
        tensor_values: what each tensor is, as a fake tensor.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.targets: list[str] = []
        self.modules: list[str] = []
        self.signatures: list[str] = []
        self.phases: list[int] = []
        self.facts: list[Facts] = []
        self.parameter_bytes: list[int] = []
        self.gradient_bytes: list[int] = []
        self.state_bytes: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.micro_batches: list[int] = []
        self.tensor_op: list[int] = []
        self.tensor_output: list[int] = []
        self.tensor_values: list[torch.Tensor] = []
        self.mutations: list[tuple[int, int]] = []
        self.colocated: list[tuple[int, ...]] = []

    def add_op(
        self,
        name: str,
        target: str,
        module: str,
        phase: int,
        signature: str,
        op_facts: Facts,
        reads: tuple[int, ...] = (),
        parameter_bytes: int = 0,
        state: int = 0,
        micro_batch: int = -1,
    ) -> int:
        """Adds an op that reads tensors `reads`; what comes back is its index."""
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
        self.micro_batches.append(micro_batch)
        return len(self.names) - 1

    def add_tensor(self, op: int, output: int, value: torch.Tensor) -> int:
        """Adds an output of an op; what comes back is the tensor's index.

        Raises:
            CaptureError: it is sparse.
        """
        if value.layout is not torch.strided:
            raise CaptureError(
                f"output {output} of op {self.targets[op]} in module {self.modules[op] or 'the root'} is sparse "
                f"({value.layout}), expected a dense tensor; compute it densely, or densify the input outside.",
                op=self.targets[op],
            )
        self.tensor_op.append(op)
        self.tensor_output.append(output)
        self.tensor_values.append(value)
        return len(self.tensor_op) - 1

    def graph(self, program: Program, outputs: list[int]) -> OpGraph:
        """What was added, as a graph that returns tensors `outputs`."""
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
            tensor_bytes=np.array([tensor_bytes(value) for value in self.tensor_values], dtype=np.int64),
            tensor_shapes=tuple(tuple(value.shape) for value in self.tensor_values),
            tensor_dtypes=tuple(str(value.dtype).removeprefix("torch.") for value in self.tensor_values),
            input_offsets=np.concatenate(([0], np.cumsum([len(read) for read in self.reads]))).astype(np.int32),
            input_tensors=np.array([tensor for read in self.reads for tensor in read], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self.mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self.mutations], dtype=np.int32),
            output_tensors=np.array(outputs, dtype=np.int32),
            micro_batch=np.array(self.micro_batches, dtype=np.int32),
            program=program,
        )


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


@dataclass
class Lowered:
    """The ops of a step and how each runs. View k is `Ref(-1 - k)`: the number of tensors is not known yet.

    Attributes:
        built: the columns of the graph.
        sources: by op, where the values of source ops come from.
        calls: by op, how the others run.
        views: in topological order.
        view_values: what each view is, as a fake tensor (or several).
        seeds: ops that make the gradient of the loss.
        folded: constants that were read as numbers, by id of their tensors.
    """

    built: GraphBuilder = field(default_factory=GraphBuilder)
    sources: dict[int, Source] = field(default_factory=dict)
    calls: dict[int, Call | Update] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)
    view_values: list[Any] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)
    folded: dict[int, Folded] = field(default_factory=dict)

    def base(self, ref: Ref) -> int:
        """The tensor whose memory `ref` shows."""
        return ref.id if ref.id >= 0 else self.views[-1 - ref.id].base

    def value(self, ref: Ref) -> torch.Tensor:
        """What `ref` stands for, as a fake tensor."""
        value = self.built.tensor_values[ref.id] if ref.id >= 0 else self.view_values[-1 - ref.id]
        assert isinstance(value, torch.Tensor)
        return value

    def producer(self, ref: Ref) -> int:
        """The op whose memory `ref` shows."""
        return self.built.tensor_op[self.base(ref)]

    def tensors_of(self, op: int) -> range:
        """The tensors that an op produces."""
        producers = self.built.tensor_op
        return range(bisect_left(producers, op), bisect_right(producers, op))

    def tensor_of(self, op: int) -> int:
        """The tensor that a source op holds."""
        return self.tensors_of(op)[0]

    def add_update(
        self, name: str, parameter: Ref, gradient: Ref, optimizer: OptimizerSpec, together: tuple[int, ...]
    ) -> None:
        """Adds the update of a parameter, which lives with it and with the ops `together`."""
        value = self.value(parameter)
        op = self.built.add_op(
            f"update_{name}",
            f"update.{optimizer.name}",
            name.rpartition(".")[0],
            UPDATE,
            facts.signature(f"update.{optimizer.name}", (value, self.value(gradient)), {}),
            facts.update_facts(optimizer, value, self.value(gradient)),
            (parameter.id, self.base(gradient)),
            state=state_bytes(optimizer, value),
        )
        self.calls[op] = Update(parameter, gradient)
        self.built.mutations.append((op, parameter.id))
        self.built.colocated.append((op, self.built.tensor_op[parameter.id], *together))

    def keep_together(self, parameter: Ref, gradient: Ref) -> None:
        """Has a gradient that no update takes made where its parameter lives."""
        self.built.colocated.append((self.producer(parameter), self.producer(gradient)))

    def check_apart(self) -> None:
        """Refuses sources that share memory with one that is written.

        Raises:
            CaptureError: names both.
        """
        names, producer = self.built.names, self.built.tensor_op
        check_apart(
            {names[op]: source.value for op, source in self.sources.items()},
            {names[producer[tensor]] for _, tensor in self.built.mutations},
        )

    def graph(
        self,
        result: Any,
        results: list[Ref],
        optimizer: OptimizerSpec | None,
        origin: Origin,
        *,
        is_training: bool,
        gradients: Mapping[str, Ref],
        input_gradients: Mapping[int, Ref] | None = None,
    ) -> OpGraph:
        """All of it as a graph with its program.

        Args:
            result: what the step returns, with `Ref` leaves.
            results: those leaves.
            optimizer: of a training step.
            origin: what was captured.
            is_training: whether the step has a backward.
            gradients: of parameters, by dotted name.
            input_gradients: of inputs, by position.
        """
        num_tensors = len(self.built.tensor_op)

        def final(ref: Ref) -> Ref:
            return ref if ref.id >= 0 else Ref(num_tensors - 1 - ref.id)

        program = Program(
            sources=self.sources,
            calls={op: renumbered(call, final) for op, call in self.calls.items()},
            views=tuple(renumbered(view, final) for view in self.views),
            num_tensors=num_tensors,
            result=pytree.tree_map_only(Ref, final, result),
            optimizer=optimizer,
            is_training=is_training,
            origin=origin,
            gradients={name: final(gradient) for name, gradient in gradients.items()},
            input_gradients={position: final(gradient) for position, gradient in (input_gradients or {}).items()},
            seeds=frozenset(self.seeds),
            folded=tuple(self.folded.values()),
        )
        return self.built.graph(program, sorted({self.base(ref) for ref in results}))


def renumbered(item: Any, function: Any) -> Any:
    """A `Call`, `Update` or `View` with every `Ref` replaced by `function` of it; outputs and bases stay."""
    if isinstance(item, Call):
        return Call(
            item.target,
            map_refs(function, item.args),
            map_refs(function, item.kwargs),
            item.outputs,
            item.returns_tuple,
            item.is_random,
            item.takes_device,
        )
    if isinstance(item, View):
        return View(item.base, item.target, map_refs(function, item.args), map_refs(function, item.kwargs))
    return Update(function(item.parameter), function(item.gradient))
