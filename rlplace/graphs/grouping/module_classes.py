"""`module_classes`: the ops that a device map cannot but place together, the finest that it can say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.module_tree import ModuleTree, module_tree
from rlplace.graphs.opgraph import FORWARD, OpGraph

INPUTS = ""
"""Stands for where the inputs of the step are, and the tensors that the root holds itself."""


@dataclass(frozen=True)
class ModuleClasses:
    """Classes of ops that every device map has on one device.

    Attributes:
        op_class: (N,) int32, class of each op, numbered by first op; -1 for an op that belongs to none.
        entry_class: the class of every entry of the finest device map, a module by its path or a tensor of the root by
            its name.
        inputs_class: the class that is where the step's inputs are; -1 where no op minds where they are.
        tree: the modules.
    """

    op_class: NDArray[np.int32]
    entry_class: Mapping[str, int]
    inputs_class: int
    tree: ModuleTree

    @property
    def num_classes(self) -> int:
        """C."""
        return int(self.op_class.max(initial=-1)) + 1


def module_classes(graph: OpGraph) -> ModuleClasses:
    """The finest classes of ops that a Hugging Face device map can tell apart.

    A map gives modules to devices; the inputs of a module are brought to its device, and an op of a module that has no
    device of its own runs where its inputs are. So in one class are

    - the ops of a unit of `ModuleTree`, forward, backward and updates, and its tensors;
    - units that hold one tensor, and units whose tensors an op of another one reads;
    - the units whose outputs meet in an op of a module around them, and that op;
    - what a co-location class of the graph holds together.

    A backward op of a module around units goes with that module's forward ops where those are of one class, else with
    the largest tensor that it reads.

    Args:
        graph: with its program where classes of modules and tensors with several names are to be known.
    """
    return _Classes(graph, module_tree(graph)).found()


def tied_as_modules(graph: OpGraph) -> OpGraph:
    """The graph with its module classes as co-location classes, which everything that places ops keeps to."""
    return dataclasses.replace(graph, colocation=module_classes(graph).op_class)


class _Classes:
    def __init__(self, graph: OpGraph, tree: ModuleTree) -> None:
        self.graph, self.tree = graph, tree
        self.unit = tree.unit_of()
        self.parent: dict[str, str] = {}
        self.label: list[str | None] = [self.unit.get(path) for path in graph.modules]
        self.offsets, self.inputs = graph.input_offsets.tolist(), graph.input_tensors.tolist()
        self.producers, self.is_resident = graph.tensor_op.tolist(), graph.is_resident.tolist()
        self.is_source = graph.is_source.tolist()

    def found(self) -> ModuleClasses:
        self._label_sources()
        self._tie_tensors()
        self._label_classes()
        self._label_forward()
        self._label_backward()
        self._label_unread()
        self._join_classes()
        return self._numbered()

    def _label_sources(self) -> None:
        graph, program = self.graph, self.graph.program
        for op in np.flatnonzero(graph.is_source).tolist():
            if self.is_resident[op]:
                self.label[op] = self.label[op] if self.label[op] is not None else INPUTS
                continue
            is_target = program is not None and program.sources[op].kind == "target"
            is_input = graph.targets[op] == "input" and not is_target
            self.label[op] = INPUTS if is_input else None

    def _tie_tensors(self) -> None:
        for names in self.tree.tied:
            self._join([self.unit.get(name.rpartition(".")[0], INPUTS) for name in names])

    def _label_classes(self) -> None:
        """The ops that live with a parameter or buffer are of its unit."""
        for members in self._colocated():
            homes = [label for op in members if self.is_resident[op] and (label := self.label[op]) is not None]
            self._join(homes)
            for op in members if homes else ():
                self.label[op] = homes[0]

    def _label_forward(self) -> None:
        graph = self.graph
        for op in np.flatnonzero((graph.phases == FORWARD) & ~graph.is_source).tolist():
            own = self.label[op]
            read = self._read(op)
            if own is None:
                movable = graph.modules[op] in self.tree.moves_inputs
                read = [at for at in read if not movable or self.is_resident[at] or not self.is_source[at]]
                known = [label for at in read if (label := self.label[at]) is not None]
                self._join(known)
                self.label[op] = known[0] if known else None
            else:
                self._join([own, *(self.label[at] for at in read if self.is_resident[at])])

    def _label_backward(self) -> None:
        graph = self.graph
        homes: dict[str, set[str]] = {}
        for op in np.flatnonzero((graph.phases == FORWARD) & ~graph.is_source).tolist():
            label = self.label[op]
            if label is not None:
                homes.setdefault(graph.modules[op], set()).add(self._root(label))
        sizes = graph.tensor_bytes.tolist()
        for op in np.flatnonzero((graph.phases != FORWARD) & ~graph.is_source).tolist():
            if self.label[op] is not None:
                continue
            around = homes.get(graph.modules[op], set())
            read = self.inputs[self.offsets[op] : self.offsets[op + 1]]
            known = [tensor for tensor in read if self.label[self.producers[tensor]] is not None]
            if len(around) == 1:
                (self.label[op],) = around
            elif known:
                self.label[op] = self.label[self.producers[max(known, key=lambda tensor: (sizes[tensor], -tensor))]]

    def _label_unread(self) -> None:
        """What reads nothing that is placed (inputs, constants, what is made of them) goes with its first reader."""
        is_alone = not any(self._root(key) == self._root(INPUTS) for key in list(self.parent) if key != INPUTS)
        if is_alone and INPUTS not in self.tree.tensors:
            runs = {op for op, label in enumerate(self.label) if label == INPUTS and not self.graph.is_source[op]}
            if not runs:
                self.label = [None if label == INPUTS else label for label in self.label]
        first: dict[int, str] = {}
        for op in range(self.graph.num_ops - 1, -1, -1):
            label = self.label[op] = self.label[op] if self.label[op] is not None else first.get(op)
            if label is not None:
                first |= dict.fromkeys(self._read(op), label)

    def _join_classes(self) -> None:
        for members in self._colocated():
            known = [label for op in members if (label := self.label[op]) is not None]
            self._join(known)
            for op in members if known else ():
                self.label[op] = known[0]

    def _numbered(self) -> ModuleClasses:
        number: dict[str, int] = {}
        op_class = np.full(self.graph.num_ops, -1, dtype=np.int32)
        for op, label in enumerate(self.label):
            if label is not None:
                op_class[op] = number.setdefault(self._root(label), len(number))
        used = {label for label in self.label if label is not None}
        entries = {}
        for path, unit in self.unit.items():
            if path == unit and (unit in used or any(map(self.tree.tensors.get, _below(self.tree, path)))):
                entries[path] = number.get(self._root(unit), -1)
        if INPUTS not in self.unit:
            entries |= dict.fromkeys(self.tree.tensors.get("", ()), number.get(self._root(INPUTS), -1))
        return ModuleClasses(op_class, entries, number.get(self._root(INPUTS), -1), self.tree)

    def _colocated(self) -> list[list[int]]:
        """The members of each co-location class of the graph."""
        members: dict[int, list[int]] = {}
        for op in np.flatnonzero(self.graph.colocation >= 0).tolist():
            members.setdefault(int(self.graph.colocation[op]), []).append(op)
        return list(members.values())

    def _read(self, op: int) -> list[int]:
        """The producers of what an op reads."""
        return [self.producers[tensor] for tensor in self.inputs[self.offsets[op] : self.offsets[op + 1]]]

    def _root(self, key: str) -> str:
        while (above := self.parent.setdefault(key, key)) != key:
            self.parent[key] = self.parent[above]
            key = above
        return key

    def _join(self, keys: Iterable[str | None]) -> None:
        roots = dict.fromkeys(self._root(key) for key in keys if key is not None)
        for root in roots:
            self.parent[root] = next(iter(roots))


def _below(tree: ModuleTree, path: str) -> list[str]:
    """A module and all modules below it."""
    found, left = [], [path]
    while left:
        found.append(left.pop())
        left += tree.children[found[-1]]
    return found
