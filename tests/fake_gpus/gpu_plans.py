"""Hosts of made-up GPUs, captured training steps, and random plans for the two."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from core_hosts import core_device, core_host
from naive_plan import random_devices
from placed_steps import Run, run_placed, single
from small_models import CASES, Case, Dropouts, mean_square, random

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.wiring import Wiring, lay_routes
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.workers import Crew
from rlplace.measure.simulate.simulator import Simulator

MODELS = {
    **{name: CASES[name] for name in (
        *("linear", "batch_norm_train", "batch_norm_shared", "tied", "buffers", "attention_causal", "gru", "pooling"),
        *("split", "writes", "input_changed", "integers", "transposed_gradient", "targets", "constants"),
    )},
    "dropout": lambda: Case(Dropouts(0.5), random(16, 4), mean_square),
}
"""Training steps with batch norm, dropout, updates in place, views, embeddings, random numbers and constants."""


@dataclass(frozen=True)
class Setting:
    """A step, a host and two plans for them."""

    name: str
    model: str
    optimizer: str
    graph: OpGraph
    host: Host
    plans: tuple[Plan, ...]


def gpu_host(names: tuple[str, ...]) -> Host:
    """Devices as they are called: `cuda:1/0` is part of a GPU, `cpu` the processor; each pair has a wire of its own."""
    devices = tuple(
        core_device(name) if name == "cpu" else Device(name, "gpu", "cuda", memory_bytes=1 << 30, dispatcher="python")
        for name in names
    )
    wiring = [Wiring("pcie", 1e10, 1e-6, ports=names)] if len(names) > 1 else []
    links, routes = lay_routes(wiring, names, "test")
    return Host("fake", devices, links, routes, dispatch_s=1e-6, copy_dispatch_s=1e-6)


def random_host(generator: np.random.Generator) -> Host:
    """1 to 8 devices, up to four of them parts of one GPU; half the time with the CPU."""
    names: list[str] = []
    count, gpu = int(generator.integers(1, 9)), 0
    while len(names) < count:
        parts = min(int(generator.choice((1, 1, 2, 4))), count - len(names))
        names += [f"cuda:{gpu}"] if parts == 1 else [f"cuda:{gpu}/{part}" for part in range(parts)]
        gpu += 1
    return gpu_host((*names, *(["cpu"] if generator.random() < 0.5 else [])))


@functools.cache
def graph_of(model: str, optimizer: str) -> OpGraph:
    torch.manual_seed(0)
    case = MODELS[model]()
    return capture(case.model, case.inputs, case.loss_fn, optimizer, targets=case.targets)


def random_plans(graph: OpGraph, host: Host, generator: np.random.Generator, count: int) -> tuple[Plan, ...]:
    """As the simulator plans random placements with random priorities; what steps change stays in one place."""
    shape = (graph.num_ops, host.num_devices)
    problem = Problem.grouped(graph, host, Costs(generator.random(shape) * 1e-5 + 1e-6, "estimated"))
    simulator = Simulator(problem, threads=1)
    num_used = int(generator.choice((1, host.num_devices, host.num_devices)))  # or some would never do nothing
    home = random_devices(graph, num_used, generator)
    stays = (graph.colocation >= 0) | np.isin(np.arange(graph.num_ops), graph.tensor_op[graph.mutation_tensor])
    plans = []
    for _ in range(count):
        devices = np.where(stays, home, random_devices(graph, num_used, generator)).astype(np.int32)
        plans.append(simulator.plan(devices, generator.random(graph.num_ops)))
    return tuple(plans)


def random_setting(seed: int) -> Setting:
    """The same one for the same seed."""
    generator = np.random.default_rng(seed)
    model = str(generator.choice(list(MODELS)))
    optimizer = str(generator.choice(list(OPTIMIZERS)))
    graph, host = graph_of(model, optimizer), random_host(generator)
    plans = random_plans(graph, host, generator, 2)
    names = " ".join(device.name for device in host.devices)
    return Setting(f"{seed}: {model}, {optimizer} on {names}", model, optimizer, graph, host, plans)


@functools.cache
def expected_run(model: str, optimizer: str) -> Run:
    """The same step on one CPU core."""
    host, graph = core_host(1), graph_of(model, optimizer)
    crew = Crew(host.devices)
    try:
        return run_placed(graph, host, single(graph), crew)[0]
    finally:
        crew.stop()
