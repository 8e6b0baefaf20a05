"""What a device map takes on each device, against sizes added by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from rlplace.export.device_map.format import device_memory, gradients_kept
from rlplace.graphs import capture
from rlplace.graphs.grouping.module_classes import module_classes
from rlplace.measure import Problem, Simulator
from rlplace.measure.hosts.resolve import resolve_host

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
    classes = module_classes(made.graph)
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
