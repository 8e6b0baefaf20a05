"""`project`: a placement of ops as one of modules, and the device map that says it.

`map_places`: what a device map calls the devices of a host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.module_classes import ModuleClasses, module_classes
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import FORWARD, OpGraph
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.problem import Problem

COUNTS_S = 1e-15
"""What an op that takes no time weighs, so that a module without any goes where its ops are all the same."""


@dataclass(frozen=True)
class Projection:
    """A placement that a device map can say.

    Attributes:
        classes: the ops that such a map has together.
        class_device: (C,) int32, device of each class.
        devices: (N,) int32, device of each op.
        moved: share of the step's op time that was elsewhere before.
    """

    classes: ModuleClasses
    class_device: NDArray[np.int32]
    devices: NDArray[np.int32]
    moved: float


def project(problem: Problem, devices: NDArray[np.int32]) -> Projection:
    """The placement of modules that comes closest to `devices`.

    Each class goes where most of the time of its ops was spent, time being the mean of an op's over all devices, among
    the devices where all of them may be.

    Args:
        problem: of the placement.
        devices: (N,) device of each op.
    """
    graph = problem.graph
    classes = module_classes(graph)
    num_devices = problem.host.num_devices
    members = np.flatnonzero(classes.op_class >= 0)
    of, weight_s = classes.op_class[members], problem.costs.op_time_s.mean(axis=1)
    votes_s = np.zeros((classes.num_classes, num_devices))
    np.add.at(votes_s, (of, devices[members]), weight_s[members] + COUNTS_S)
    if problem.allowed is not None:
        may = np.ones_like(votes_s, dtype=np.bool_)
        np.logical_and.at(may, of, problem.allowed[members])
        votes_s = np.where(may | ~may.any(axis=1, keepdims=True), votes_s, -1.0)
    class_device = votes_s.argmax(axis=1).astype(np.int32)
    projected = np.array(devices, dtype=np.int32)
    projected[members] = class_device[of]
    moved_s = float(weight_s[projected != devices].sum())
    return Projection(classes, class_device, projected, moved_s / max(float(weight_s.sum()), 1e-300))


def device_map(graph: OpGraph, projection: Projection, places: Sequence[Place]) -> dict[str, Place]:
    """The device map: the path of a module, or the name of a tensor that the root holds, and its device.

    Entries are the highest modules that are on one device altogether. The first one is on the device where the step's
    inputs are to be, which Hugging Face takes for the main one.

    Args:
        graph: with its program.
        projection: of a placement of it.
        places: what the map calls each device.

    Raises:
        InvalidValue: `graph` has no program.
    """
    model, classes = require_program(graph).origin.model, projection.classes
    tree, class_device = classes.tree, projection.class_device
    units = tree.unit_of()
    first = next((number for number in classes.entry_class.values() if number >= 0), -1)
    main = classes.inputs_class if classes.inputs_class >= 0 else first
    main_place = places[int(class_device[main])] if main >= 0 else places[0]

    def place_of(number: int) -> Place:
        return places[int(class_device[number])] if number >= 0 else main_place

    finest = {name: place_of(number) for name, number in classes.entry_class.items()}
    own: dict[str, set[Place]] = {}  # of the ops of modules around units
    runs = (graph.phases == FORWARD) & ~graph.is_source
    for op in np.flatnonzero(runs).tolist():
        if graph.modules[op] not in units:
            own.setdefault(graph.modules[op], set()).add(place_of(int(classes.op_class[op])))
    whole: dict[str, set[Place]] = {}  # places of all that is at or below a module
    for path in _upwards(tree.children):
        names = (path,) if units.get(path) == path else tree.tensors.get(path, ()) if path not in units else ()
        found = {finest[name] for name in names if name in finest} | own.get(path, set())
        whole[path] = found.union(*(whole[child] for child in tree.children[path]))
    entries: dict[str, Place] = {}
    left = [""]
    while left:
        path = left.pop()
        is_entry = units[path] == path if path in units else _is_one(model, path)
        if len(whole[path]) == 1 and is_entry:
            entries |= dict.fromkeys((path,), *whole[path])
            continue
        if path not in units:
            entries |= {name: finest[name] for name in tree.tensors.get(path, ())}
        left += reversed(tree.children[path])
    begin = next((name for name, place in entries.items() if place == main_place), None)
    return entries if begin is None else {begin: main_place, **entries}


def map_devices(graph: OpGraph, entries: Mapping[str, Place], places: Sequence[Place]) -> NDArray[np.int32]:
    """(N,) int32: the device of each op under a device map, made here or elsewhere.

    An op of a unit is where the map has its module; where the units of one class are apart, which a map of another's
    making may have, the ops that no module of the map owns are with the first of them.

    Args:
        graph: of the model that the map is of.
        entries: the map.
        places: what the map calls each device of the host.

    Raises:
        InvalidValue: a module that the map does not place, or a place that is no device.
    """
    classes = module_classes(graph)
    where = {place: device for device, place in reversed(list(enumerate(places)))}

    def device_of(name: str) -> int:
        path = name
        while path not in entries and path:
            path = path.rpartition(".")[0]
        if path not in entries:  # it may be finer than what must be whole here
            path = next((entry for entry in entries if entry.startswith(f"{name}.")), "")
        if path not in entries:
            raise InvalidValue("device map", f"nothing for {name!r}", "every module in it, or one above")
        if entries[path] not in where:
            raise InvalidValue(
                "device map", entries[path], f"one of {', '.join(map(str, dict.fromkeys(places)))}", where=path
            )
        return where[entries[path]]

    entry_device = {name: device_of(name) for name in classes.entry_class}
    class_device = np.zeros(classes.num_classes, dtype=np.int32)
    for name, number in reversed(list(classes.entry_class.items())):
        class_device[number] = entry_device[name]
    devices = np.where(classes.op_class >= 0, class_device[classes.op_class], 0).astype(np.int32)
    units = classes.tree.unit_of()
    is_tied = np.isin(np.arange(graph.num_ops), np.flatnonzero(graph.colocation >= 0))
    for op, path in enumerate(graph.modules):
        unit = units.get(path)
        if unit in entry_device and (not is_tied[op] or graph.is_resident[op]):
            devices[op] = entry_device[unit]
    leaders: dict[int, int] = {}  # what lives with a parameter is where that is
    for op in sorted(np.flatnonzero(is_tied).tolist(), key=lambda op: (not graph.is_resident[op], op)):
        devices[op] = devices[leaders.setdefault(int(graph.colocation[op]), op)]
    return devices


def _upwards(children: Mapping[str, Sequence[str]]) -> list[str]:
    """Modules, each after all that are below it."""
    found, left = [], [""]
    while left:
        found.append(left.pop())
        left += children[found[-1]]
    return found[::-1]


def _is_one(model: nn.Module, path: str) -> bool:
    """Whether an entry for a module places all that is below it: a list is not called, and has no inputs to bring."""
    module = model.get_submodule(path)
    is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_called or all(len(child.state_dict()) for child in module.children())


CPU = "cpu"
Place = int | str
"""The index of a GPU, or `cpu`."""


def map_places(host: Host) -> tuple[Place, ...]:
    """What a device map calls each device of `host`: the index of a GPU, or `cpu`.

    Parts of one GPU are that GPU, and cores and gangs of them are the CPU. A device of a host file that is called
    neither takes the index of its place among those that are no CPUs.

    Raises:
        InvalidValue: its devices are in several machines, which one process cannot reach.

    Example:
        >>> from rlplace.measure.hosts.resolve import resolve_host
        >>> map_places(resolve_host("cpu+4xA100"))
        ('cpu', 0, 1, 2, 3)
    """
    machines = sorted(
        {found[1] for device in host.devices if (found := re.match(r"(.+)/(?:cuda|gpu|cpu)", device.name))}
    )
    if len(machines) > 1:
        raise InvalidValue(
            "host",
            host.name,
            "a host of one machine",
            where="device map",
            hint=f"A device map is of one process, and these devices are in {len(machines)} machines.",
        )
    gpus = [device for device in host.devices if not _is_cpu(device)]
    return tuple(CPU if _is_cpu(device) else _index(device, gpus) for device in host.devices)


def _is_cpu(device: Device) -> bool:
    return device.backend == "cpu" or re.match(r"(?:.+/)?cpu(?::|$)", device.name) is not None


def _index(device: Device, gpus: list[Device]) -> int:
    numbered = [re.search(r"(?:cuda|gpu):?(\d+)(?:/\d+)?$", each.name) for each in gpus]
    found = numbered[gpus.index(device)]
    return int(found[1]) if found is not None and all(numbered) else gpus.index(device)
