"""`device_memory`: what a step of a device map takes on each device, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.export.device_map.places import Place
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator


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
