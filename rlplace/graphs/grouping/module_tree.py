"""`module_tree`: the modules of a graph, the tensors that each holds, and which cannot be split over devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from rlplace.graphs.opgraph import FORWARD, OpGraph

if TYPE_CHECKING:
    from torch import nn

INSIDE, OUTSIDE = 1, 2


@dataclass(frozen=True)
class ModuleTree:
    """Modules by dotted path; the path of the root is empty.

    Attributes:
        children: the child modules of every module, in their order.
        tensors: names of the parameters and buffers that a module holds itself, by its path.
        tied: the names of each tensor that has several.
        whole: modules that one device has to run: their class says so, or one of their own ops reads what a child made
            and what comes from outside, as the sum of a residual block does.
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
    for path, name, identity in _named_tensors(graph) if model is None else _model_tensors(model):
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


def _named_tensors(graph: OpGraph) -> Iterator[tuple[str, str, int]]:
    """Module, name and number of each parameter and buffer op."""
    for op in np.flatnonzero(graph.is_resident).tolist():
        yield graph.modules[op], graph.names[op], op


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
    """Modules whose own forward reads, on one path of ops, both what a child holds or made and what is from outside."""
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
                is_read = graph.targets[producer] == "input" and path not in moving
                reads[op] |= OUTSIDE if is_read else 0
                continue
            home = graph.modules[producer]
            if home == path:
                reads[op] |= reads[producer]
            else:
                reads[op] |= INSIDE if not path or home.startswith(f"{path}.") else OUTSIDE
        if path and reads[op] == INSIDE | OUTSIDE:
            mixing.add(path)
    return frozenset(mixing)
