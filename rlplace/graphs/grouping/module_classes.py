"""`module_classes`: the ops that a device map cannot but place together, the finest that it can say.

`module_tree`: the modules of a graph, the tensors that each holds, and which cannot be split over devices.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from rlplace.graphs.opgraph import FORWARD, OpGraph

if TYPE_CHECKING:
    from torch import nn

INPUTS = ""
"""Stands for where the inputs of the step are, and the tensors that the root holds itself."""


def tied_as_modules(graph: OpGraph) -> OpGraph:
    """The graph with its module classes as co-location classes, which everything that places ops keeps to."""
    return dataclasses.replace(graph, colocation=ModuleClasses(graph).op_class)


class ModuleClasses:
    """The finest classes of ops that a Hugging Face device map can tell apart.

    A map gives modules to devices; the inputs of a module are brought to its device, and an op of a module that has no
    device of its own runs where its inputs are. So in one class are

    - the ops of a unit of `ModuleTree`, forward, backward and updates, and its tensors;
    - units that hold one tensor, and units whose tensors an op of another one reads;
    - the units whose outputs meet in an op of a module around them, and that op;
    - ops that a co-location class of the graph holds together.

    A backward op of a module around units goes with that module's forward ops where those are of one class, else with
    the largest tensor that it reads.

    Args:
        graph: with its program where classes of modules and tensors with several names are to be known.

    Attributes:
        op_class: (N,) int32, class of each op, numbered by first op; -1 for an op that belongs to none.
        entry_class: the class of every entry of the finest device map, a module by its path or a tensor of the root by
            its name.
        inputs_class: the class that is where the step's inputs are; -1 where no op minds where they are.
        tree: the modules.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph, self.tree = graph, module_tree(graph)
        self._unit = self.tree.unit_of()
        self._parent: dict[str, str] = {}
        self._label: list[str | None] = [self._unit.get(path) for path in graph.modules]
        self._offsets, self._inputs = graph.input_offsets.tolist(), graph.input_tensors.tolist()
        self._producers, self._is_resident = graph.tensor_op.tolist(), graph.is_resident.tolist()
        self._is_source = graph.is_source.tolist()
        self._label_sources()
        for names in self.tree.tied:
            self._join([self._unit.get(name.rpartition(".")[0], INPUTS) for name in names])
        self._join_members(by_residents=True)  # what lives with a parameter or buffer is of its unit
        self._label_forward()
        self._label_backward()
        self._label_unread()
        self._join_members(by_residents=False)
        self._number_classes()

    @property
    def num_classes(self) -> int:
        """C."""
        return int(self.op_class.max(initial=-1)) + 1

    def _label_sources(self) -> None:
        graph, program = self._graph, self._graph.program
        for op in np.flatnonzero(graph.is_source).tolist():
            is_target = program is not None and program.sources[op].kind == "target"
            is_input = graph.targets[op] == "input" and not is_target
            if not self._is_resident[op]:
                self._label[op] = INPUTS if is_input else None
            elif self._label[op] is None:
                self._label[op] = INPUTS

    def _label_forward(self) -> None:
        graph = self._graph
        for op in np.flatnonzero((graph.phases == FORWARD) & ~graph.is_source).tolist():
            own, read = self._label[op], self._read(op)
            if own is None:
                movable = graph.modules[op] in self.tree.moves_inputs
                read = [at for at in read if not movable or self._is_resident[at] or not self._is_source[at]]
                known = [label for at in read if (label := self._label[at]) is not None]
                self._join(known)
                self._label[op] = known[0] if known else None
            else:
                self._join([own, *(self._label[at] for at in read if self._is_resident[at])])

    def _label_backward(self) -> None:
        graph = self._graph
        homes: dict[str, set[str]] = defaultdict(set)
        for op in np.flatnonzero((graph.phases == FORWARD) & ~graph.is_source).tolist():
            if (label := self._label[op]) is not None:
                homes[graph.modules[op]].add(self._root(label))
        sizes = graph.tensor_bytes.tolist()
        for op in np.flatnonzero((graph.phases != FORWARD) & ~graph.is_source).tolist():
            if self._label[op] is not None:
                continue
            around, read = homes[graph.modules[op]], self._inputs[self._offsets[op] : self._offsets[op + 1]]
            known = [tensor for tensor in read if self._label[self._producers[tensor]] is not None]
            if len(around) == 1:
                (self._label[op],) = around
            elif known:
                self._label[op] = self._label[self._producers[max(known, key=lambda tensor: (sizes[tensor], -tensor))]]

    def _label_unread(self) -> None:
        """An op that reads nothing that is placed (inputs, constants, and ops on them alone) goes with its first
        reader."""
        is_alone = not any(self._root(key) == self._root(INPUTS) for key in list(self._parent) if key != INPUTS)
        runs = any(label == INPUTS and not self._is_source[op] for op, label in enumerate(self._label))
        if is_alone and INPUTS not in self.tree.tensors and not runs:
            self._label = [None if label == INPUTS else label for label in self._label]
        first: dict[int, str] = {}
        for op in range(self._graph.num_ops - 1, -1, -1):
            label = self._label[op] = self._label[op] if self._label[op] is not None else first.get(op)
            if label is not None:
                first |= dict.fromkeys(self._read(op), label)

    def _join_members(self, *, by_residents: bool) -> None:
        """Joins the members of each co-location class of the graph, by the labels of its residents or of all.

        What runs forward keeps its unit, or is labelled by what it reads: of a graph that has module classes already,
        all members of a class would be of one unit, and the others would have no entries.
        """
        classes: dict[int, list[int]] = defaultdict(list)
        for op in np.flatnonzero(self._graph.colocation >= 0).tolist():
            classes[int(self._graph.colocation[op])].append(op)
        for members in classes.values():
            decide = [op for op in members if self._is_resident[op] or not by_residents]
            known = [label for op in decide if (label := self._label[op]) is not None]
            self._join(known)
            for op in members if known else ():
                if self._graph.phases[op] != FORWARD or (self._label[op] is None and not by_residents):
                    self._label[op] = known[0]

    def _number_classes(self) -> None:
        number: dict[str, int] = {}
        op_class = np.full(self._graph.num_ops, -1, dtype=np.int32)
        for op, label in enumerate(self._label):
            if label is not None:
                op_class[op] = number.setdefault(self._root(label), len(number))
        used = {label for label in self._label if label is not None}
        entries = {
            path: number.get(self._root(unit), -1)
            for path, unit in self._unit.items()
            if path == unit and (unit in used or any(map(self.tree.tensors.get, _below(self.tree, path))))
        }
        if INPUTS not in self._unit:
            entries |= dict.fromkeys(self.tree.tensors.get("", ()), number.get(self._root(INPUTS), -1))
        self.op_class, self.inputs_class = op_class, number.get(self._root(INPUTS), -1)
        self.entry_class: Mapping[str, int] = entries

    def _read(self, op: int) -> list[int]:
        """The producers of an op's inputs."""
        return [self._producers[tensor] for tensor in self._inputs[self._offsets[op] : self._offsets[op + 1]]]

    def _root(self, key: str) -> str:
        while (above := self._parent.setdefault(key, key)) != key:
            self._parent[key] = self._parent[above]
            key = above
        return key

    def _join(self, keys: Iterable[str | None]) -> None:
        roots = dict.fromkeys(self._root(key) for key in keys if key is not None)
        for root in roots:
            self._parent[root] = next(iter(roots))


def _below(tree: ModuleTree, path: str) -> list[str]:
    """A module and all modules below it."""
    found, left = [], [path]
    while left:
        found.append(left.pop())
        left += tree.children[found[-1]]
    return found


INSIDE, OUTSIDE = 1, 2


@dataclass(frozen=True)
class ModuleTree:
    """Modules by dotted path; the path of the root is empty.

    Attributes:
        children: the child modules of every module, in their order.
        tensors: names of the parameters and buffers that a module holds itself, by its path.
        tied: the names of each tensor that has several.
        whole: modules that one device has to run: their class says so, or one of their own ops reads a child's output
            and a tensor from outside, as the sum of a residual block does.
        moves_inputs: modules that themselves bring the step's inputs to where they read them, as models of
            `transformers` do with tokens and masks; with labels, which the root reads, not all of them do.
    """

    children: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, tuple[str, ...]]
    tied: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    moves_inputs: frozenset[str]

    def unit_of(self) -> dict[str, str]:
        """For every module that is in a unit, the path of that unit.

        Units are the smallest parts that a device map can place: modules that are whole, that hold tensors themselves
        or that have no children. The root is a unit only where it has no children: its tensors can have entries of
        their own.
        """
        units: dict[str, str] = {}
        left = [("", None if self.children[""] else "")]
        while left:
            path, unit = left.pop()
            if unit is None and path and (path in self.whole or path in self.tensors or not self.children[path]):
                unit = path
            if unit is not None:
                units[path] = unit
            left += [(child, unit) for child in reversed(self.children[path])]
        return units


def module_tree(graph: OpGraph) -> ModuleTree:
    """The modules of `graph`: of its model, or where it has no program of the paths that its ops name."""
    model = None if graph.program is None else graph.program.origin.model
    tensors: dict[str, list[str]] = {}
    names: dict[int, list[str]] = {}
    own = ((graph.modules[op], graph.names[op], op) for op in np.flatnonzero(graph.is_resident).tolist())
    for path, name, identity in own if model is None else _model_tensors(model):
        tensors.setdefault(path, []).append(name)
        names.setdefault(identity, []).append(name)
    unsplit, moving = frozenset[str](), frozenset[str]()
    paths = dict.fromkeys(graph.modules)
    if model is not None:
        classes = {name for each in model.modules() for name in getattr(each, "_no_split_modules", None) or ()}
        modules = dict(model.named_modules(remove_duplicate=False))
        unsplit = frozenset(path for path, each in modules.items() if type(each).__name__ in classes)
        moving = frozenset(
            path for path, each in modules.items() if path and getattr(each, "_no_split_modules", None) is not None
        )
        paths = {**dict.fromkeys(modules), **paths}
    return ModuleTree(
        children=_children(paths),
        tensors={path: tuple(own) for path, own in tensors.items()},
        tied=tuple(tuple(each) for each in names.values() if len(each) > 1),
        whole=unsplit | _mixing(graph, moving),
        moves_inputs=moving,
    )


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Module, name and identity of each parameter and buffer, under each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None:
                yield path, f"{path}.{name}" if path else name, id(tensor)


def _children(paths: Mapping[str, None]) -> dict[str, tuple[str, ...]]:
    """The modules right below each of `paths` and of those above them."""
    found: dict[str, list[str]] = {"": []}
    for path in paths:
        names = path.split(".") if path else []
        for depth in range(len(names)):
            at = ".".join(names[: depth + 1])
            if at not in found:
                found[at] = []
                found[".".join(names[:depth])].append(at)
    return {path: tuple(below) for path, below in found.items()}


def _mixing(graph: OpGraph, moving: frozenset[str]) -> frozenset[str]:
    """Modules whose own forward reads, on one path of ops, both a tensor or output of a child and a tensor from
    outside."""
    mixing: set[str] = set()
    reads = [0] * graph.num_ops  # of a module's own ops: whether what they read came from inside, outside or both
    offsets, inputs = graph.input_offsets.tolist(), graph.input_tensors.tolist()
    producers, phases, is_source = graph.tensor_op.tolist(), graph.phases.tolist(), graph.is_source.tolist()
    is_resident = graph.is_resident.tolist()
    for op, path in enumerate(graph.modules):
        if is_source[op] or phases[op] != FORWARD or path in mixing:
            continue
        for tensor in inputs[offsets[op] : offsets[op + 1]]:
            producer = producers[tensor]
            if is_source[producer] and not is_resident[producer]:
                reads[op] |= OUTSIDE if (graph.targets[producer] == "input" and path not in moving) else 0
                continue
            home = graph.modules[producer]
            side = INSIDE if not path or home.startswith(f"{path}.") else OUTSIDE
            reads[op] |= reads[producer] if home == path else side
        if path and reads[op] == INSIDE | OUTSIDE:
            mixing.add(path)
    return frozenset(mixing)
