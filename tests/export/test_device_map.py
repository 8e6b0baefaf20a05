"""Placements of ops as placements of modules, and maps read back: by hand on small models.

What a device map calls the devices of a host.

What a device map takes on each device, against sizes added by hand.

Keys and values that generation keeps, against their definition.
"""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from split_models import Meeting, OwnScale, Stack, Tied, features, words
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.export.device_map import (
    cache_by_module,
    device_map,
    device_memory,
    gradients_kept,
    map_places,
    project,
)
from rlplace.graphs import OpGraph, capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.grouping.module_classes import ModuleClasses
from rlplace.measure import Problem, Simulator
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.resolve import resolve_host

PLACES = (0, 1)
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    map_devices = runpy.run_path(str(BENCHMARKS / "device_maps.py"))["map_devices"]


def step_of(model: nn.Module) -> OpGraph:
    return capture(model, words() if isinstance(model, Tied) else features(), lambda output: output.mean(), "adam")


def problem_of(graph: OpGraph) -> Problem:
    """Every op takes a second on the first device, and two on the other."""
    costs = Costs(np.tile([1.0, 2.0], (graph.num_ops, 1)), "estimated")
    every = Grouping(np.arange(graph.num_ops, dtype=np.int32))
    return Problem(graph, resolve_host("RTX4090+RTX3060"), costs, every)


def on(graph: OpGraph, *entries: str) -> np.ndarray:
    """(N,) the classes of these entries on the second device, the others on the first."""
    classes = ModuleClasses(graph)
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
    devices, classes = on(graph, "blocks.1"), ModuleClasses(graph)
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
    last = np.flatnonzero(ModuleClasses(graph).op_class == ModuleClasses(graph).entry_class["last"])
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


def host_of(*names: str) -> Host:
    one = Device("name", "any", "simulated", 1 << 30)
    return Host("made", (dataclasses.replace(one, name=names[0]),)) if len(names) == 1 else _wired(one, names)


def _wired(one: Device, names: tuple[str, ...]) -> Host:
    from rlplace.measure.hosts.host import Route

    routes = tuple(Route(a, b, ()) for a in names for b in names if a != b)
    return Host("made", tuple(dataclasses.replace(one, name=name) for name in names), routes=routes)


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (("cuda:0", "cuda:1"), (0, 1)),
        (("cuda:2", "cuda:5", "cpu"), (2, 5, "cpu")),
        (("cuda:0/0", "cuda:0/1", "cuda:1/0"), (0, 0, 1)),
        (("cpu:0", "cpu:1", "cpu:0-1"), ("cpu", "cpu", "cpu")),
        (("large", "small", "cpu"), (0, 1, "cpu")),
        (("node0/cuda:1",), (1,)),
    ],
)
def test_devices_by_name(names: tuple[str, ...], places: tuple[int | str, ...]) -> None:
    assert map_places(host_of(*names)) == places


def test_two_machines_are_refused() -> None:
    with pytest.raises(InvalidValue, match="these devices are in 2 machines"):
        map_places(resolve_host("2x8xA100-ib"))


WIDTH = 256
LAYER = 4 * WIDTH * WIDTH
"""Bytes of a layer's weight."""


def problem() -> Problem:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    graph = capture(nn.Sequential(*layers), torch.randn(1, WIDTH), lambda y: y.mean(), "adam")
    return Problem.estimate(graph, resolve_host("RTX4090+RTX3060"))


def test_gradients_stay_until_the_end_of_an_ordinary_loops_step() -> None:
    made = problem()
    everywhere = np.zeros(made.graph.num_ops, dtype=np.int32)
    (memory, nothing) = device_memory(made, everywhere, (0, 1), {1: 5})
    assert memory.parameter_bytes == memory.gradient_bytes == 4 * LAYER
    assert 8 * LAYER <= memory.optimizer_bytes <= 8 * LAYER + 100
    assert memory.fits
    held = memory.context_bytes + 16 * LAYER
    assert held <= memory.peak_bytes < held + LAYER, "a row of activations is little"
    assert memory.peak_bytes >= Simulator(made, threads=1).measure(everywhere[None])[0].peak_bytes[0]
    assert memory.activation_bytes < LAYER
    assert (nothing.parameter_bytes, nothing.cache_bytes) == (0, 5)
    assert nothing.peak_bytes == nothing.context_bytes + 5


def test_every_part_is_where_its_module_is() -> None:
    made = problem()
    classes = ModuleClasses(made.graph)
    devices = (classes.op_class == classes.entry_class["3"]).astype(np.int32)
    first, second = device_memory(made, devices, (0, 1), {})
    assert (first.parameter_bytes, second.parameter_bytes) == (3 * LAYER, LAYER)
    assert (first.gradient_bytes, second.gradient_bytes) == (3 * LAYER, LAYER)
    assert second.place == 1


def test_a_step_that_keeps_its_gradients_returns_them() -> None:
    graph = problem().graph
    kept = gradients_kept(graph)
    more = set(kept.output_tensors.tolist()) - set(graph.output_tensors.tolist())
    assert [graph.tensor_bytes[tensor] for tensor in more] == [LAYER] * 4


hf = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip


def test_a_layer_keeps_its_heads_of_keys_and_values() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2))
    found = cache_by_module(model, num_tokens=10, batch=3)
    assert found == dict.fromkeys([f"model.layers.{layer}.self_attn" for layer in (0, 1)], 2 * 3 * 2 * 4 * 10 * 4)
    half = cache_by_module(model.to(torch.bfloat16), num_tokens=10, batch=3)
    assert list(half.values()) == [size // 2 for size in found.values()]


def test_it_is_what_transformers_keeps() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    kept = model(torch.zeros(3, 10, dtype=torch.int64), use_cache=True).past_key_values
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in kept.layers]
    assert list(cache_by_module(model, num_tokens=10, batch=3).values()) == sizes


def test_a_window_bounds_it_and_encoders_have_none() -> None:
    model = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4))
    assert set(cache_by_module(model, num_tokens=10, batch=1).values()) == {2 * 2 * 4 * 4 * 4}
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
    paths = cache_by_module(hf.T5ForConditionalGeneration(hf.T5Config(**sizes)), 10, 1)
    assert paths
    assert all(path.startswith("decoder.") for path in paths)


def test_other_models_have_none_that_is_known() -> None:
    with pytest.raises(InvalidValue, match="only models of `transformers` that generate text"):
        cache_by_module(nn.Linear(2, 2), 10, 1)
