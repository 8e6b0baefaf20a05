"""From a traced fx graph to ops with their calls: views folded, co-location set.

`Lowered`: ops with their calls, before they are a graph.

The cost of an op (FLOPs, bytes moved, scratch), from its shapes alone. `register_cost`: the cost of a user's own op,
where the general estimate would be wrong.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs.capturing.constants import draw_of, memory, module_of
from rlplace.graphs.capturing.functional import is_view, live_nodes
from rlplace.graphs.capturing.trace import Trace
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, GraphBuilder, OpGraph, OpRow, TensorRow
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
    SplitReport,
    Update,
    View,
    map_refs,
    refs_in,
    tensors_in,
)

aten = torch.ops.aten


def lower(trace: Trace, optimizer: OptimizerSpec | None, origin: Origin, *, is_training: bool) -> OpGraph:
    """The `OpGraph` of a traced step, its `program` attached.

    Args:
        trace: of `trace_step`.
        optimizer: adds an update for each parameter with a gradient; None adds none.
        origin: the traced step.
        is_training: whether the step has a backward.
    """
    step = LoweredStep(trace)
    ops = step.ops
    gradients: dict[str, Ref] = {}
    for position, (name, gradient) in enumerate(zip(trace.trainable, step.gradients, strict=True)):
        if gradient is not None:
            gradients[name], home, made = gradient, ops.producer(Ref(position)), ops.producer(gradient)
            # a whole op that makes the gradients of several shards would keep them all on its device
            made_here = (made,) if ops.built.ops[made].shard == ops.built.ops[home].shard else ()
            if optimizer is None:
                ops.built.together.append((home, *made_here))
            else:
                ops.add_update(name, Ref(position), gradient, optimizer, made_here)
    return ops.graph(
        pytree.tree_map_only(Ref, lambda output: step.results[output.id], trace.result),
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


class LoweredStep:
    """A traced step as ops, its updates not among them.

    Attributes:
        ops: the ops to run; the first tensors are the placeholders of the trace, in their order.
        results: the tensors that the `Ref`s in the trace's result refer to.
        gradients: of each trainable parameter; None for a parameter that the loss does not depend on.
        input_gradients: of the inputs that have one, likewise.
        statistics: of batch norms that hand out theirs, in the order of the trace.
        trace: the lowered trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops = Lowered(split=trace.split)
        self._built, self._sources, self._calls = self.ops.built, self.ops.sources, self.ops.calls
        self._constants: dict[tuple[Any, ...], Ref] = {}  # by the memory that they show
        self.ops.folded.update({id(each.tensor): each for each in trace.folded})
        # a Ref, a list of Ref | None (of several outputs), or a complex number
        self._of_node: dict[torch.fx.Node, Any] = {}
        graph = trace.module.graph
        live = live_nodes(graph, _is_store)
        self._add_placeholders()
        for node in graph.nodes:
            if node.op == "get_attr" and node in live:
                self._add_constant(node)
            elif node.op == "call_function" and node in live:
                self._add_call(node)
        (output,) = graph.find_nodes(op="output")
        flat: Any = output.args[0]
        num_results, num_trainable = trace.num_results, len(trace.trainable)
        end = num_results + num_trainable + len(trace.input_gradients)
        gradients = [None if node is None else self._ref(node) for node in flat[num_results:end]]
        self.gradients, self.input_gradients = gradients[:num_trainable], gradients[num_trainable:]
        for position, gradient in enumerate(self.gradients):  # of the first placeholders, in their order
            if gradient is not None:
                self._built.ops[position].gradient_bytes = tensor_bytes(self.ops.value(gradient))
        self.results, self.statistics = [*map(self._ref, flat[:num_results])], [*map(self._ref, flat[end:])]

    def _add_placeholders(self) -> None:
        trace = self.trace
        kinds: list[tuple[SourceKind, str]] = [("parameter", name) for name in (*trace.trainable, *trace.fixed)]
        kinds += [("buffer", name) for name in trace.buffers]
        kinds += [("input", str(k)) for k in range(len(trace.values) - len(kinds) - trace.num_targets)]
        kinds += [("target", str(k)) for k in range(trace.num_targets)]
        placeholders = trace.module.graph.find_nodes(op="placeholder")
        for node, (kind, key), value in zip(placeholders, kinds, trace.values, strict=True):
            is_state = kind in ("parameter", "buffer")
            name, module = (key, key.rpartition(".")[0]) if is_state else (f"{kind}_{key}", "")
            source = Source(kind, key, value.detach(), shard=trace.shards.get(key) if is_state else None)
            self._of_node[node] = ref = self.ops.add_source(name, source, node.meta["val"], module=module)
            self._constants.setdefault(memory(value), ref)  # the loss of an autoencoder reads the user's own input

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
        node.meta.setdefault("val", value)
        shown = memory(value)
        if shown not in self._constants:  # tracing names a tensor anew wherever it is read
            source = Source("constant", "", value.detach(), held=value)
            self._constants[shown] = self.ops.add_source(node.name, source, value, module=module_of(node))
        self._of_node[node] = self._constants[shown]

    def _add_call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            found = self._of_node[source]  # type: ignore[index]
            if isinstance(found, list):
                self._of_node[node] = found[index]  # type: ignore[index]
                return
            self._add_view(node, found)
        elif node.target is aten._conj.default and isinstance(node.args[0], complex):  # by the backward of `x * 1j`
            self._of_node[node] = node.args[0].conjugate()
        elif isinstance(node.target, torch._ops.OpOverload) and is_view(node.target):
            self._add_view(node, self._ref(node.args[0]))
        else:
            self._add_compute(node)

    def _add_view(self, node: torch.fx.Node, source: Ref) -> None:
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        # a kernel may lay its output out in another way than its fake twin (`softplus_backward` does): then it copies
        target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
        view = View(self.ops.base(source), target, args, kwargs)  # type: ignore[arg-type]
        self._of_node[node] = self.ops.add_view(view, node.meta.get("val"))

    def _add_compute(self, node: torch.fx.Node) -> None:
        target, custom = node.target, node.meta.get("custom") or {}
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        reads = tuple(self.ops.base(ref) for ref in refs_in((args, kwargs)))
        values = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        is_store = _is_store(node)
        phase = UPDATE if is_store else FORWARD if custom.get("phase", "forward") == "forward" else BACKWARD
        output: Any = node.meta.get("val")
        signed, cost = signature(str(target), *values), call_facts(target, *values, output)
        op = self._built.add(
            OpRow(
                *(node.name, str(target), module_of(node), phase, signed, reads, *cost),
                shard=node.meta.get("shard", -1),
            )
        )
        outputs: tuple[int, ...] = ()
        returns_tuple = isinstance(output, (list, tuple))
        for position in (3, 4) if target is aten._native_batch_norm_legit.default else ():
            statistic = self.ops.base(self._ref(node.args[position]))
            self._built.mutations.append((op, statistic))
            self._built.together.append((op, self._built.tensors[statistic].op))
        if is_store:
            buffer = self.ops.base(self._ref(node.args[0]))
            self._built.mutations.append((op, buffer))
            home = self._built.tensors[buffer].op
            self._built.ops[op].module = self._built.ops[home].module
            self._built.together.append((op, home, self.ops.producer(self._ref(node.args[1]))))
        elif returns_tuple or isinstance(output, torch.Tensor):
            refs = [
                Ref(self.ops.add_tensor(op, k, value)) if isinstance(value, torch.Tensor) else None
                for k, value in enumerate(output if returns_tuple else (output,))
            ]
            self._of_node[node] = refs if returns_tuple else refs[0]
            outputs = tuple(-1 if ref is None else ref.id for ref in refs)
        else:
            raise CaptureError(
                f"op {target} returns a {type(output).__name__}, expected tensors; a graph cannot hold a plain number "
                f"that is computed on the way (`.item()`, `.size()` of a data-dependent shape).",
                op=str(target),
            )
        if custom.get("seed"):
            self.ops.seeds.add(op)
        arguments = getattr(getattr(target, "_schema", None), "arguments", ())
        self._calls[op] = Call(
            target=target,  # type: ignore[arg-type]
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            returns_tuple=returns_tuple,
            draw=draw_of(node),
            takes_device=any(argument.name == "device" for argument in arguments),
        )

    def _ref(self, node: Any) -> Ref:
        ref = self._of_node[node]
        if not isinstance(ref, Ref):
            raise CaptureError(f"output {node} of the traced step is a list, expected a tensor.", op=str(node.target))
        return ref

    def _refs(self, value: Any) -> Any:
        def of(node: torch.fx.Node) -> Any:
            return found if isinstance(found := self._of_node[node], complex) else self._ref(node)

        return torch.fx.node.map_arg(value, of)


def _is_store(node: torch.fx.Node) -> bool:
    return (
        node.target is aten.copy_.default
        and isinstance(node.args[0], torch.fx.Node)
        and node.args[0].op == "placeholder"
    )


@dataclass
class Lowered:
    """The ops of a step and how each runs. View k is `Ref(-1 - k)`: the number of tensors is not known yet.

    Attributes:
        built: the columns of the graph.
        sources: by op, where the values of source ops come from.
        calls: by op, how the others run.
        views: in topological order.
        view_values: each view as a fake tensor (or several).
        seeds: ops that make the gradient of the loss.
        folded: constants that were read as numbers, by id of their tensors.
        split: what became of the split of the step.
    """

    built: GraphBuilder = field(default_factory=GraphBuilder)
    sources: dict[int, Source] = field(default_factory=dict)
    calls: dict[int, Call | Update] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)
    view_values: list[Any] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)
    folded: dict[int, Folded] = field(default_factory=dict)
    split: SplitReport | None = None

    def base(self, ref: Ref) -> int:
        """The tensor whose memory `ref` shows."""
        return ref.id if ref.id >= 0 else self.views[-1 - ref.id].base

    def value(self, ref: Ref) -> torch.Tensor:
        """The fake tensor of `ref`."""
        value = self.built.tensors[ref.id].value if ref.id >= 0 else self.view_values[-1 - ref.id]
        assert isinstance(value, torch.Tensor)
        return value

    def producer(self, ref: Ref) -> int:
        """The op whose memory `ref` shows."""
        return self.built.tensors[self.base(ref)].op

    def tensors_of(self, op: int) -> range:
        """The tensors that an op produces."""
        tensors, producer = self.built.tensors, operator.attrgetter("op")
        return range(bisect_left(tensors, op, key=producer), bisect_right(tensors, op, key=producer))

    def add_tensor(self, op: int, output: int, value: torch.Tensor) -> int:
        """Adds an output of the last op; returns the tensor's index.

        Raises:
            CaptureError: it is sparse.
        """
        if value.layout is not torch.strided:
            row = self.built.ops[op]
            raise CaptureError(
                f"output {output} of op {row.target} in module {row.module or 'the root'} is sparse "
                f"({value.layout}), expected a dense tensor; compute it densely, or densify the input outside.",
                op=row.target,
            )
        dtype = str(value.dtype).removeprefix("torch.")
        return self.built.add_tensor(TensorRow(op, output, tensor_bytes(value), tuple(value.shape), dtype, value))

    def add_view(self, view: View, value: Any) -> Ref:
        """Adds a view, which is `value`; returns its reference."""
        self.views.append(view)
        self.view_values.append(value)
        return Ref(-len(self.views))

    def add_source(
        self,
        name: str,
        source: Source,
        value: torch.Tensor,
        *,
        module: str = "",
        gradient_bytes: int = 0,
        micro_batch: int = -1,
    ) -> Ref:
        """Adds a source op that holds `value`; returns its tensor."""
        target = "input" if source.kind == "target" else source.kind  # a target of the loss is placed as an input is
        op = self.built.add(
            OpRow(
                name,
                target,
                module,
                signature=target,
                parameter_bytes=tensor_bytes(value) if target == "parameter" else 0,
                gradient_bytes=gradient_bytes,
                micro_batch=micro_batch,
                shard=-1 if source.shard is None else source.shard.index,
            )
        )
        self.sources[op] = source
        return Ref(self.add_tensor(op, 0, value))

    def add_update(
        self, name: str, parameter: Ref, gradient: Ref, optimizer: OptimizerSpec, together: tuple[int, ...]
    ) -> None:
        """Adds the update of a parameter, which lives with it and with the ops `together`."""
        value, slope, target = self.value(parameter), self.value(gradient), f"update.{optimizer.name}"
        op = self.built.add(
            OpRow(
                f"update_{name}",
                target,
                name.rpartition(".")[0],
                UPDATE,
                signature(target, (value, slope), {}),
                (parameter.id, self.base(gradient)),
                *update_facts(optimizer, value, slope),
                state_bytes=state_bytes(optimizer, value),
                shard=self.built.ops[self.producer(parameter)].shard,
            )
        )
        self.calls[op] = Update(parameter, gradient)
        self.built.mutations.append((op, parameter.id))
        self.built.together.append((op, self.producer(parameter), *together))

    def _check_apart(self) -> None:
        """Refuses sources that share memory with one that is written: on two devices they would come apart."""
        written = {self.built.tensors[tensor].op for _, tensor in self.built.mutations}
        by_storage: dict[int, list[int]] = {}
        for op, source in self.sources.items():
            by_storage.setdefault(source.value.untyped_storage()._cdata, []).append(op)
        for sharing in by_storage.values():
            for op, other in itertools.permutations(sharing, 2):
                (first, end), (start, last) = (_span(self.sources[each].value) for each in (op, other))
                if op in written and start < end and first < last:
                    names = self.built.ops[op].name, self.built.ops[other].name
                    raise CaptureError(
                        f"the step writes to {names[0]}, which shares memory with {names[1]}, and they may be placed "
                        f"apart; give one of them memory of its own (`.clone()`), or tie them by one name."
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
            result: the results of the step, with `Ref` leaves.
            results: those leaves.
            optimizer: of a training step.
            origin: of the capture.
            is_training: whether the step has a backward.
            gradients: of parameters, by dotted name.
            input_gradients: of inputs, by position.

        Raises:
            CaptureError: sources share memory with one that the step writes to.
        """
        self._check_apart()
        num_tensors = len(self.built.tensors)

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
            split=self.split,
        )
        taken: Counter[str] = Counter()
        for row in self.built.ops:  # a name that comes again gets a number
            taken[row.name] += 1
            row.name += f"#{taken[row.name] - 1}" if taken[row.name] > 1 else ""
        return self.built.graph(sorted({self.base(ref) for ref in results}), program)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of its storage that a tensor shows, and the one behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (1 + reach) * tensor.element_size() * bool(tensor.numel())


def renumbered(item: Any, function: Any) -> Any:
    """A `Call`, `Update` or `View` with every `Ref` replaced by `function` of it; outputs and bases stay."""
    if isinstance(item, Update):
        return Update(function(item.parameter), function(item.gradient))
    return replace(item, args=map_refs(function, item.args), kwargs=map_refs(function, item.kwargs))


CostFn = Callable[..., float]
"""Called as the op is, with fake tensors (shapes and dtypes, no values), and `output=` the results of the op."""


_COSTS: dict[Any, dict[str, CostFn]] = {}  # by overload packet or overload; an overload goes first


def register_cost(
    op: object,
    *,
    flops: CostFn | None = None,
    bytes_moved: CostFn | None = None,
    workspace_bytes: CostFn | None = None,
) -> None:
    """Registers the costs of an op for later captures; the last registration of an op counts.

    Each function is called with the arguments of the op (fake tensors), and with `output=`, the results of the op.
    Missing costs are estimated: one operation for each element, each input and output moved once, no workspace.

    Args:
        op: `"mylib::op"`, `"mylib::op.overload"`, `torch.ops.mylib.op`, or the result of `torch.library.custom_op`.
        flops: floating-point operations.
        bytes_moved: bytes read and written.
        workspace_bytes: scratch bytes held while the op runs.

    Raises:
        UnknownName: no such op is defined.
        InvalidValue: `op` has another type, or a cost is not a function.

    >>> register_cost("aten::trace", flops=lambda matrix, output: matrix.shape[0])
    >>> unregister_cost("aten::trace")
    """
    given = {"flops": flops, "bytes_moved": bytes_moved, "workspace_bytes": workspace_bytes}
    figures = {name: function for name, function in given.items() if function is not None}
    if wrong := next((name for name, function in figures.items() if not callable(function)), ""):
        raise InvalidValue(
            wrong, figures[wrong], "a function of the op's arguments and `output`", where="register_cost"
        )
    _COSTS[_resolve(op)] = figures


def unregister_cost(op: object) -> None:
    """Takes a registration back; without one, nothing happens.

    Raises:
        UnknownName: no such op is defined.
        InvalidValue: `op` is no op.
    """
    _COSTS.pop(_resolve(op), None)


def _registered(target: Any, args: Any, kwargs: Any, output: Any) -> dict[str, float]:
    """The figures of one call that the user registered for its overload, or else for its op, by name."""
    found, where, expected = {}, f"cost of {target}", "a function that returns a finite number >= 0"
    for name, function in _COSTS.get(target, _COSTS.get(getattr(target, "overloadpacket", None), {})).items():
        try:
            found[name] = value = function(*args, **kwargs, output=output)
        except Exception as error:
            raise InvalidValue(
                name,
                f"a function that raised {type(error).__name__}: {error}",
                expected,
                where=where,
                hint="It is called with the op's own arguments, as fake tensors, and with `output=` what it returns.",
            ) from error
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InvalidValue(name, value, expected, where=where)
    return found


def _resolve(op: object) -> Any:
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op
    if isinstance(op, CustomOpDef):
        return op._opoverload.overloadpacket
    if not isinstance(op, str) or "::" not in op:
        raise InvalidValue("op", op, "'namespace::name', an op of `torch.ops`, or a custom op", where="register_cost")
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    library = getattr(torch.ops, namespace)
    packet = getattr(library, name, None)
    if packet is None:
        raise UnknownName("op", op, {f"{namespace}::{other}" for other in dir(library) if not other.startswith("_")})
    if overload and overload not in packet.overloads():
        raise UnknownName("op", op, {f"{namespace}::{name}.{other}" for other in packet.overloads()})
    return getattr(packet, overload) if overload else packet


UPDATE_FLOPS_PER_ELEMENT = {"sgd": 2, "momentum": 4, "adam": 14, "adamw": 16}

_SCRATCH = {torch.ops.aten.logsumexp: lambda x, *_, output: tensor_bytes(x) + tensor_bytes(output)}
"""Scratch that PyTorch's own code for an op takes on every backend; scratch memory of libraries (cuBLAS, cuDNN, oneDNN,
sorting on a GPU) depends on device and version and is not counted."""


class Facts(NamedTuple):
    """The cost of one call, from shapes alone."""

    flops: float
    """Floating-point operations."""
    bytes_moved: float
    """Bytes read and written."""
    workspace_bytes: int
    """Scratch bytes held while it runs."""


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of a contiguous tensor of that shape and dtype."""
    return value.numel() * value.element_size()


def call_facts(target: Any, args: Any, kwargs: Any, output: Any) -> Facts:
    """The cost of one ATen call.

    A figure that the user registered (`register_cost`) goes first. Else FLOPs of matrix products, convolutions and
    attention are those of the formulas in `torch.utils.flop_counter` (PyTorch's own, and those of `graphs.attention`),
    of any other op one operation for each element of its larger side; bytes moved are each distinct input and output
    once.

    Args:
        target: the overload.
        args: arguments, with (fake) tensors in place.
        kwargs: keyword arguments, likewise.
        output: of the call.

    Raises:
        InvalidValue: a registered function failed.
    """
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
    packet, given = getattr(target, "overloadpacket", None), _registered(target, args, kwargs, output)
    flops = (
        flop_registry[packet](*args, **kwargs, out_val=output)
        if packet in flop_registry and "flops" not in given
        else max(sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
    )
    moved = sum(map(tensor_bytes, {id(t): t for t in inputs}.values())) + sum(map(tensor_bytes, outputs))
    workspace = _SCRATCH[packet](*args, **kwargs, output=output) if packet in _SCRATCH else 0
    return Facts(
        float(given.get("flops", flops)),
        float(given.get("bytes_moved", moved)),
        int(given.get("workspace_bytes", workspace)),
    )


def update_facts(spec: OptimizerSpec, parameter: torch.Tensor, gradient: torch.Tensor) -> Facts:
    """The cost of the update of one parameter.

    Its workspace is a copy of the gradient in the parameter's layout, where it has another: fused kernels need it.
    """
    size = tensor_bytes(parameter)
    return Facts(
        float(UPDATE_FLOPS_PER_ELEMENT[spec.name] * parameter.numel()),
        3.0 * size + 2.0 * state_bytes(spec, parameter),
        0 if gradient.stride() == parameter.stride() else size,
    )


def signature(target: str, args: Any, kwargs: Any) -> str:
    """Target, shapes, strides, dtypes and plain arguments: calls of one signature cost the same."""
    return f"{target}({', '.join(map(_describe, args))}{''.join(f', {k}={_describe(v)}' for k, v in kwargs.items())})"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f":{tuple(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{strides}"
    return f"[{', '.join(map(_describe, value))}]" if isinstance(value, (list, tuple)) else repr(value)
