"""`ShardedValues`: tensors of a step as whole, split and partial ones, and how each becomes another.

A partial value is summed by its owner, or in chunks of tokens; a split one is joined by its owner, or by each shard; a
whole one is cut. Each of these is made once, where the first op needs it.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.fx import Node

from rlplace.graphs.capturing.functional import is_view
from rlplace.graphs.program import SplitPlan
from rlplace.graphs.splitting import shard_ops
from rlplace.graphs.splitting.choice import Choice, is_forward
from rlplace.graphs.splitting.dimensions import Atom, Dimensions, Dims, Use, argument, leaves

aten = torch.ops.aten

Kind = Literal["whole", "split", "partial"]


@dataclass(eq=False)
class Value:
    """One tensor of the old graph in the new one.

    Attributes:
        kind: what its nodes are.
        nodes: the tensor, or that of each shard.
        origin: the old node.
        atom: that it is split along.
        dims: its dimensions, of a split one.
        whole: the joined or summed tensor, once an op has needed it.
        copies: of a tensor in chunks, that which each shard has joined.
        slices: by layout, the slices of the whole.
    """

    kind: Kind
    nodes: tuple[Node, ...]
    origin: Node
    atom: Atom | None = None
    dims: Dims = ()
    whole: Node | None = None
    copies: tuple[Node, ...] | None = None
    slices: dict[tuple[int, int, int, Atom], tuple[Node, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Several:
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
class Layout:
    """Where an atom is in a tensor: in dimension `dim`, with so many indices outside of it and inside."""

    dim: int
    outer: int
    inner: int


def layout_of(dims: Dims, atom: Atom) -> Layout | None:
    """Where `atom` is; None where it is nowhere, or in two places."""
    found = None
    for dim, atoms in enumerate(dims):
        own = leaves(atoms)
        if atom in own:
            if found is not None or own.count(atom) > 1:
                return None
            place = own.index(atom)
            outer, inner = (math.prod(leaf.size for leaf in part) for part in (own[:place], own[place + 1 :]))
            found = Layout(dim, outer, inner)
    return found


def is_view_op(node: Node) -> bool:
    """Whether an op of the old graph returns views."""
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)


class ShardedValues(ABC):
    """The values of a step that is rewritten.

    Args:
        plan: what is split.
        dimensions: of the old graph.
        choice: what the plan splits in it.
        is_training: whether it has a backward; results of an inference are detached by ops that look like one.
    """

    def __init__(self, plan: SplitPlan, dimensions: Dimensions, choice: Choice, *, is_training: bool) -> None:
        self._new, self._is_training = torch.fx.Graph(), is_training
        self._plan, self._dimensions, self._choice = plan, dimensions, choice
        self._bounds = {
            atom: plan.bounds(atom.size) for atom in (*choice.classes, *choice.tokens, *choice.parameters.values())
        }
        self._values: dict[Node, Value | Several] = {}

    @abstractmethod
    def _add_split(self, node: Node, use: Use, atom: Atom) -> bool:
        """Adds an op once for each shard; returns whether its rule allows that."""

    def _made_for(self, reader: Node, *made: Node) -> None:
        """Ops that the backward is the first to need belong to it."""
        for node in made:
            if self._is_training and not is_forward(reader):
                node.meta["custom"] = {"phase": "backward"}

    def _value(self, node: Node) -> Value:
        value = self._values[node]
        assert isinstance(value, Value)
        return value

    def _intervals(self, layout: Layout, atom: Atom, index: int) -> tuple[tuple[int, int], ...]:
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
            is_view = target is aten.view.default or target is aten._unsafe_view.default
            if not is_view or given[0][0].is_contiguous():  # then it is not for its strides
                raise
            copy = self._call(
                like, aten.clone.default, args[:1], {"memory_format": torch.contiguous_format}, shard=shard
            )
            return self._call(like, target, (copy, *args[1:]), kwargs, shard=shard)
        node = self._new.create_node("call_function", target, args, kwargs, f"{like.name}")
        node.meta = {**like.meta, "val": value, "shard": shard}
        if not self._is_training:
            node.meta["custom"] = {**(like.meta.get("custom") or {}), "phase": "forward"}
        return node

    def _whole(self, value: Value, reader: Node) -> Node:
        """The whole tensor, joined or summed where the first op needs it."""
        if value.kind == "whole":
            return value.nodes[0]
        value = self._in_chunks(value, reader)
        if value.copies is not None:
            return value.copies[0]
        if value.whole is None:
            if value.kind == "partial":
                value.whole = self._call(value.origin, shard_ops.sum_parts, (list(value.nodes),))
                self._made_for(reader, value.whole)
            else:
                value.whole = self._joined(value, reader)
        return value.whole

    def _wholes(self, value: Value, reader: Node) -> tuple[Node, ...]:
        """The whole tensor for each shard: the one of the owner, or its own copy, joined of the chunks of all."""
        value = self._in_chunks(value, reader)
        if value.copies is None:
            if value.atom not in self._choice.tokens:
                return (self._whole(value, reader),) * self._plan.num_shards
            node, shards = value.origin, range(self._plan.num_shards)
            base = self._values[argument(node, 0)] if is_view_op(node) else None
            if isinstance(base, Value) and base.atom is value.atom:  # other views may have joined it
                args, joined = node.args[1:], self._wholes(base, reader)
                value.copies = tuple(
                    self._call(node, node.target, (joined[index], *args), node.kwargs, shard=index) for index in shards
                )
            else:
                value.copies = tuple(self._joined(value, reader, index) for index in shards)
            self._made_for(reader, *value.copies)
        return value.copies

    def _in_chunks(self, value: Value, reader: Node) -> Value:
        """A partial value as its sum in chunks of tokens, if it has tokens: chunk j is summed by shard j."""
        node = value.origin
        atoms = self._token_atoms(node) if value.kind == "partial" else []
        if not atoms:
            return value
        dims = self._dimensions.of[node]
        atom, use = atoms[0], self._dimensions.uses.get(node)
        if use is not None and is_view_op(node) and self._add_split(node, use, atom):
            return self._value(node)  # of what is in chunks: other views may have summed it
        layout = layout_of(dims, atom)
        assert layout is not None
        parts = [self._cut(one, layout, atom, node, reader, shard=index) for index, one in enumerate(value.nodes)]
        chunks = [self._call(node, shard_ops.sum_parts, (list(own),), shard=k) for k, own in enumerate(zip(*parts))]
        self._made_for(reader, *chunks)
        made = self._values[node] = Value("split", tuple(chunks), node, atom, dims)
        return made

    def _token_atoms(self, node: Node) -> list[Atom]:
        """Atoms of the tensor that sums are cut along."""
        dims = self._dimensions.of[node]
        own = [atom for dim in dims for atom in leaves(dim) if atom in self._choice.tokens]
        return [atom for atom in own if layout_of(dims, atom) is not None]

    def _joined(self, value: Value, reader: Node, shard: int = -1) -> Node:
        assert value.atom is not None
        layout = layout_of(value.dims, value.atom)
        assert layout is not None
        made = self._call(value.origin, aten.cat.default, (self._pieces(value, layout), layout.dim), shard=shard)
        self._made_for(reader, made)
        return made

    def _pieces(self, value: Value, layout: Layout) -> list[Node]:
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

    def _local(self, value: Value, dims: Dims, atom: Atom, reader: Node) -> tuple[Node, ...]:
        """The tensors of the shards of an op for which `value` has dimensions `dims`, and is split along `atom`."""
        layout = layout_of(dims, atom)
        if atom in self._choice.tokens:
            value = self._in_chunks(value, reader)
        if value.atom is atom and layout is not None and layout_of(value.dims, atom) == layout:
            return value.nodes
        wholes = self._wholes(value, reader)
        if layout is None:
            return wholes
        key = layout.dim, layout.outer, layout.inner, atom
        if key not in value.slices:
            if wholes[0] is wholes[-1]:
                value.slices[key] = self._cut(wholes[0], layout, atom, value.origin, reader)
            else:
                value.slices[key] = tuple(
                    self._slice(one, layout, atom, index, value.origin, shard=index) for index, one in enumerate(wholes)
                )
                self._made_for(reader, *value.slices[key])
        return value.slices[key]

    def _cut(
        self, whole: Node, layout: Layout, atom: Atom, like: Node, reader: Node, *, shard: int = -1
    ) -> tuple[Node, ...]:
        """Copies of all parts of a tensor, by one op where each is one run of indices."""
        shards = range(self._plan.num_shards)
        if layout.outer > 1:
            made = tuple(self._slice(whole, layout, atom, index, like, shard=shard) for index in shards)
        else:
            sizes = [layout.inner * (end - start) for start, end in pairwise(self._bounds[atom])]
            cut = self._call(like, aten.split_with_sizes_copy.default, (whole, sizes, layout.dim), shard=shard)
            self._made_for(reader, cut)
            made = tuple(self._call(like, operator.getitem, (cut, index), shard=shard) for index in shards)
        self._made_for(reader, *made)
        return made

    def _slice(self, whole: Node, layout: Layout, atom: Atom, index: int, like: Node, *, shard: int) -> Node:
        """A copy of a part: a view would be sent with all of its base."""
        intervals = self._intervals(layout, atom, index)
        if len(intervals) == 1:
            return self._call(like, aten.slice_copy.Tensor, (whole, layout.dim, *intervals[0]), shard=shard)
        views = [self._call(like, aten.slice.Tensor, (whole, layout.dim, *each), shard=shard) for each in intervals]
        return self._call(like, aten.cat.default, (views, layout.dim), shard=shard)
