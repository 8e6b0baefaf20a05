"""Gradients of embedding tables: lookups of all micro-batches are gathered, and one dense gradient is made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlplace.graphs.capturing.lower import LoweredStep
from rlplace.graphs.program import Call, Ref

aten = torch.ops.aten


@dataclass(frozen=True)
class Lookup:
    """A dense gradient of a table, from one lookup in it.

    Attributes:
        gradient: of what was looked up.
        indices: of its rows.
        options: rows of the table, padding index, and whether gradients are scaled by frequency.
        dim: the dimension along which lookups of micro-batches are joined.
    """

    gradient: Ref
    indices: Ref
    options: tuple[int, int, bool]
    dim: int = 0


@dataclass(frozen=True)
class Table:
    """The gradient of a parameter that is a sum of lookups, and of others where the table is tied to a layer.

    Attributes:
        lookups: whose gradients are made once for all micro-batches.
        rest: what is summed besides.
        replaced: ops of the slice that make the lookups' gradients, or add them up.
    """

    lookups: tuple[Lookup, ...]
    rest: tuple[Ref, ...]
    replaced: frozenset[int]


def tables(steps: Sequence[LoweredStep]) -> list[dict[int, Table]]:
    """For each of some slices of different sizes: by position, the parameters whose gradients are gathered.

    They are the same for all slices: those whose lookups can be joined along one dimension.
    """
    found = [_tables_of(step) for step in steps]
    joined: list[dict[int, Table]] = [{} for _ in steps]
    for position in set.intersection(*map(set, found)):
        own = [each[position] for each in found]
        if len({(len(table.rest), tuple(lookup.options for lookup in table.lookups)) for table in own}) > 1:
            continue
        dims = []
        for lookups in zip(*(table.lookups for table in own), strict=True):
            shapes = [tuple(step.ops.value(each.indices).shape) for step, each in zip(steps, lookups, strict=True)]
            dims.append(_dim(shapes))
        if None in dims:
            continue
        for table, kept in zip(own, joined, strict=True):
            lookups = tuple(replace(each, dim=dim or 0) for each, dim in zip(table.lookups, dims, strict=True))
            kept[position] = replace(table, lookups=lookups)
    return joined


def _dim(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The one dimension in which shapes differ; the first where none does; None where there is no such dimension."""
    if not shapes[0] or len({len(shape) for shape in shapes}) > 1:
        return None
    differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    return None if len(differing) > 1 else (differing or [0])[0]


def _tables_of(step: LoweredStep) -> dict[int, Table]:
    ops = step.ops
    readers = Counter(tensor for reads in ops.built.reads for tensor in reads)
    readers.update(ops.base(ref) for ref in (*step.results, *step.statistics, *filter(None, step.gradients)))
    found = {}
    for position, gradient in enumerate(step.gradients):
        lookups: list[Lookup] = []
        rest: list[Ref] = []
        replaced: set[int] = set()
        left = [] if gradient is None else [gradient]
        while left:
            ref = left.pop()
            call = ops.calls.get(ops.producer(ref)) if ref.id >= 0 and readers[ref.id] == 1 else None
            target = call.target if isinstance(call, Call) else None
            if isinstance(call, Call) and target is aten.add.Tensor and _adds_alike(step, ref, call):
                left += reversed(call.args)
            elif isinstance(call, Call) and target is aten.embedding_dense_backward.default and not call.args[4]:
                lookups.append(Lookup(call.args[0], call.args[1], call.args[2:5]))
            else:
                rest.append(ref)
                continue
            replaced.add(ops.producer(ref))
        if lookups:
            found[position] = Table(tuple(lookups), tuple(rest), frozenset(replaced))
    return found


def _adds_alike(step: LoweredStep, total: Ref, call: Call) -> bool:
    """Whether `total` is the plain sum of two tensors of its shape."""
    if call.kwargs or len(call.args) != 2 or not all(isinstance(each, Ref) for each in call.args):
        return False
    return len({step.ops.value(each).shape for each in (total, *call.args)}) == 1
