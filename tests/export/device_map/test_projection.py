"""Placements of ops as placements of modules, and maps read back: by hand on small models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from split_models import Meeting, OwnScale, Stack, Tied, features, words
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.export.device_map import device_map, map_devices, project
from rlplace.graphs import OpGraph, capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.grouping.module_classes import module_classes
from rlplace.measure import Problem
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.resolve import resolve_host

PLACES = (0, 1)


def step_of(model: nn.Module) -> OpGraph:
    return capture(model, words() if isinstance(model, Tied) else features(), lambda output: output.mean(), "adam")


def problem_of(graph: OpGraph) -> Problem:
    """Every op takes a second on the first device, and two on the other."""
    costs = Costs(np.tile([1.0, 2.0], (graph.num_ops, 1)), "estimated")
    every = Grouping(np.arange(graph.num_ops, dtype=np.int32))
    return Problem(graph, resolve_host("RTX4090+RTX3060"), costs, every)


def on(graph: OpGraph, *entries: str) -> np.ndarray:
    """(N,) the classes of these entries on the second device, the others on the first."""
    classes = module_classes(graph)
    return np.isin(classes.op_class, [classes.entry_class[name] for name in entries]).astype(np.int32)


def test_a_placement_of_classes_is_its_own_projection_and_is_read_back() -> None:
    for model, entries in ((Stack(), ("blocks.1",)), (Tied(), ("middle",)), (Meeting(), ("left.0", "after"))):
        graph = step_of(model)
        devices = on(graph, *entries)
        found = project(problem_of(graph), devices)
        assert found.devices.tolist() == devices.tolist()
        assert found.moved == 0.0
        assert map_devices(graph, device_map(graph, found, PLACES), PLACES).tolist() == devices.tolist()


def test_a_module_goes_where_most_of_its_time_was() -> None:
    graph = step_of(Stack())
    devices, classes = on(graph, "blocks.1"), module_classes(graph)
    block = np.flatnonzero(classes.op_class == classes.entry_class["blocks.1"])
    few, most = devices.copy(), devices.copy()
    few[block[: len(block) // 2 - 1]] = 0
    most[block[: len(block) // 2 + 1]] = 0
    found = project(problem_of(graph), few)
    assert found.devices.tolist() == devices.tolist()
    assert found.moved == pytest.approx((len(block) // 2 - 1) / graph.num_ops)
    assert not project(problem_of(graph), most).devices.any()


def test_pins_are_kept_where_a_module_can() -> None:
    graph = step_of(Stack())
    last = np.flatnonzero(module_classes(graph).op_class == module_classes(graph).entry_class["last"])
    allowed = np.ones((graph.num_ops, 2), dtype=np.bool_)
    allowed[last[0], 0] = False
    problem = dataclasses.replace(problem_of(graph), allowed=allowed)
    assert project(problem, np.zeros(graph.num_ops, dtype=np.int32)).devices.tolist() == on(graph, "last").tolist()


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), {"": 0}),
        (("first",), {"first": 1, "blocks": 0, "drop": 1, "last": 0}),
        (("blocks.0", "blocks.1", "blocks.2"), {"first": 0, "blocks": 1, "drop": 0, "last": 0}),
        (("last",), {"first": 0, "blocks": 0, "drop": 0, "last": 1}),
        (("blocks.1",), {"first": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 0, "drop": 0, "last": 0}),
    ],
)
def test_entries_are_the_highest_modules_on_one_device(entries: tuple[str, ...], expected: dict[str, int]) -> None:
    graph = step_of(Stack())
    found = device_map(graph, project(problem_of(graph), on(graph, *entries)), PLACES)
    assert {name: place for name, place in found.items() if name != "drop"} == {
        name: place for name, place in expected.items() if name != "drop"
    }, "dropout with probability 0 has no op"


def test_a_root_whose_own_ops_are_elsewhere_is_no_entry() -> None:
    graph = step_of(Meeting())
    entries = device_map(graph, project(problem_of(graph), on(graph, "after")), PLACES)
    assert entries == {"left": 0, "right": 0, "after": 1}
    assert device_map(graph, project(problem_of(graph), on(graph, "left.0")), PLACES) == {
        "left.1": 0, "left.0": 1, "right": 0, "after": 0,
    }  # fmt: skip


def test_the_roots_own_tensors_have_entries_and_their_device_comes_first() -> None:
    graph = step_of(OwnScale())
    entries = device_map(graph, project(problem_of(graph), on(graph, "scale")), PLACES)
    assert entries == {"scale": 1, "before": 0, "layer": 1, "after": 0}
    assert next(iter(entries.values())) == 1, "inputs are to be where the root adds them"


def test_parts_of_one_gpu_are_one_place() -> None:
    graph = step_of(Stack())
    assert device_map(graph, project(problem_of(graph), on(graph, "last")), (0, 0)) == {"": 0}


def test_maps_of_others_are_read() -> None:
    graph = step_of(Stack())
    devices = map_devices(graph, {"first": 1, "blocks": 0, "drop": 0, "last.weight": 0, "last.bias": 0}, PLACES)
    assert devices.tolist() == on(graph, "first").tolist()
    with pytest.raises(InvalidValue, match=r"nothing for .*last.*, expected every module in it"):
        map_devices(graph, {"first": 1, "blocks": 0}, PLACES)
    with pytest.raises(InvalidValue, match="device map is 7, expected one of 0, 1"):
        map_devices(graph, {"": 7}, PLACES)
