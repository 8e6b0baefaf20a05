"""`Dimensions`: which dimensions of a traced step are one and the same, through views, products and broadcasting.

Every dimension is a list of atoms. An atom is split into two where a view splits a dimension, and two atoms become one
where an op uses both for one index. So the output dimension of a fused projection of queries, keys and values is
`[3, heads, width of a head]`, and its `heads` is the atom that attention runs over.

`Use`: the dimensions of one op, with those that it sums over and those that it needs whole.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from rlplace.graphs.capturing.functional import is_view
from rlplace.graphs.capturing.portable import attention, attention_backward

aten = torch.ops.aten


class Atom:
    """A dimension, or a factor of one.

    Attributes:
        size: how many indices.
    """

    __slots__ = ("_parts", "_same", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._same: Atom | None = None
        self._parts: tuple[Atom, Atom] | None = None

    def leaves(self) -> list[Atom]:
        """The factors, outermost first."""
        atom = self
        while atom._same is not None:
            atom = atom._same
        return [atom] if atom._parts is None else [leaf for part in atom._parts for leaf in part.leaves()]

    def cut(self, size: int) -> None:
        """Makes two factors of a leaf; the outer one has `size` indices."""
        self._parts = Atom(size), Atom(self.size // size)

    def join(self, other: Atom) -> None:
        """Makes a leaf and another one of its size the same."""
        self._same = other


Dim = Sequence[Atom]
"""One dimension; empty for a size of 1."""
Dims = Sequence[Dim]
"""Of one tensor."""


def leaves(dim: Dim) -> list[Atom]:
    """The leaves of a dimension, outermost first."""
    return [leaf for atom in dim for leaf in atom.leaves()]


def unify(one: Dim, other: Dim) -> bool:
    """Makes two dimensions the same as far as their factors fit, outermost first; returns whether they fit.

    >>> width, heads = [Atom(768)], [Atom(12), Atom(64)]
    >>> unify(width, heads), [leaf.size for leaf in leaves(width)]
    (True, [12, 64])
    """
    left, right = ([*reversed(leaves(each))] for each in (one, other))
    while left and right:
        for stack in (left, right):  # a leaf may have been cut since it was put there
            stack += reversed(stack.pop().leaves())
        big, small = (left, right) if left[-1].size >= right[-1].size else (right, left)
        first, second = big.pop(), small.pop()
        if first is second:
            continue
        if first.size % second.size:
            return False
        if first.size > second.size:
            first.cut(second.size)
            first, rest = first.leaves()
            big.append(rest)
        first.join(second)
    return not left and not right


def fresh(shape: Sequence[int]) -> list[list[Atom]]:
    """Dimensions that are no others'."""
    return [[Atom(size)] if size != 1 else [] for size in shape]


@dataclass
class Use:
    """The dimensions of one op.

    Attributes:
        ins: tensors that it reads, with their dimensions, in the order of its arguments.
        outs: dimensions of each output; None for an output that is no tensor.
        summed: dimensions that it sums over: where one is split, each shard has a part of the sum.
        whole: dimensions that it needs whole.
        same: sets of dimensions that it takes for one; where they do not fit, the op runs whole.
        sizes: position of an argument that is the shape of the output.
        piece: position of an argument that is the size, or sizes, of the pieces of a dimension, and that dimension.
        batch: dimensions that it runs over as a product of two activations.
    """

    ins: list[tuple[Node, Dims]]
    outs: list[Dims | None]
    summed: list[Dim] = field(default_factory=list)
    whole: list[Dim] = field(default_factory=list)
    same: list[tuple[Dim, ...]] = field(default_factory=list)
    sizes: int | None = None
    piece: tuple[int, int] | None = None
    batch: list[Dim] = field(default_factory=list)


_SAME_SHAPE = {
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten.threshold_backward.default, aten.native_dropout.default, aten.native_dropout_backward.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.bernoulli.p, aten.bernoulli.default, aten.rand_like.default, aten.copy.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.pow.Tensor_Scalar,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
}  # fmt: skip
"""Ops by elements that do not say so by their tags."""
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}


def argument(node: Node, position: int, default: Any = None) -> Any:
    """An argument of an op, by its position."""
    return node.args[position] if len(node.args) > position else default


PRODUCTS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}
"""Positions of the factors."""


class Dimensions:
    """The dimensions of every tensor of a graph.

    Args:
        graph: of a step without ops that write in place, but for stores.
        gradients: parameters, each with its gradient, which has the same dimensions.

    Attributes:
        of: by node, the dimensions of its tensor; a list of them for a node that returns several.
        uses: by node, for ops whose rules are known.
    """

    def __init__(self, graph: torch.fx.Graph, gradients: Sequence[tuple[Node, Node]] = ()) -> None:
        self.of: dict[Node, Any] = {}
        self.uses: dict[Node, Use] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr", "call_function"):
                self._add(node)
        for parameter, gradient in gradients:
            for one, other in zip(self.of[parameter], self.of[gradient], strict=True):
                unify(one, other)

    def _add(self, node: Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem and isinstance(self.of.get(node.args[0]), list):  # type: ignore[arg-type]
            source, index = node.args
            self.of[node] = self.of[source][index]  # type: ignore[index]
            return
        if node.op == "call_function" and all(each in self.of for each in node.all_input_nodes):
            use = self._use(node)
            if use is not None:
                self.uses[node] = use
                self.of.setdefault(node, use.outs if isinstance(value, (list, tuple)) else use.outs[0])
                return
        if isinstance(value, torch.Tensor):
            self.of[node] = tuple(fresh(value.shape))
        elif isinstance(value, (list, tuple)):
            self.of[node] = [tuple(fresh(v.shape)) if isinstance(v, torch.Tensor) else None for v in value]

    def _use(self, node: Node) -> Use | None:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        rule = _RULES.get(target)
        if rule is not None:
            return rule(self, node)
        if target in _RESHAPES:
            return self._reshape(node)
        if target in _SAME_SHAPE or torch.Tag.pointwise in target.tags:
            return self._by_elements(node)
        return None

    # What rules are written in

    def einsum(self, node: Node, ins: str, outs: str, *read: Any, summed: str = "", whole: str = "") -> Use:
        """The use of an op in the notation of `einsum`: a letter is an index.

        Args:
            node: the op.
            ins: letters of the tensors in `read`, with commas between them.
            outs: letters of the outputs, likewise; "-" for one that is no tensor.
            read: tensors that it reads; None for one that was left out.
            summed: letters that it sums over.
            whole: letters that it needs whole.
        """
        value = node.meta["val"]
        shapes = [getattr(each, "shape", ()) for each in (value if isinstance(value, (list, tuple)) else (value,))]
        return self.labelled(
            [(one, word) for one, word in zip(read, ins.split(","), strict=True) if isinstance(one, Node)],
            [None if word == "-" else (word, shape) for word, shape in zip(outs.split(","), shapes, strict=True)],
            summed=summed,
            whole=whole,
        )

    def labelled(
        self,
        ins: Sequence[tuple[Node, Sequence[Any]]],
        outs: Sequence[tuple[Sequence[Any], Sequence[int]] | None],
        *,
        summed: Sequence[Any] = (),
        whole: Sequence[Any] = (),
        **options: Any,
    ) -> Use:
        """As `einsum`, with any labels: of each tensor that is read, and of each output with its shape."""
        found: dict[Any, list[Dim]] = {}
        for one, labels in ins:
            for label, dim in zip(labels, self.of[one], strict=True):
                if dim:
                    found.setdefault(label, []).append(dim)
        for dims in found.values():
            for dim in dims[1:]:
                unify(dims[0], dim)
        made: list[Dims | None] = []
        for out in outs:
            if out is None:
                made.append(None)
                continue
            sizes = zip(*out, strict=True)
            made.append(tuple([] if size == 1 else found.setdefault(label, [[Atom(size)]])[0] for label, size in sizes))
        return Use(
            [(one, self.of[one]) for one, _ in ins],
            made,
            summed=[dim for label in summed for dim in found.get(label, ())],
            whole=[dim for label in whole for dim in found.get(label, ())],
            same=[tuple(dims) for dims in found.values() if len(dims) > 1],
            **options,
        )

    # Rules

    def _by_elements(self, node: Node) -> Use | None:
        value = node.meta["val"]
        values = value if isinstance(value, (list, tuple)) else (value,)
        read = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
        shape = torch.broadcast_shapes(*(one.meta["val"].shape for one in read))  # type: ignore[no-untyped-call]
        if not read or any(not isinstance(v, torch.Tensor) or v.shape != shape for v in values):
            return None
        rank = len(shape)
        ins = [(one, range(rank - one.meta["val"].dim(), rank)) for one in read]
        return self.labelled(ins, [(range(rank), shape) for _ in values])

    def _reshape(self, node: Node) -> Use:
        (source,), shape = node.all_input_nodes, node.meta["val"].shape
        before, after = self.of[source], tuple(fresh(shape))
        flat = list(itertools.chain(*before)), list(itertools.chain(*after))
        unify(*flat)
        return Use([(source, before)], [after], same=[flat], sizes=1)

    def _moved(self, node: Node) -> Use:
        """Dimensions in another order, or without some, or with some of size 1 more."""
        (source,), shape = node.all_input_nodes, node.meta["val"].shape
        rank = source.meta["val"].dim()
        order = list(range(rank))
        if node.target in (aten.t.default, aten.transpose.int):
            one, other = (int(argument(node, k, k - 1)) % rank for k in (1, 2))
            order[one], order[other] = order[other], order[one]
        elif node.target is aten.permute.default:
            order = [int(dim) % rank for dim in argument(node, 1)]
        elif node.target is aten.unsqueeze.default:
            order.insert(int(argument(node, 1)) % (rank + 1), -1)
        else:  # squeeze
            order = [dim for dim in order if self.of[source][dim]]
            if len(order) != len(shape):  # some dimension of size 1 stays
                gone = argument(node, 1)
                which = {int(dim) % rank for dim in (gone if isinstance(gone, (list, tuple)) else [gone])}
                order = [dim for dim in range(rank) if dim not in which or self.of[source][dim]]
        return self.labelled([(source, range(rank))], [(order, shape)])

    def _expand(self, node: Node) -> Use:
        (source,), shape = node.all_input_nodes, node.meta["val"].shape
        rank = source.meta["val"].dim()
        return self.labelled([(source, range(len(shape) - rank, len(shape)))], [(range(len(shape)), shape)], sizes=1)

    def _pieces(self, node: Node) -> Use | None:
        """`split` into equal pieces: the number of the piece is the outer factor of the dimension."""
        source = argument(node, 0)
        dim = int(argument(node, 2, 0))
        values = node.meta["val"]
        dim %= values[0].dim()
        if len({value.shape for value in values}) > 1 or values[0].shape[dim] == 1:
            return None
        number = [Atom(len(values))] if len(values) > 1 else []
        inner = [Atom(values[0].shape[dim])]
        unify(self.of[source][dim], [*number, *inner])
        out = tuple(inner if d == dim else each for d, each in enumerate(self.of[source]))
        same: list[tuple[Dim, ...]] = [(self.of[source][dim], [*number, *inner])]
        return Use([(source, self.of[source])], [out] * len(values), piece=(1, dim), whole=[number], same=same)

    def _slice(self, node: Node) -> Use:
        source = argument(node, 0)
        dim = int(argument(node, 1, 0))
        before, after = source.meta["val"].shape, node.meta["val"].shape
        dim %= len(before)
        labels: list[Any] = list(range(len(before)))
        if before[dim] == after[dim]:
            return self.labelled([(source, labels)], [(labels, after)], sizes=None)
        return self.labelled(
            [(source, labels)], [([*labels[:dim], "part", *labels[dim + 1 :]], after)], whole=(dim, "part")
        )

    def _select(self, node: Node) -> Use:
        source = argument(node, 0)
        rank, shape = source.meta["val"].dim(), node.meta["val"].shape
        dim = int(argument(node, 1)) % rank
        kept = [d for d in range(rank) if d != dim]
        return self.labelled([(source, range(rank))], [(kept, shape)], whole=(dim,))

    def _unbind(self, node: Node) -> Use:
        source = argument(node, 0)
        rank = source.meta["val"].dim()
        dim = int(argument(node, 1, 0)) % rank
        kept = [d for d in range(rank) if d != dim]
        outs = [(kept, value.shape) for value in node.meta["val"]]
        return self.labelled([(source, range(rank))], outs, whole=(dim,))

    def _padded(self, node: Node) -> Use:
        """The backward of `slice` and of `select`: zeros around what it reads."""
        source = argument(node, 0)
        shape = node.meta["val"].shape
        dim = int(argument(node, 2)) % len(shape)
        out: list[Any] = list(range(len(shape)))
        labels = [*out[:dim], *out[dim + 1 :]]
        if node.target is aten.slice_backward.default:
            labels = list(out) if source.meta["val"].shape[dim] == shape[dim] else [*out[:dim], "part", *out[dim + 1 :]]
        is_partial = labels != out
        whole = (dim, "part") if is_partial else ()
        return self.labelled([(source, labels)], [(out, shape)], whole=whole, sizes=1)

    def _cat(self, node: Node) -> Use | None:
        tensors = argument(node, 0)
        shape = node.meta["val"].shape
        dim = int(argument(node, 1, 0)) % len(shape)
        if any(one.meta["val"].dim() != len(shape) for one in tensors):
            return None
        sizes = {one.meta["val"].shape[dim] for one in tensors}
        labels: list[Any] = list(range(len(shape)))
        if len(sizes) == 1 and sizes != {1} and len(tensors) > 1:  # the backward of `split` into equal pieces
            use = self.labelled([(one, labels) for one in tensors], [(labels, (*shape[:dim], 1, *shape[dim + 1 :]))])
            inner = next(dims[dim] for _, dims in use.ins)
            out = use.outs[0]
            assert out is not None
            number = [Atom(len(tensors))]
            use.outs = [(*out[:dim], [*number, *inner], *out[dim + 1 :])]
            use.whole.append(number)
            return use
        ins = [(one, [*labels[:dim], ("of", k), *labels[dim + 1 :]]) for k, one in enumerate(tensors)]
        return self.labelled(ins, [(labels, shape)], whole=(dim, *(("of", k) for k in range(len(tensors)))))

    def _stack(self, node: Node) -> Use:
        tensors = argument(node, 0)
        shape = node.meta["val"].shape
        dim = int(argument(node, 1, 0)) % len(shape)
        labels = [label for label in range(len(shape)) if label != dim]
        return self.labelled([(one, labels) for one in tensors], [(range(len(shape)), shape)], whole=(dim,))

    def _reduce(self, node: Node) -> Use | None:
        """Sums, means, maxima: only a sum over a split dimension is a sum over shards."""
        source = argument(node, 0)
        rank, value = source.meta["val"].dim(), node.meta["val"]
        given = argument(node, 1)
        dims = range(rank) if given is None or given == [] else given if isinstance(given, (list, tuple)) else [given]
        gone = {int(dim) % rank for dim in dims if rank}
        has_rank = isinstance(value, torch.Tensor) and value.dim() == rank
        labels = [("one", d) if d in gone else d for d in range(rank) if has_rank or d not in gone]
        values = value if isinstance(value, (list, tuple)) else (value,)
        is_sum = node.target in (aten.sum.default, aten.sum.dim_IntList)
        return self.labelled(
            [(source, range(rank))],
            [(labels, each.shape) for each in values],
            **{"summed" if is_sum else "whole": sorted(gone)},
        )

    def _softmax(self, node: Node) -> Use:
        position = 1 if node.target in (aten._softmax.default, aten._log_softmax.default) else 2
        shape = node.meta["val"].shape
        read = node.all_input_nodes
        dim = int(argument(node, position)) % len(shape)
        return self.labelled([(one, range(len(shape))) for one in read], [(range(len(shape)), shape)], whole=(dim,))

    def _norm(self, node: Node) -> Use:
        """Layer norm, forward and backward."""
        source = argument(node, 0)
        shape = source.meta["val"].shape
        all_, is_forward = range(len(shape)), node.target is aten.native_layer_norm.default
        normed = argument(node, 1 if is_forward else 2)
        lead, tail = all_[: len(shape) - len(normed)], all_[len(shape) - len(normed) :]
        stats = [*lead, *(("one", d) for d in tail)]
        values, places = node.meta["val"], {}
        words = [all_, tail, tail] if is_forward else [all_, all_, stats, stats, tail, tail]
        given = [0, 2, 3] if is_forward else [0, 1, 3, 4, 5, 6]
        for position, labels in zip(given, words, strict=True):
            if position < len(node.args) and isinstance(node.args[position], Node):
                places[node.args[position]] = labels
        outs = [all_, stats, stats] if is_forward else [all_, tail, tail]
        return self.labelled(
            list(places.items()),  # type: ignore[arg-type]
            [
                (labels, value.shape) if isinstance(value, torch.Tensor) else None
                for labels, value in zip(outs, values, strict=True)
            ],
            whole=list(tail),
            summed=[] if is_forward else list(lead),
        )

    def _product(self, node: Node) -> Use:
        is_batched = node.target in (aten.bmm.default, aten.baddbmm.default)
        b = "b" if is_batched else ""
        one, other = (argument(node, position) for position in PRODUCTS[node.target])  # type: ignore[index]
        ins, read = [f"{b}ik", f"{b}kj"], [one, other]
        if len(node.args) > 2 and isinstance(node.args[0], Node):  # a bias first
            ins.insert(0, f"{b}ij"[-node.args[0].meta["val"].dim() :])
            read.insert(0, node.args[0])
        use = self.einsum(node, ",".join(ins), f"{b}ij", *read, summed="k")
        if is_batched:
            use.batch = [use.outs[0][0]]  # type: ignore[index]
        return use

    def _attention(self, node: Node) -> Use:
        """By batch and heads; a head of keys and values serves a group of those of queries."""
        is_forward = node.target is attention
        query, key, value = (argument(node, position + (not is_forward)) for position in range(3))
        heads, groups = self.of[query][1], self.of[key][1]
        group = math.prod(leaf.size for leaf in leaves(heads)) // math.prod(leaf.size for leaf in leaves(groups))
        unify(heads, [*groups, *([Atom(group)] if group > 1 else [])])
        mask = argument(node, 3 if is_forward else 6)
        g = "g" if group > 1 else "h"
        masked = "bhnm"[4 - mask.meta["val"].dim() :] if isinstance(mask, Node) else ""
        keys = f"b{g}me,b{g}me"
        if is_forward:
            use = self.einsum(node, f"bhne,{keys},{masked}", "bhne,bhn", query, key, value, mask, whole="nme")
        else:
            grad, out, logsumexp = node.args[0], *node.args[4:6]
            words = f"bhne,bhne,{keys},bhne,bhn,{masked}"
            use = self.einsum(node, words, f"bhne,{keys}", grad, query, key, value, out, logsumexp, mask, whole="nme")
            use.summed = [heads]  # the gradient of a head of keys is a sum over its group
        use.batch = [use.outs[0][0], heads]  # type: ignore[index]
        return use

    def _embedding(self, node: Node) -> Use:
        """The width of what is looked up is another dimension than that of the table: it is gathered at once."""
        table, indices = argument(node, 0), argument(node, 1)
        rank = indices.meta["val"].dim()
        shape = node.meta["val"].shape
        use = self.labelled([(table, ("row", "width")), (indices, range(rank))], [((*range(rank), "width"), shape)])
        self.of[node] = (*use.outs[0][:-1], *fresh(shape[-1:]))  # type: ignore[index]
        return use

    def _embedding_backward(self, node: Node) -> Use:
        grad, indices = argument(node, 0), argument(node, 1)
        rank = indices.meta["val"].dim()
        shape = node.meta["val"].shape
        inner = fresh(shape[1:])
        own = (*self.of[indices], *inner)
        use = self.labelled([(indices, range(rank))], [(("row", "width"), shape)], summed=range(rank))
        use.outs = [(use.outs[0][0], *inner)]  # type: ignore[index]
        use.ins.insert(0, (grad, own))
        return use

    def _index_select(self, node: Node) -> Use:
        source, dim, index = (argument(node, position) for position in range(3))
        rank, shape = source.meta["val"].dim(), node.meta["val"].shape
        labels: list[Any] = list(range(rank))
        out = [*labels]
        out[int(dim) % rank] = "picked"
        return self.labelled(
            [(source, labels), (index, ("picked",))],
            [(out, shape)],
            whole=(int(dim) % rank, "picked"),
        )

    def _index_add(self, node: Node) -> Use | None:
        base, dim, index, source = (argument(node, position) for position in range(4))
        shape = node.meta["val"].shape
        labels: list[Any] = list(range(len(shape)))
        read = [*labels]
        read[int(dim) % len(shape)] = "picked"
        return self.labelled(
            [(base, labels), (index, ("picked",)), (source, read)],
            [(labels, shape)],
            whole=(int(dim) % len(shape), "picked"),
        )


_RULES: dict[Any, Callable[[Dimensions, Node], Use | None]] = {
    **dict.fromkeys(PRODUCTS, Dimensions._product),
    **dict.fromkeys((attention, attention_backward), Dimensions._attention),
    **dict.fromkeys((aten.native_layer_norm.default, aten.native_layer_norm_backward.default), Dimensions._norm),
    **dict.fromkeys(
        (
            *(aten._softmax.default, aten._softmax_backward_data.default),
            *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
        ),
        Dimensions._softmax,
    ),
    **dict.fromkeys(
        (
            *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default),
            *(aten.amin.default, aten.argmax.default, aten.var.correction, aten.any.dim, aten.logsumexp.default),
        ),
        Dimensions._reduce,
    ),
    **dict.fromkeys(
        (
            *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default),
            *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        ),
        Dimensions._moved,
    ),
    **dict.fromkeys((aten.slice_backward.default, aten.select_backward.default), Dimensions._padded),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), Dimensions._pieces),
    aten.embedding.default: Dimensions._embedding,
    aten.embedding_dense_backward.default: Dimensions._embedding_backward,
    aten.expand.default: Dimensions._expand,
    aten.slice.Tensor: Dimensions._slice,
    aten.select.int: Dimensions._select,
    aten.unbind.int: Dimensions._unbind,
    aten.cat.default: Dimensions._cat,
    aten.stack.default: Dimensions._stack,
    aten.index_select.default: Dimensions._index_select,
    aten.index_add.default: Dimensions._index_add,
}
"""By overload; ops by elements and reshapes need none, and an op without one runs whole."""


def shows(node: Node) -> Node:
    """The node that a value is a view or a copy in another type of."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        target: Any = node.target
        is_copy = target in (aten._to_copy.default, aten.clone.default)
        if not is_copy and not (isinstance(target, torch._ops.OpOverload) and is_view(target)):
            break
        node = node.args[0]
    return node
