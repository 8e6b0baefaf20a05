"""`DEVICE_MAP`: the export format of that name.

`cache_by_module`: the memory of keys and values that a model of `transformers` keeps while it generates.

`device_memory`: what a step of a device map takes on each device, part by part.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InvalidValue
from rlplace.export.captured import CapturedRun
from rlplace.export.device_map.projection import CPU, Place, Projection, device_map, map_places, project
from rlplace.export.registry import Exported, ExportFormat, ExportRequest
from rlplace.format import format_bytes, format_ms
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.say import say

LEARN_MODULES = "`rlplace train --granularity module` searches placements that a device map can say"


def exported(request: ExportRequest) -> Exported:
    """The device map of a run, with what it takes on each device and what giving up single ops costs.

    Raises:
        UserError: the run's step cannot be had again, or is cut into micro-batches; its host is several machines, or
            the model keeps no cache.
    """
    problem = _problem(request)
    if (count := problem.graph.num_micro_batches) > 1:
        hint = f"Its batches are whole, other in step time and memory: train without micro-batches. {LEARN_MODULES}."
        raise InvalidValue("micro_batches", count, "1 for a device map", where="export", hint=hint)
    places = map_places(problem.host)
    plan = request.placement.plan
    projection = project(problem, plan.devices)
    entries = device_map(problem.graph, projection, places)
    simulator = Simulator(dataclasses.replace(problem, allowed=None), threads=1)
    ops = simulator.retime(plan)
    is_kept = bool((projection.devices == plan.devices).all())
    modules = ops if is_kept else simulator.measure(projection.devices[None])[0]
    memory = device_memory(problem, projection.devices, places, _cache(problem, projection, request.cache_tokens))
    ratio = modules.step_time_s / ops.step_time_s if ops.ok and modules.ok else None
    figures: dict[str, Any] = {
        "device_map": entries,
        "inputs": _shapes(problem),
        "projection": {
            "op_step_s": ops.step_time_s,
            "module_step_s": modules.step_time_s,
            "ratio": ratio,
            "moved_share": projection.moved,
            "status": modules.status,
            "why": modules.why,
        },
        "memory": [{**dataclasses.asdict(each), "fits": each.fits} for each in memory],
    }
    lines = (
        _in_words(entries),
        _projected(ops, modules, projection, ratio),
        *(_held(each) for each in memory if each.peak_bytes > each.context_bytes),
        *_warnings(memory, modules, places, entries),
        *_main_device(projection, places, entries),
    )
    for line in lines:
        say(line)
    return Exported(json.dumps(entries, indent=2) + "\n", figures)


def _problem(request: ExportRequest) -> Problem:
    """The run's problem, with the user's pins and exclusions."""
    problem, kept = CapturedRun.of(request).problem(), request.problem()
    if kept.get("allowed") is None:
        return problem
    try:
        allowed = np.array(kept["allowed"], dtype=np.bool_)[np.array(kept["grouping"]["op_group"], dtype=np.int64)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidValue(
            "allowed", "malformed", "devices where each group may be", where="problem.json", hint=f"It holds: {error}."
        ) from error
    return dataclasses.replace(problem, allowed=allowed)


def _cache(problem: Problem, projection: Projection, num_tokens: int) -> dict[int, int]:
    """Bytes of keys and values by device."""
    if not num_tokens:
        return {}
    graph = problem.graph
    origin = require_program(graph).origin
    leaves = pytree.tree_leaves((origin.args, origin.kwargs))
    batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
    units, classes = projection.classes.tree.unit_of(), projection.classes
    held: dict[int, int] = {}
    for path, size in cache_by_module(origin.model, num_tokens, batch).items():
        device = int(projection.class_device[classes.entry_class[units[path]]])
        held[device] = held.get(device, 0) + size
    return held


def _shapes(problem: Problem) -> list[list[int]]:
    """Shapes of the step's input tensors."""
    origin = require_program(problem.graph).origin
    leaves = pytree.tree_leaves((origin.args, origin.kwargs))
    return [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _in_words(entries: dict[str, Place]) -> str:
    counts = {place: list(entries.values()).count(place) for place in entries.values()}
    if entries.keys() == {""}:
        return f"the whole model is on {_called(entries[''])}"
    shown = ", ".join(f"{count} on {_called(place)}" for place, count in counts.items())
    return f"{len(entries)} entries: {shown}"


def _called(place: Place) -> str:
    return f"GPU {place}" if isinstance(place, int) else place


def _projected(ops: Measurement, modules: Measurement, projection: Projection, ratio: float | None) -> str:
    if ratio is None:
        return f"simulated: single ops {_step(ops)}, whole modules {_step(modules)}"
    if projection.moved == 0.0:
        return f"simulated: {_step(modules)} a step; the placement was one of modules, nothing is lost"
    share = f"{projection.moved:.1%} of the op time moved"
    return f"simulated: {_step(modules)} a step, {ratio:.3f} of the {_step(ops)} with single ops placed ({share})"


def _step(measurement: Measurement) -> str:
    return f"{format_ms(measurement.step_time_s)} ms" if measurement.ok else measurement.status


def _held(memory: DeviceMemory) -> str:
    parts = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
        "cache": memory.cache_bytes,
        "context": memory.context_bytes,
    }
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    peak = f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.capacity_bytes)}"
    return f"{memory.device} ({_called(memory.place)}): {peak}: {shown}"


def _warnings(
    memory: Sequence[DeviceMemory], modules: Measurement, places: Sequence[Place], entries: dict[str, Place]
) -> list[str]:
    found = []
    if modules.status == "oom":
        found.append(f"warning: whole modules do not fit: {modules.why}; {LEARN_MODULES}")
    else:
        found += [
            f"warning: {each.device} is {format_bytes(each.peak_bytes - each.capacity_bytes)} short where gradients "
            "stay until the optimizer's step, as in an ordinary loop: take a smaller batch, or keep less on it"
            for each in memory
            if not each.fits
        ]
    if CPU in entries.values() and any(place != CPU for place in places):
        found.append(
            "warning: with GPUs beside it, `cpu` in a device map means that weights wait in RAM and are computed with "
            "on the main GPU, which is not what was simulated; `--exclude '*=cpu'` keeps modules off it"
        )
    return found


def _main_device(projection: Projection, places: Sequence[Place], entries: dict[str, Place]) -> list[str]:
    """What to say where the map alone does not tell Hugging Face where the step's inputs are to be."""
    number = projection.classes.inputs_class
    place = None if number < 0 else places[int(projection.class_device[number])]
    if place is None or place == CPU or place == min(each for each in entries.values() if each != CPU):
        return []
    return [
        f"dispatch it with `main_device={place}`: ops or tensors of the model's root are there, with the step's inputs"
    ]


DEVICE_MAP = ExportFormat("device_map.json", "a Hugging Face device map", exported, options=("cache_tokens",))


def cache_by_module(model: nn.Module, num_tokens: int, batch: int) -> dict[str, int]:
    """Bytes of keys and values that each attention layer keeps for `num_tokens` tokens of `batch` sequences.

    Args:
        model: of `transformers`, whose config says how many heads there are and how wide they are.
        num_tokens: of the prompt and of what is generated.
        batch: sequences.

    Raises:
        InvalidValue: it is no model that generates text with a cache.
    """
    layers = [
        path
        for path, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
        and getattr(module, "is_decoder", True)
    ]
    inner = [path for path in layers if not any(other.startswith(f"{path}.") for other in layers)]
    config: Any = getattr(model, "config", None)
    if config is None or not inner:
        raise InvalidValue(
            "cache_tokens",
            num_tokens,
            "0: only models of `transformers` that generate text have a cache of a known size",
            where="device map",
        )
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = (
        getattr(config, "head_dim", None)
        or getattr(config, "d_kv", None)
        or config.hidden_size // config.num_attention_heads
    )
    window = getattr(config, "sliding_window", None)
    kept = num_tokens if not window else min(num_tokens, window)
    element = next((tensor.element_size() for tensor in model.parameters()), torch.float32.itemsize)
    return dict.fromkeys(inner, 2 * batch * heads * width * kept * element)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device at one batch; the parts do not all peak at once, so their sum may be above `peak_bytes`.

    Attributes:
        device: its name on the host.
        place: what the map calls it.
        parameter_bytes: of parameters and buffers.
        gradient_bytes: of their gradients, all of them.
        optimizer_bytes: of what the optimizer keeps.
        activation_bytes: most of all else that a step holds at one time, with received copies.
        cache_bytes: keys and values of generated text.
        context_bytes: held by the device itself.
        peak_bytes: most at one time where gradients stay until the optimizer's step, as in an ordinary loop, and the
            cache beside it.
        capacity_bytes: what there is.
    """

    device: str
    place: Place
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    cache_bytes: int
    context_bytes: int
    peak_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak_bytes <= self.capacity_bytes


def device_memory(
    problem: Problem, devices: NDArray[np.int32], places: tuple[Place, ...], cache_bytes: Mapping[int, int]
) -> list[DeviceMemory]:
    """What each device of the host needs for a step.

    Args:
        problem: of the step, its graph with a program.
        devices: (N,) device of each op.
        places: what the map calls each device.
        cache_bytes: of the keys and values of generated text, by device; may be empty.
    """
    graph, host = problem.graph, problem.host

    def on_each(sizes: NDArray[np.int64]) -> list[int]:
        summed = np.bincount(devices, weights=sizes, minlength=host.num_devices)
        return [int(size) for size in summed]

    parameters = on_each(np.where(graph.is_resident, graph.output_bytes, 0))
    gradients, states = on_each(graph.gradient_bytes), on_each(graph.state_bytes)
    peaks = _peak_bytes(problem, gradients_kept(graph), devices)
    others = _peak_bytes(problem, _without_gradients(graph), devices)
    return [
        DeviceMemory(
            device=device.name,
            place=places[number],
            parameter_bytes=parameters[number],
            gradient_bytes=gradients[number],
            optimizer_bytes=states[number],
            activation_bytes=max(others[number] - parameters[number] - states[number] - device.context_bytes, 0),
            cache_bytes=cache_bytes.get(number, 0),
            context_bytes=device.context_bytes,
            peak_bytes=peaks[number] + cache_bytes.get(number, 0),
            capacity_bytes=device.memory_bytes,
        )
        for number, device in enumerate(host.devices)
    ]


def gradients_kept(graph: OpGraph) -> OpGraph:
    """The graph of a step that keeps every gradient to its end, as a loop does that calls the optimizer afterwards."""
    kept = np.union1d(graph.output_tensors, _gradients(graph))
    return dataclasses.replace(graph, output_tensors=kept)


def _without_gradients(graph: OpGraph) -> OpGraph:
    sizes = graph.tensor_bytes.copy()
    sizes[_gradients(graph)] = 0
    return dataclasses.replace(graph, tensor_bytes=sizes)


def _gradients(graph: OpGraph) -> NDArray[np.int32]:
    """The tensors that hold gradients of parameters."""
    program = require_program(graph)
    return np.unique([program.base(ref) for ref in program.gradients.values()]).astype(np.int32)


def _peak_bytes(problem: Problem, graph: OpGraph, devices: NDArray[np.int32]) -> list[int]:
    """Peak of each device in a simulated step, whether or not it fits."""
    free = dataclasses.replace(problem, graph=graph, allowed=None)
    return list(Simulator(free, threads=1).plan_and_time(devices)[1].peak_bytes)
