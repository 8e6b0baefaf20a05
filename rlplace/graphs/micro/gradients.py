"""`Gradients`: from those of micro-batches to the updates of the parameters.

Sums of gradients over micro-batches, grown as they come.

Gradients of embedding tables: lookups of all micro-batches are gathered, and one dense gradient is made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rlplace.graphs.capturing.lower import LoweredStep
from rlplace.graphs.micro.assembly import Assembly, RefMap
from rlplace.graphs.micro.parts import Parts
from rlplace.graphs.micro_batches import LATER_HALF, GradientSum, gradient_sums
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.program import Call, OptimizerSpec, Ref

aten = torch.ops.aten


class Gradients:
    """Sums the gradients of micro-batches as they come; gathers the lookups in embedding tables.

    Args:
        assembly: takes the ops.
        parts: with a captured step for every size, and the source ops.
    """

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        self._assembly, self._parts = assembly, parts
        steps = list(parts.steps.values())
        self._tables = dict(zip(map(id, steps), tables(steps), strict=True))
        self._names = steps[0].trace.trainable
        self._state = parts.state
        self._count = parts.micro.slicing.num_micro_batches
        # parameters whose gradient is one tensor in every slice share a sum
        found: dict[tuple[Ref | None, ...], int] = {}
        self._alias = {
            position: found.setdefault(tuple(step.gradients[position] for step in steps), position)
            for position in range(len(self._names))
        }
        self._sums = {
            position: Sum(assembly, self._count, self._names[position], self._module(position))
            for position in dict.fromkeys(self._alias.values())
        }
        self._refs: list[RefMap] = []

    def left_out(self, step: LoweredStep) -> set[int]:
        """Ops of a slice that are not copied: gradients of tables, made once for all of them."""
        return {op for table in self._tables[id(step)].values() for op in table.replaced}

    def add(self, index: int, refs: RefMap) -> None:
        """Takes the gradients of micro-batch `index`, whose ops are copied."""
        step = self._parts.step(index)
        self._refs.append(refs)
        for position, total in self._sums.items():
            table = self._tables[id(step)].get(position)
            terms = [step.gradients[position]] if table is None else list(table.rest)
            own = [self._assembly.here(step.ops, term, refs) for term in terms if term is not None]
            while len(own) > 1:
                own[:2] = [self._add(own[0], own[1], position, index)]
            total.add(index, own[0] if own else None)

    def finish(self, optimizer: OptimizerSpec | None) -> dict[str, Ref]:
        """Makes the gradients of tables, and adds the updates; a parameter, its gradient's root and its update live
        together.

        Returns:
            The gradient of each parameter that has one, by dotted name.
        """
        roots: dict[int, tuple[Ref, tuple[int, ...]]] = {}
        for position, total in self._sums.items():
            home = self._assembly.ops.producer(self._state[self._names[position]])
            gradient = total.root
            together = [self._producer(gradient)] if gradient is not None and total.is_sum else []
            for made, ops in self._looked_up(position):
                together += ops
                if gradient is None:
                    gradient = made
                    continue
                gradient = self._add(gradient, made, position, -1)
                together.append(self._producer(gradient))
            if gradient is not None:
                roots[position] = gradient, tuple(together)
                if together:
                    self._assembly.ops.built.colocated.append((home, *together))
        gradients: dict[str, Ref] = {}
        for position, name in enumerate(self._names):
            if self._alias[position] not in roots:
                continue
            gradients[name], own = roots[self._alias[position]]
            if optimizer is not None:
                self._assembly.ops.add_update(name, self._state[name], gradients[name], optimizer, own)
        return gradients

    def _looked_up(self, position: int) -> list[tuple[Ref, list[int]]]:
        """For each lookup in a table, its dense gradient over all micro-batches, and the ops that make it."""
        owned: list[Table] = []
        for index in range(self._count):
            table = self._tables[id(self._parts.step(index))].get(position)
            if table is None:
                return []
            owned.append(table)
        made = []
        for lookups in zip(*(table.lookups for table in owned), strict=True):
            gradients = self._gathered(lookups, lambda lookup: lookup.gradient, position, "gradients")
            indices = self._gathered(lookups, lambda lookup: lookup.indices, position, "indices")
            dense = self._assembly.call(
                aten.embedding_dense_backward.default,
                gradients,
                indices,
                *lookups[0].options,
                name=f"gradient_{self._names[position]}",
                module=self._module(position),
                phase=BACKWARD,
            )
            made.append((dense, [self._producer(each) for each in (gradients, indices, dense)]))
        return made

    def _gathered(self, lookups: tuple[Lookup, ...], part: Callable[[Lookup], Ref], position: int, what: str) -> Ref:
        refs = [
            self._assembly.here(self._parts.step(index).ops, part(lookup), self._refs[index])
            for index, lookup in enumerate(lookups)
        ]
        return self._assembly.call(
            aten.cat.default,
            refs,
            lookups[0].dim,
            name=f"{what}_{self._names[position]}",
            module=self._module(position),
            phase=BACKWARD,
        )

    def _add(self, one: Ref, other: Ref, position: int, micro_batch: int) -> Ref:
        return self._assembly.call(
            aten.add.Tensor,
            one,
            other,
            name=f"sum_{self._names[position]}",
            module=self._module(position),
            phase=BACKWARD,
            micro_batch=micro_batch,
        )

    def _module(self, position: int) -> str:
        return self._names[position].rpartition(".")[0]

    def _producer(self, ref: Ref) -> int:
        return self._assembly.ops.producer(ref)


class Sum:
    """The sum of one gradient over micro-batches, in the tree of `gradient_sums`, each part with its later half.

    Args:
        assembly: takes the additions.
        count: K.
        name: of the parameter.
        module: that it belongs to.
    """

    def __init__(self, assembly: Assembly, count: int, name: str, module: str) -> None:
        self._assembly, self._name, self._module = assembly, name, module
        self._parts: list[Ref | None] = [None] * (2 * count - 1)
        self._num_added = 0
        self._due: dict[int, list[tuple[int, GradientSum]]] = {}  # by micro-batch, what it completes, and its part
        for part, one in enumerate(gradient_sums(count, LATER_HALF), start=count):
            self._due.setdefault(one.last, []).append((part, one))

    @property
    def root(self) -> Ref | None:
        """The whole sum; None where no micro-batch has a gradient."""
        return self._parts[-1]

    @property
    def is_sum(self) -> bool:
        """Whether it adds anything up: else it is the gradient of a single micro-batch, or none."""
        return self._num_added > 0

    def add(self, micro_batch: int, gradient: Ref | None) -> None:
        """Takes the gradient of a micro-batch, and adds up what it completes."""
        self._parts[micro_batch] = gradient
        for part, one in self._due.get(micro_batch, ()):
            left, right = self._parts[one.left], self._parts[one.right]
            if left is None or right is None:
                self._parts[part] = right if left is None else left
                continue
            self._num_added += 1
            self._parts[part] = self._assembly.call(
                aten.add.Tensor,
                left,
                right,
                name=f"sum_{self._name}",
                module=self._module,
                phase=BACKWARD,
                micro_batch=one.micro_batch,
            )


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
