"""`Gradients`: from those of micro-batches to the updates of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlplace.graphs.capturing.lower import LoweredStep
from rlplace.graphs.capturing.micro.assembly import Assembly, RefMap
from rlplace.graphs.capturing.micro.parts import Parts
from rlplace.graphs.capturing.micro.sums import Sum
from rlplace.graphs.capturing.micro.tables import Lookup, Table, tables
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.program import OptimizerSpec, Ref

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
