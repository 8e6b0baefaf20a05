"""`split_trace`: the trace of a step with ops split into shards, each of them an op of its own.

A value is whole, split along an atom, or partial: a sum whose summands the shards have (the broadcast, split and
partial-value signatures of OneFlow: Yuan et al. 2021, arXiv:2110.15032). An op that reads a split value runs once for
each shard where its rule allows it; it sums over the split dimension, and its result is partial, or keeps it, and the
result is split. Partial values stay so through views, factors and sums of partial values. Where an op needs a value
whole, the shards are joined or summed once, by one op (its owner), and all that read it read this. Ops without a rule
run whole, and the report names them.

Parameters are cut, and so are their gradients: each shard's update stays with the shard. What later stages see is a
trace like any other, whose parameters have more names. Not there yet: sums in chunks of tokens (reduce-scatter and
all-gather), convolutions, and runners that cut a model's parameters themselves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.constants import memory, module_of
from rlplace.graphs.capturing.functional import is_view
from rlplace.graphs.capturing.lower import call_facts
from rlplace.graphs.capturing.portable import logsumexp_dtype
from rlplace.graphs.capturing.trace import Trace
from rlplace.graphs.program import Shard, SplitPlan, SplitReport
from rlplace.graphs.splitting import shard_ops
from rlplace.graphs.splitting.choice import SoftmaxLoss, choose, is_forward, softmax_losses
from rlplace.graphs.splitting.dimensions import PRODUCTS, Atom, Dimensions, Dims, Use, argument, leaves

aten = torch.ops.aten

Kind = Literal["whole", "split", "partial"]


@dataclass(eq=False)
class _Value:
    """One tensor of the old graph in the new one.

    Attributes:
        kind: what its nodes are.
        nodes: the tensor, or that of each shard.
        origin: the old node.
        atom: that it is split along.
        dims: its dimensions, of a split one.
        whole: the joined or summed tensor, once an op has needed it.
        slices: by layout, the slices of the whole.
    """

    kind: Kind
    nodes: tuple[Node, ...]
    origin: Node
    atom: Atom | None = None
    dims: Dims = ()
    whole: Node | None = None
    slices: dict[tuple[int, int, int, Atom], tuple[Node, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Several:
    """The outputs of an op that returns several.

    Attributes:
        nodes: the op, or that of each shard.
        kinds: of each output, its kind and dimensions.
        atom: that they are split along.
    """

    nodes: tuple[Node, ...]
    kinds: tuple[tuple[Kind, Dims], ...] = ()
    atom: Atom | None = None


@dataclass(frozen=True)
class _Layout:
    """Where an atom is in a tensor: in dimension `dim`, with so many indices outside of it and inside."""

    dim: int
    outer: int
    inner: int


def layout_of(dims: Dims, atom: Atom) -> _Layout | None:
    """Where `atom` is; None where it is nowhere, or in two places."""
    found = None
    for dim, atoms in enumerate(dims):
        own = leaves(atoms)
        if atom in own:
            if found is not None or own.count(atom) > 1:
                return None
            place = own.index(atom)
            outer, inner = (math.prod(leaf.size for leaf in part) for part in (own[:place], own[place + 1 :]))
            found = _Layout(dim, outer, inner)
    return found


def split_trace(trace: Trace, plan: SplitPlan) -> Trace:
    """The trace with shards, and a report of what was split.

    Args:
        trace: of a step whose ops are whole.
        plan: what to split, and into how many.

    Raises:
        CaptureError: a shard would have nothing in it, or there is nothing to split.
    """
    with torch.no_grad(), _use_lazy_graph_module(True):
        return _Rewriting(trace, plan).run()


_LINEAR_IN_FIRST = {
    aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
    aten.mean.dim, aten.clone.default, aten.index_select.default, aten.slice_backward.default,
    aten.select_backward.default,
}  # fmt: skip
"""Ops of a partial value and of whole ones whose results for the shards add up to that of the whole."""
_LINEAR_IN_ALL = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}
"""Ops that are linear in all that they read."""
_ADDING = {aten.sum.default, aten.sum.dim_IntList, aten.index_add.default}
"""Ops whose sums are smaller, or fewer, than what they read: a product for one of them is made by every shard."""
_UNBIASED = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)


def _may_be_linear(node: Node) -> bool:
    """Whether an op may be linear in what it reads, for which it depends on what else it reads."""
    target = node.target
    if target is aten.mul.Tensor:
        one, other = node.args[:2]
        is_scale = not isinstance(other, Node) or other.meta["val"].dim() == 0
        return one is not other and (is_scale or all(user.target in _ADDING for user in node.users))
    return _is_view(node) or target in _LINEAR_IN_FIRST or target in _LINEAR_IN_ALL or target is aten.index_add.default


def _is_linear(node: Node, partial: set[Node]) -> bool:
    """Whether an op is linear in the partial values that it reads together."""
    target, first = node.target, node.args[0]
    if not _may_be_linear(node):
        return False
    if target is aten.mul.Tensor:
        return len(partial) == 1
    if target is aten.index_add.default:
        return node.args[3] in partial and partial <= {first, node.args[3]}
    if target in _LINEAR_IN_ALL:
        given = first if isinstance(first, (list, tuple)) else node.args[:2]
        return partial == set(given)  # a number would be added once for each shard
    return partial == {first}


class _Rewriting:
    def __init__(self, trace: Trace, plan: SplitPlan) -> None:
        self._trace, self._plan, self._old, self._new = trace, plan, trace.module.graph, torch.fx.Graph()
        self._placeholders = self._old.find_nodes(op="placeholder")
        (output,) = self._old.find_nodes(op="output")
        self._outputs: Any = output.args[0]
        results, count = trace.num_results, len(trace.trainable)
        self._gradients = self._outputs[results : results + count]
        pairs = zip(self._placeholders, self._gradients, strict=False)
        self._dimensions = Dimensions(self._old, [pair for pair in pairs if pair[1] is not None])
        parameters = self._placeholders[: count + len(trace.fixed)]
        self._choice = choose(self._old, self._dimensions, parameters, self._outputs[:results], plan)
        self._bounds = {atom: plan.bounds(atom.size) for atom in self._choice.classes}
        self._values: dict[Node, _Value | _Several] = {}
        self._losses = {node: loss for loss in softmax_losses(self._old) for node in loss.nodes if node is not None}
        self._split_losses: dict[SoftmaxLoss, Node] = {}
        self._rows: dict[tuple[Node, int, int, int], Node] = {}
        self._gathered: list[Node] = []
        self._random: list[Node] = []
        values = (node.meta.get("val") for node in self._old.nodes)
        fakes = (value for value in values if isinstance(value, FakeTensor))
        self._mode: FakeTensorMode = next(fakes).fake_mode

    def run(self) -> Trace:
        before, self._mode.allow_non_fake_inputs = self._mode.allow_non_fake_inputs, True
        try:
            shards, values = self._add_placeholders()
            with self._mode:
                for node in self._old.nodes:
                    if node.op == "get_attr":
                        self._check_recomputed(node)
                        self._values[node] = _Value("whole", (self._new.node_copy(node),), node)
                    elif node.op == "call_function":
                        self._add(node)
                self._new.output(self._new_outputs())
        finally:
            self._mode.allow_non_fake_inputs = before
        by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            by_name.setdefault(shard.name, []).append(shard)

        def named(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(
                key for name in names for key in ([each.key for each in by_name[name]] if name in by_name else [name])
            )

        return replace(
            self._trace,
            module=_make_graph_module(self._trace.module, self._new),
            trainable=named(self._trace.trainable),
            fixed=named(self._trace.fixed),
            values=tuple(values),
            shards={shard.key: shard for shard in shards},
            split=self._report(),
        )

    def _add_placeholders(self) -> tuple[list[Shard], list[torch.Tensor]]:
        trace = self._trace
        names = (*trace.trainable, *trace.fixed)
        shards, values = list[Shard](), list[torch.Tensor]()
        for position, (node, value) in enumerate(zip(self._placeholders, trace.values, strict=True)):
            atom = self._choice.parameters.get(node)
            if atom is None:
                self._values[node] = _Value("whole", (self._new.node_copy(node),), node)
                values.append(value)
                continue
            dims = self._dimensions.of[node]
            layout, nodes = layout_of(dims, atom), []
            assert layout is not None
            for index in range(self._plan.num_shards):
                shard = Shard(names[position], index, layout.dim, self._intervals(layout, atom, index))
                made = self._new.placeholder(f"{node.name}_shard_{index}")
                made.meta = {**node.meta, "val": shard.of(node.meta["val"]), "shard": index}
                nodes.append(made)
                shards.append(shard)
                values.append(shard.of(value.detach()))
            self._values[node] = _Value("split", tuple(nodes), node, atom, dims)
        return shards, values

    def _new_outputs(self) -> list[Node | None]:
        """The results, the gradients of parameters, by shards where they are split, and the rest, all whole."""
        outputs: list[Node | None] = []
        count = len(self._trace.trainable)
        for position, node in enumerate(self._outputs):
            place = position - self._trace.num_results
            parameter = self._placeholders[place] if 0 <= place < count else None
            atom = None if parameter is None else self._choice.parameters.get(parameter)
            if node is None:
                outputs += [None] * (1 if atom is None else self._plan.num_shards)
            elif parameter is not None and atom is not None:
                outputs += self._local(self._value(node), self._dimensions.of[parameter], atom, node)
            else:
                outputs.append(self._whole(self._value(node), node))
        return outputs

    def _report(self) -> SplitReport:
        flops = {}
        for node in self._old.nodes:
            target = node.target
            if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and not is_view(target):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
                flops[node] = call_facts(target, args, kwargs, node.meta.get("val")).flops
        total = sum(flops.values()) or 1.0
        names = (*self._trace.trainable, *self._trace.fixed)
        named = dict(zip(self._placeholders, names, strict=False))
        return SplitReport(
            {named[one]: self._choice.classes[atom] for one, atom in self._choice.parameters.items()},
            tuple(
                (node.name, str(node.target), module_of(node), flops.get(node, 0.0) / total) for node in self._gathered
            ),
            tuple((node.name, str(node.target), module_of(node)) for node in self._random),
        )

    # Values as shards and whole

    def _value(self, node: Node) -> _Value:
        value = self._values[node]
        assert isinstance(value, _Value)
        return value

    def _intervals(self, layout: _Layout, atom: Atom, index: int) -> tuple[tuple[int, int], ...]:
        """The runs of indices of a dimension that belong to a shard."""
        start, end = self._bounds[atom][index : index + 2]
        runs = (
            ((outer * atom.size + start) * layout.inner, (outer * atom.size + end) * layout.inner)
            for outer in range(layout.outer)
        )
        return tuple(runs)

    def _call(
        self, like: Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, shard: int = -1
    ) -> Node:
        """A new call; it comes from where the old node `like` comes from."""
        args, kwargs = tuple(args), kwargs or {}
        given = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        try:
            value = target(*given[0], **given[1])
        except RuntimeError:
            if target is not aten.view.default and target is not aten._unsafe_view.default:
                raise
            copy = self._call(
                like, aten.clone.default, args[:1], {"memory_format": torch.contiguous_format}, shard=shard
            )
            return self._call(like, target, (copy, *args[1:]), kwargs, shard=shard)
        node = self._new.create_node("call_function", target, args, kwargs, f"{like.name}")
        node.meta = {**like.meta, "val": value, "shard": shard}
        return node

    def _whole(self, value: _Value, reader: Node) -> Node:
        """The whole tensor, joined or summed where the first op needs it."""
        if value.kind == "whole":
            return value.nodes[0]
        if value.whole is None:
            like = value.origin
            if value.kind == "partial":
                value.whole = self._call(like, shard_ops.sum_parts, (list(value.nodes),))
            else:
                assert value.atom is not None
                layout = layout_of(value.dims, value.atom)
                assert layout is not None
                value.whole = self._call(like, aten.cat.default, (self._pieces(value, layout), layout.dim))
            if not is_forward(reader):
                value.whole.meta["custom"] = {"phase": "backward"}
        return value.whole

    def _pieces(self, value: _Value, layout: _Layout) -> list[Node]:
        """The runs of the shards of a split value, in the order of their indices."""
        if layout.outer == 1:
            return list(value.nodes)
        assert value.atom is not None
        pieces = []
        for outer in range(layout.outer):
            for index, node in enumerate(value.nodes):
                start, end = self._bounds[value.atom][index : index + 2]
                size = (end - start) * layout.inner
                where = (node, layout.dim, outer * size, (outer + 1) * size)
                pieces.append(self._call(value.origin, aten.slice.Tensor, where, shard=index))
        return pieces

    def _local(self, value: _Value, dims: Dims, atom: Atom, reader: Node) -> tuple[Node, ...]:
        """The tensors of the shards of an op for which `value` has dimensions `dims`, and is split along `atom`."""
        layout = layout_of(dims, atom)
        if value.atom is atom and layout is not None and layout_of(value.dims, atom) == layout:
            return value.nodes
        whole = self._whole(value, reader)
        if layout is None:
            return (whole,) * self._plan.num_shards
        key = layout.dim, layout.outer, layout.inner, atom
        if key not in value.slices:
            value.slices[key] = tuple(
                self._slice(whole, layout.dim, self._intervals(layout, atom, index), value.origin, reader)
                for index in range(self._plan.num_shards)
            )
        return value.slices[key]

    def _slice(self, whole: Node, dim: int, intervals: Sequence[tuple[int, int]], like: Node, reader: Node) -> Node:
        """A copy of a part: a view would be sent with all of its base."""
        if len(intervals) == 1:
            made = self._call(like, aten.slice_copy.Tensor, (whole, dim, *intervals[0]))
        else:
            views = [self._call(like, aten.slice.Tensor, (whole, dim, *each)) for each in intervals]
            made = self._call(like, aten.cat.default, (views, dim))
        made.meta["custom"] = {"phase": "forward" if is_forward(reader) else "backward"}
        return made

    # Ops

    def _add(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(self._values.get(argument(node, 0)), _Several):
            self._add_item(node)
            return
        if node in self._losses and self._add_loss(node, self._losses[node]):
            return
        read = [self._values[one] for one in node.all_input_nodes]
        given = [value for value in read if isinstance(value, _Value)]
        use = self._dimensions.uses.get(node)
        if use is not None and len(given) == len(read):
            for atom in self._candidates(node, use, given):
                if self._add_split(node, use, atom):
                    return
        if any(value.kind == "partial" for value in given) and self._add_partial(node):
            return
        if any(value.kind == "split" for value in given):
            self._gathered.append(node)
        self._add_whole(node)

    def _candidates(self, node: Node, use: Use, given: Sequence[_Value]) -> list[Atom]:
        """Atoms along which an op may be split: those of what it reads, and of the result of an op that is worth it."""
        found = [value.atom for value in given if value.atom is not None]
        if node.target in PRODUCTS or node.target is aten.embedding_dense_backward.default:
            outs = (leaf for out in use.outs if out is not None for dim in out for leaf in leaves(dim))
            found += [leaf for leaf in outs if leaf in self._choice.classes]
        return list(dict.fromkeys(found))

    def _add_whole(self, node: Node) -> None:
        def of(one: Node) -> Node:
            value = self._values[one]
            return value.nodes[0] if isinstance(value, _Several) else self._whole(value, node)

        made = self._new.node_copy(node, {one: of(one) for one in node.all_input_nodes}.__getitem__)
        is_several = isinstance(node.meta.get("val"), (list, tuple))
        self._values[node] = _Several((made,)) if is_several else _Value("whole", (made,), node)

    def _add_item(self, node: Node) -> None:
        source, index = argument(node, 0), argument(node, 1)
        several = self._values[source]
        assert isinstance(several, _Several)
        shards = range(len(several.nodes)) if several.kinds else (-1,)
        nodes = tuple(
            self._call(node, operator.getitem, (one, index), shard=shard)
            for one, shard in zip(several.nodes, shards, strict=True)
        )
        kind, dims = several.kinds[index] if several.kinds else ("whole", ())
        self._values[node] = _Value(kind, nodes, node, several.atom if kind == "split" else None, dims)

    def _add_split(self, node: Node, use: Use, atom: Atom) -> bool:
        """Adds an op once for each shard; returns whether its rule allows that."""

        def has(dim: Sequence[Atom]) -> bool:
            return atom in leaves(dim)

        if any(map(has, use.whole)):
            return False
        for group in use.same:
            if any(map(has, group)) and any(leaves(one) != leaves(group[0]) for one in group):
                return False
        for dims in (*(dims for _, dims in use.ins), *(out for out in use.outs if out is not None)):
            if any(map(has, dims)) and layout_of(dims, atom) is None:
                return False
        is_summed = any(map(has, use.summed))
        if is_summed and node.target in _UNBIASED and node.kwargs:  # factors of the bias and of the product
            return False
        kinds: list[tuple[Kind, Dims]] = []
        for out in use.outs:
            is_split = out is not None and any(map(has, out))
            if not is_split and not is_summed and out is not None:
                return self._add_rows(node, atom)
            kinds.append(("split", out or ()) if is_split else ("partial", ()))
        if node.target is aten.embedding_dense_backward.default and has(kinds[0][1][0]):
            return self._add_rows_backward(node, atom)
        shards = range(self._plan.num_shards)
        local: dict[Node, tuple[Node, ...]] = {}
        for one, dims in use.ins:
            local[one] = self._local(self._value(one), dims, atom, node)
        made = tuple(self._add_shard(node, use, atom, local, index, is_summed=is_summed) for index in shards)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            self._random.append(node)
        self._set(node, made, kinds, atom)
        return True

    def _set(self, node: Node, made: tuple[Node, ...], kinds: Sequence[tuple[Kind, Dims]], atom: Atom) -> None:
        if isinstance(node.meta.get("val"), (list, tuple)):
            self._values[node] = _Several(made, tuple(kinds), atom)
            return
        kind, dims = kinds[0]
        value = _Value(kind, made, node, atom if kind == "split" else None, dims)
        declared = self._dimensions.of[node]
        if kind == "split" and not any(atom in leaves(dim) for dim in declared):  # columns of a table
            value = _Value("whole", (self._whole(value, node),), node)
        self._values[node] = value

    def _add_shard(
        self, node: Node, use: Use, atom: Atom, local: dict[Node, tuple[Node, ...]], index: int, *, is_summed: bool
    ) -> Node:
        args: Any
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: local[one][index])
        target: Any = node.target
        out = use.outs[0]
        if use.sizes is not None or use.piece is not None:
            assert out is not None
            value = node.meta["val"]
            shape = self._local_shape((value[0] if isinstance(value, (list, tuple)) else value).shape, out, atom, index)
            args = list(args)
            if use.sizes is not None:
                args[use.sizes] = shape
            else:
                position, dim = use.piece  # type: ignore[misc]
                size = shape[dim]
                args[position] = size if isinstance(args[position], int) else [size] * len(args[position])
        if is_summed and index and target in _UNBIASED:  # the bias is in the first shard
            target, args = _UNBIASED[target], args[1:]
        return self._call(node, target, args, kwargs, shard=index)

    def _check_recomputed(self, node: Node) -> None:
        """Refuses a recomputed forward that reads the module's own parameter, not the shards of it."""
        value = operator.attrgetter(str(node.target))(self._trace.module)
        if not isinstance(value, torch.Tensor):
            return
        places = {one: k for k, one in enumerate(self._placeholders)}
        for one in self._choice.parameters:
            if memory(value) == memory(self._trace.values[places[one]]):
                raise CaptureError(
                    f"a recomputed forward (`torch.utils.checkpoint`) reads {one.name!r}, which is split. Leave "
                    "`split` or the recomputation out."
                )

    def _local_shape(self, shape: Sequence[int], dims: Dims, atom: Atom, index: int) -> list[int]:
        layout = layout_of(dims, atom)
        local = list(shape)
        if layout is not None:
            start, end = self._bounds[atom][index : index + 2]
            local[layout.dim] = layout.outer * (end - start) * layout.inner
        return local

    def _add_partial(self, node: Node) -> bool:
        """Adds an op that is linear in the partial values that it reads once for each shard; returns whether it is."""
        target: Any = node.target
        values = {one: self._values[one] for one in node.all_input_nodes}
        if isinstance(node.meta.get("val"), (list, tuple)) or not all(isinstance(v, _Value) for v in values.values()):
            return False
        partial = {one for one in values if self._value(one).kind == "partial"}
        if not _is_linear(node, partial):
            return False
        # an op that moves bytes pays only where no other op needs the sum of what it reads
        if not _is_view(node) and any(
            self._value(one).whole is not None or not all(map(_may_be_linear, one.users)) for one in partial
        ):
            return False
        wholes = {one: self._whole(self._value(one), node) for one in values if one not in partial}
        made = []
        for index in range(self._plan.num_shards):
            local = {one: wholes[one] if one in wholes else self._value(one).nodes[index] for one in values}
            args: Any
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), local.__getitem__)
            if target is aten.index_add.default and index and node.args[0] in wholes:
                base: torch.Tensor = args[0].meta["val"]
                options = {"dtype": base.dtype, "device": base.device}
                zeros = self._call(node, aten.zeros.default, (list(base.shape),), options, shard=index)
                args = (zeros, *args[1:])
            made.append(self._call(node, target, args, kwargs, shard=index))
        self._values[node] = _Value("partial", tuple(made), node)
        return True

    # Tables by rows, and the loss

    def _shard_rows(self, node: Node, indices: Node, atom: Atom, padding: int, index: int) -> Node:
        start, end = self._bounds[atom][index : index + 2]
        key = indices, start, end, padding
        if key not in self._rows:
            self._rows[key] = self._call(node, shard_ops.shard_rows, (indices, start, end, padding), shard=index)
        return self._rows[key]

    def _add_rows(self, node: Node, atom: Atom) -> bool:
        """A lookup in a table that is split by rows; other ops are refused."""
        if node.target is not aten.embedding.default:
            return False
        table, indices = self._value(argument(node, 0)), self._value(argument(node, 1))
        layout = layout_of(self._dimensions.of[argument(node, 0)], atom)
        if layout != _Layout(0, 1, 1) or table.atom is not atom:
            return False
        whole = self._whole(indices, node)
        made = []
        for index, shard in enumerate(table.nodes):
            rows = self._shard_rows(node, whole, atom, -1, index)
            made.append(self._call(node, shard_ops.lookup_rows, (shard, rows), shard=index))
        self._values[node] = _Value("partial", tuple(made), node)
        return True

    def _add_rows_backward(self, node: Node, atom: Atom) -> bool:
        grad, indices = self._value(argument(node, 0)), self._value(argument(node, 1))
        out = self._dimensions.of[node]
        padding, is_scaled = argument(node, 3, -1), argument(node, 4, False)
        if is_scaled or layout_of(out, atom) != _Layout(0, 1, 1):
            return False
        whole, positions = self._whole(grad, node), self._whole(indices, node)
        made = []
        for index, (start, end) in enumerate(pairwise(self._bounds[atom])):
            rows = self._shard_rows(node, positions, atom, int(padding), index)
            made.append(self._call(node, node.target, (whole, rows, end - start, -1, False), shard=index))
        self._values[node] = _Value("split", tuple(made), node, atom, out)
        return True

    def _add_loss(self, node: Node, loss: SoftmaxLoss) -> bool:
        """Adds a softmax loss whose classes are split: the logarithm of sums of exponentials, shard by shard."""
        logits = self._value(loss.logits)
        dtype = loss.softmax.meta["val"].dtype
        layout = layout_of(logits.dims, logits.atom) if logits.atom is not None else None
        if layout != _Layout(1, 1, 1) or dtype != logsumexp_dtype(logits.nodes[0].meta["val"].dtype):
            return False
        assert logits.atom is not None
        if node in (loss.softmax, *loss.aliases, loss.backward):
            return True
        target: Any = loss.loss.args[1]
        reduction, ignored = loss.loss.args[3:5]
        labels, bounds = self._whole(self._value(target), node), self._bounds[logits.atom]
        if node is loss.loss:
            parts = [
                self._call(node, shard_ops.vocabulary_statistics, (one, labels, start), shard=index)
                for index, (one, start) in enumerate(zip(logits.nodes, bounds, strict=False))
            ]
            own = [
                [self._call(node, operator.getitem, (one, k), shard=index) for index, one in enumerate(parts)]
                for k in range(2)
            ]
            made = self._call(node, shard_ops.vocabulary_loss, (*own, labels, reduction, ignored))
            self._split_losses[loss], self._values[node] = made, _Several((made,))
            return True
        assert loss.backward is not None
        seed, weight = (self._whole(self._value(argument(loss.backward, k)), node) for k in (0, 6))
        logsumexp = self._call(loss.loss, operator.getitem, (self._split_losses[loss], 2))
        gradients = tuple(
            self._call(
                node,
                shard_ops.vocabulary_gradient,
                (seed, one, logsumexp, labels, weight, start, reduction, ignored),
                shard=index,
            )
            for index, (one, start) in enumerate(zip(logits.nodes, bounds, strict=False))
        )
        self._values[node] = _Value("split", gradients, node, logits.atom, logits.dims)
        return True
