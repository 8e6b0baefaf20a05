"""`split_trace`: the trace of a step with ops split into shards, each of them an op of its own.

A value is whole, split along an atom, or partial: a sum whose summands the shards have (the broadcast, split and
partial-value signatures of OneFlow: Yuan et al. 2021, arXiv:2110.15032). An op that reads a split value runs once for
each shard where its rule allows it; it sums over the split dimension, and its result is partial, or keeps it, and the
result is split. Partial values stay so through views, factors and sums of partial values. Where an op needs a value
whole, the shards are joined or summed once, by one op (its owner), and all that read it read this. Ops without a rule
run whole, and the report names them.

With `SplitPlan.reduce = "chunks"`, a partial value that has tokens becomes one that is split along them: each shard
sums one chunk (reduce-scatter). Ops by tokens run by chunks, and where a shard needs the whole it joins the chunks
itself (all-gather), as in sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198).

Parameters are cut, and so are their gradients: each shard's update stays with the shard. Ops read parameters of class
`updates` whole, joined once, and only their gradients are cut. What later stages see is a trace like any other, whose
parameters have more names.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.constants import draw_of, memory, module_of
from rlplace.graphs.capturing.functional import is_view
from rlplace.graphs.capturing.lower import call_facts
from rlplace.graphs.capturing.portable import logsumexp_dtype
from rlplace.graphs.capturing.trace import Trace
from rlplace.graphs.program import Shard, SplitPlan, SplitReport
from rlplace.graphs.splitting import shard_ops
from rlplace.graphs.splitting.choice import SoftmaxLoss, choose, softmax_losses
from rlplace.graphs.splitting.dimensions import PRODUCTS, Atom, Dimensions, Dims, Use, argument, leaves, shows
from rlplace.graphs.splitting.sharded_values import Kind, Layout, Several, ShardedValues, Value, is_view_op, layout_of

aten = torch.ops.aten


def split_trace(trace: Trace, plan: SplitPlan) -> Trace:
    """The trace with shards, and a report of what was split.

    Args:
        trace: of a step whose ops are whole.
        plan: what to split, and into how many.

    Raises:
        CaptureError: a shard would have nothing in it, there is nothing to split, or a rule is wrong for an op.
    """
    at = list[Node]()
    with torch.no_grad(), _use_lazy_graph_module(True):
        try:
            return _Rewriting(trace, plan, at).run()
        except _WRONG as error:
            where = f"op {at[-1].target} in module {module_of(at[-1]) or 'the root'}" if at else "the step"
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise CaptureError(f"cannot split {where} ({why}). Leave out its class, or `split`.") from error


_LINEAR_IN_FIRST = {
    aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
    aten.mean.dim, aten.clone.default, aten.index_select.default, aten.slice_backward.default,
    aten.select_backward.default, aten.new_zeros.default, aten.zeros_like.default,
}  # fmt: skip
"""Ops of a partial value and of whole ones whose results for the shards add up to that of the whole."""
_LINEAR_IN_ALL = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}
"""Ops that are linear in all that they read."""
_ADDING = {aten.sum.default, aten.sum.dim_IntList, aten.index_add.default}
"""Ops whose sums are smaller, or fewer, than what they read: a product for one of them is made by every shard."""
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_UNBIASED = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What rules raise that are wrong for an op."""


def _is_by_elements(node: Node) -> bool:
    return is_view_op(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _may_be_linear(node: Node) -> bool:
    """Whether an op may be linear in what it reads, for which it depends on what else it reads."""
    target = node.target
    if target is aten.mul.Tensor:
        one, other = node.args[:2]
        is_scale = not isinstance(other, Node) or other.meta["val"].dim() == 0
        return one is not other and (is_scale or all(user.target in _ADDING for user in node.users))
    is_moved = is_view_op(node) and target is not aten.view.dtype  # which casts bits
    return is_moved or target in _LINEAR_IN_FIRST or target in _LINEAR_IN_ALL or target is aten.index_add.default


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


def _summed(gradient: Node | None) -> Iterator[Node]:
    """The sums that a gradient is, and the lookups in them: shards that each have some rows make these by rows."""
    seen = [] if gradient is None else [gradient]
    for node in seen:
        if len(node.users) > 1:
            continue
        if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
            yield node
            seen += node.all_input_nodes
        elif node.target is aten.embedding_dense_backward.default:
            yield node


class _Rewriting(ShardedValues):
    def __init__(self, trace: Trace, plan: SplitPlan, at: list[Node]) -> None:
        self._at = at  # the ops that were looked at
        self._trace, self._old = trace, trace.module.graph
        self._placeholders = self._old.find_nodes(op="placeholder")
        (output,) = self._old.find_nodes(op="output")
        self._outputs: Any = output.args[0]
        results, count = trace.num_results, len(trace.trainable)
        self._gradients = self._outputs[results : results + count]
        pairs = zip(self._placeholders, self._gradients, strict=False)
        dimensions = Dimensions(self._old, [pair for pair in pairs if pair[1] is not None])
        parameters = self._placeholders[: count + len(trace.fixed)]
        is_training = bool(trace.trainable)
        returned = [] if is_training else self._outputs[:results]
        choice = choose(self._old, dimensions, parameters, returned, plan, count)
        super().__init__(plan, dimensions, choice, is_training=is_training)
        self._updates = {
            node: atom
            for parameter, gradient in zip(self._placeholders, self._gradients, strict=False)
            if (atom := choice.parameters.get(parameter)) is not None and atom not in choice.classes
            for node in _summed(gradient)
        }
        self._losses = {node: loss for loss in softmax_losses(self._old) for node in loss.nodes if node is not None}
        self._split_losses: dict[SoftmaxLoss, Node] = {}
        self._rows: dict[tuple[Node, int, int, int], Node] = {}
        self._gathered: list[Node] = []
        self._random: list[Node] = []
        self._draws = Counter(map(draw_of, self._old.nodes))
        values = (node.meta.get("val") for node in self._old.nodes)
        fakes = (value for value in values if isinstance(value, FakeTensor))
        self._mode: FakeTensorMode = next(fakes).fake_mode

    def run(self) -> Trace:
        before, self._mode.allow_non_fake_inputs = self._mode.allow_non_fake_inputs, True
        try:
            shards, values = self._add_placeholders()
            with self._mode:
                for node in self._old.nodes:
                    self._at.append(node)
                    if node.op == "get_attr":
                        self._check_own(node)
                        self._values[node] = Value("whole", (self._new.node_copy(node),), node)
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
                self._values[node] = Value("whole", (self._new.node_copy(node),), node)
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
            self._values[node] = Value("split", tuple(nodes), node, atom, dims)
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
        split = self._choice.parameters.items()
        together = {atom: tuple(named[one] for one, own in split if own is atom) for _, atom in split}
        return SplitReport(
            {named[one]: self._choice.classes.get(atom, "updates") for one, atom in split},
            tuple(
                (node.name, str(node.target), module_of(node), flops.get(node, 0.0) / total) for node in self._gathered
            ),
            tuple((node.name, str(node.target), module_of(node)) for node in self._random),
            tuple(together.values()),
        )

    # Ops

    def _add(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(self._values.get(argument(node, 0)), Several):
            self._add_item(node)
            return
        if node in self._losses and self._add_loss(node, self._losses[node]):
            return
        read = [self._values[one] for one in node.all_input_nodes]
        given = [value for value in read if isinstance(value, Value)]
        use = self._dimensions.uses.get(node)
        atoms = self._candidates(node, use, given) if use is not None and len(given) == len(read) else []
        if use is not None and any(self._add_split(node, use, atom) for atom in atoms):
            return
        partial = [value for value in given if value.kind == "partial"]
        if partial and self._add_partial(node):
            return
        if use is not None and len(given) == len(read):
            tokens = dict.fromkeys(atom for value in partial for atom in self._token_atoms(value.origin))
            if any(self._moves_less(use, atom) and self._add_split(node, use, atom) for atom in tokens):
                return
        if self._add_copies(node):
            return
        if any(value.atom in self._choice.classes for value in given):
            self._gathered.append(node)
        self._add_whole(node)

    def _candidates(self, node: Node, use: Use, given: Sequence[Value]) -> list[Atom]:
        """Atoms along which an op may be split: those of what it reads, and of the result of an op that is worth it.

        Chunks of tokens come last: a product with a parameter that is split joins them.
        """
        if node in self._updates:
            return [self._updates[node]]
        found = [value.atom for value in given if value.atom is not None]
        if node.target in PRODUCTS or node.target is aten.embedding_dense_backward.default:
            outs = (leaf for out in use.outs if out is not None for dim in out for leaf in leaves(dim))
            found += [leaf for leaf in outs if leaf in self._choice.classes]
        tokens = [atom for atom in found if atom in self._choice.tokens and self._moves_less(use, atom)]
        return list(dict.fromkeys([atom for atom in found if atom in self._choice.classes] + tokens))

    def _moves_less(self, use: Use, atom: Atom) -> bool:
        """Whether all copies of what an op by chunks needs or makes whole have fewer indices than what is cut."""
        sizes = {True: 0, False: 0}
        for dims in (*(dims for _, dims in use.ins), *(out for out in use.outs if out is not None)):
            own = [leaf for dim in dims for leaf in leaves(dim)]
            sizes[atom in own] += math.prod(leaf.size for leaf in own)
        return sizes[True] > self._plan.num_shards * sizes[False]

    def _add_copies(self, node: Node) -> bool:
        """Adds an op that picks tokens for products of the shards, or is between both, once for each shard.

        Shards that join chunks have what experts pick from.
        """
        values = [self._values[one] for one in node.all_input_nodes]
        has_copies = any(isinstance(value, Value) and value.copies is not None for value in values)
        is_between = has_copies and _is_by_elements(node) and not any(v.atom for v in values if isinstance(v, Value))
        is_pick = node.target is aten.index_select.default and self._plan.reduce == "chunks"
        if not (is_between or is_pick) or not self._feeds_shards(node):
            return False
        wholes = {one: self._wholes(self._value(one), node) for one in node.all_input_nodes}
        copies = list[Node]()
        for index in range(self._plan.num_shards):
            local = {one: own[index] for one, own in wholes.items()}
            args: Any
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), local.__getitem__)
            copies.append(self._call(node, node.target, args, kwargs, shard=index))
        self._values[node] = Value("whole", (copies[0],), node, copies=tuple(copies))
        return True

    def _feeds_shards(self, node: Node) -> bool:
        """Whether a product with a split parameter reads what an op makes, or what ops by elements make of it."""
        seen = [node]
        for one in seen:
            for user in one.users:
                if user.target in PRODUCTS:
                    shown = (self._choice.parameters.get(shows(each)) for each in user.all_input_nodes)
                    if any(atom in self._choice.classes for atom in shown):
                        return True
                elif _is_by_elements(user) and user not in seen:
                    seen.append(user)
        return False

    def _add_whole(self, node: Node) -> None:
        def of(one: Node) -> Node:
            value = self._values[one]
            return value.nodes[0] if isinstance(value, Several) else self._whole(value, node)

        made = self._new.node_copy(node, {one: of(one) for one in node.all_input_nodes}.__getitem__)
        is_several = isinstance(node.meta.get("val"), (list, tuple))
        self._values[node] = Several((made,)) if is_several else self._looked_up(Value("whole", (made,), node))

    def _looked_up(self, value: Value) -> Value:
        """What a lookup has found, in chunks of tokens if there are some: the first norms run by chunks as the last."""
        node = value.origin
        dims = self._dimensions.of[node] if node.target is aten.embedding.default else ()
        for atom in self._token_atoms(node) if dims else ():
            layout = layout_of(dims, atom)
            assert layout is not None
            return Value("split", self._cut(value.nodes[0], layout, atom, node, node), node, atom, dims)
        return value

    def _add_item(self, node: Node) -> None:
        source, index = argument(node, 0), argument(node, 1)
        several = self._values[source]
        assert isinstance(several, Several)
        shards = range(len(several.nodes)) if several.kinds else (-1,)
        nodes = tuple(
            self._call(node, operator.getitem, (one, index), shard=shard)
            for one, shard in zip(several.nodes, shards, strict=True)
        )
        kind, dims = several.kinds[index] if several.kinds else ("whole", ())
        self._values[node] = Value(kind, nodes, node, several.atom if kind == "split" else None, dims)

    def _add_split(self, node: Node, use: Use, atom: Atom) -> bool:
        """Adds an op once for each shard; returns whether its rule allows that."""

        def has(dim: Sequence[Atom]) -> bool:
            return atom in leaves(dim)

        draw = draw_of(node)
        if draw is not None and (draw.fixed is not None or self._draws[draw] > 1):
            return False  # made again in this step or another, it may be split in another way there
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
        if is_summed and node.target is aten.embedding_dense_backward.default and argument(node, 4, False):
            return False  # it scales by how often a row is looked up in all tokens
        kinds: list[tuple[Kind, Dims]] = []
        for out in use.outs:
            is_split = out is not None and any(map(has, out))
            if not is_split and not is_summed and out is not None:
                return self._add_rows(node, atom)
            kinds.append(("split", out or ()) if is_split else ("partial", ()))
        if node.target is aten.embedding_dense_backward.default and not is_summed and has(kinds[0][1][0]):
            return self._add_rows_backward(node, atom)
        shards = range(self._plan.num_shards)
        local: dict[Node, tuple[Node, ...]] = {}
        for one, dims in use.ins:
            local[one] = self._local(self._value(one), dims, atom, node)
        made = tuple(self._add_shard(node, use, atom, local, index, is_summed=is_summed) for index in shards)
        if draw is not None:
            self._random.append(node)
            for index, one in enumerate(made):
                one.meta["custom"] = {**one.meta["custom"], "draw": replace(draw, shard=index)}
        self._set(node, made, kinds, atom)
        return True

    def _set(self, node: Node, made: tuple[Node, ...], kinds: Sequence[tuple[Kind, Dims]], atom: Atom) -> None:
        if isinstance(node.meta.get("val"), (list, tuple)):
            self._values[node] = Several(made, tuple(kinds), atom)
            return
        kind, dims = kinds[0]
        value = Value(kind, made, node, atom if kind == "split" else None, dims)
        declared = self._dimensions.of[node]
        if kind == "split" and not any(atom in leaves(dim) for dim in declared):  # columns of a table
            value = self._looked_up(Value("whole", (self._whole(value, node),), node))
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
        if target in _SQUEEZES:  # a dimension may have one index here, and more in all
            shape = argument(node, 0).meta["val"].shape
            named = argument(node, 1, range(len(shape)))
            dims = [int(dim) for dim in (named if isinstance(named, Sequence) else [named]) if shape[int(dim)] == 1]
            target, args = aten.squeeze.dims, (args[0], dims)
        if is_summed and index and target in _UNBIASED:  # the bias is in the first shard
            target, args = _UNBIASED[target], args[1:]
        return self._call(node, target, args, kwargs, shard=index)

    def _check_own(self, node: Node) -> None:
        """Refuses a read of a module's own parameter, not of the shards of it."""
        value = operator.attrgetter(str(node.target))(self._trace.module)
        if not isinstance(value, torch.Tensor):
            return
        places = {one: k for k, one in enumerate(self._placeholders)}
        for one in self._choice.parameters:
            if memory(value) == memory(self._trace.values[places[one]]):
                raise CaptureError(
                    f"{one.name!r}, which is split, is read elsewhere than as an attribute of its module. "
                    "Leave `split` out, or return it with the output."
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
        if isinstance(node.meta.get("val"), (list, tuple)) or not all(isinstance(v, Value) for v in values.values()):
            return False
        partial = {one for one in values if self._value(one).kind == "partial"}
        if not _is_linear(node, partial):
            return False
        # an op that moves bytes pays only where no other op needs the sum of what it reads
        if not is_view_op(node) and any(
            self._value(one).whole is not None or not all(map(_may_be_linear, one.users)) for one in partial
        ):
            return False
        is_zero = target is aten.index_add.default and argument(node, 0).target in _ZEROS
        wholes = {
            one: self._wholes(self._value(one), node)
            for one in values
            if one not in partial and not (is_zero and one is node.args[0])
        }
        made = []
        for index in range(self._plan.num_shards):
            local = {one: self._value(one).nodes[index if one in partial else 0] for one in values}
            local |= {one: copies[index] for one, copies in wholes.items()}
            args: Any
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), local.__getitem__)
            if target is aten.index_add.default and (is_zero or (index and node.args[0] in wholes)):
                base: torch.Tensor = argument(node, 0).meta["val"]
                options = {"dtype": base.dtype, "device": base.device}
                zeros = self._call(node, aten.zeros.default, (list(base.shape),), options, shard=index)
                args = (zeros, *args[1:])
            made.append(self._call(node, target, args, kwargs, shard=index))
        self._values[node] = Value("partial", tuple(made), node)
        return True

    # Tables by rows, and the loss

    def _shard_rows(self, node: Node, indices: Node, atom: Atom, padding: int, index: int) -> Node:
        start, end = self._bounds[atom][index : index + 2]
        key = indices, start, end, padding
        if key not in self._rows:
            self._rows[key] = self._call(node, shard_ops.shard_rows, (*key, atom.size), shard=index)
        return self._rows[key]

    def _add_rows(self, node: Node, atom: Atom) -> bool:
        """A lookup in a table that is split by rows; other ops are refused."""
        if node.target is not aten.embedding.default:
            return False
        table, indices = self._value(argument(node, 0)), self._value(argument(node, 1))
        layout = layout_of(self._dimensions.of[argument(node, 0)], atom)
        if layout != Layout(0, 1, 1) or table.atom is not atom:
            return False
        whole = self._whole(indices, node)
        made = []
        for index, shard in enumerate(table.nodes):
            rows = self._shard_rows(node, whole, atom, -1, index)
            made.append(self._call(node, shard_ops.lookup_rows, (shard, rows), shard=index))
        self._values[node] = Value("partial", tuple(made), node)
        return True

    def _add_rows_backward(self, node: Node, atom: Atom) -> bool:
        grad, indices = self._value(argument(node, 0)), self._value(argument(node, 1))
        out = self._dimensions.of[node]
        padding, is_scaled = argument(node, 3, -1), argument(node, 4, False)
        if is_scaled or layout_of(out, atom) != Layout(0, 1, 1):
            return False
        wholes, positions = self._wholes(grad, node), self._whole(indices, node)
        made = []
        for index, (start, end) in enumerate(pairwise(self._bounds[atom])):
            rows = self._shard_rows(node, positions, atom, int(padding), index)
            made.append(self._call(node, node.target, (wholes[index], rows, end - start, -1, False), shard=index))
        self._values[node] = Value("split", tuple(made), node, atom, out)
        return True

    def _add_loss(self, node: Node, loss: SoftmaxLoss) -> bool:
        """Adds a softmax loss whose classes are split: the logarithm of sums of exponentials, shard by shard."""
        logits = self._value(loss.logits)
        dtype = loss.softmax.meta["val"].dtype
        layout = layout_of(logits.dims, logits.atom) if logits.atom is not None else None
        if layout != Layout(1, 1, 1) or dtype != logsumexp_dtype(logits.nodes[0].meta["val"].dtype):
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
            made = self._call(node, shard_ops.vocabulary_loss, (*own, labels, reduction, ignored, logits.atom.size))
            self._split_losses[loss], self._values[node] = made, Several((made,))
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
        self._values[node] = Value("split", gradients, node, logits.atom, logits.dims)
        return True
