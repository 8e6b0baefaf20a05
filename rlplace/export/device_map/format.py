"""`DEVICE_MAP`: the export format of that name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rlplace.errors import InvalidValue
from rlplace.export.captured import CapturedRun
from rlplace.export.device_map.cache import cache_by_module
from rlplace.export.device_map.memory import DeviceMemory, device_memory
from rlplace.export.device_map.places import CPU, Place, map_places
from rlplace.export.device_map.projection import Projection, device_map, project
from rlplace.export.registry import Exported, ExportFormat, ExportRequest
from rlplace.graphs.interpreter import require_program
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.format import format_bytes, format_ms
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
