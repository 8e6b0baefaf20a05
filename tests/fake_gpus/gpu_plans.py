"""Hosts of made-up GPUs, captured training steps, and random plans for the two."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from core_hosts import core_device, core_host
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from placed_steps import Run, run_placed, single
from small_models import CASES, Case, Dropouts, mean_square, random
from torch import nn

from rlplace.graphs import SplitPlan, capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.host_file import Wiring, lay_routes
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator

MODELS = {
    **{
        name: CASES[name]
        for name in (
            *(
                "linear",
                "batch_norm_train",
                "batch_norm_shared",
                "tied",
                "buffers",
                "attention_causal",
                "gru",
                "pooling",
            ),
            *("split", "writes", "input_changed", "integers", "transposed_gradient", "targets", "constants"),
        )
    },
    "two_layers": lambda: Case(two_layers(), random(3, 4), mean_square),
    "dropout": lambda: Case(Dropouts(0.5), random(16, 4), mean_square),
}
"""Training steps with batch norm, dropout, updates in place, views, embeddings, random numbers and constants."""


def two_layers() -> nn.Module:
    """The second weight is read once more for the first one's gradient, of which its own update needs nothing."""
    return nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 2, dtype=torch.float64))


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


def host_of_machines(count: int) -> Host:
    """So many GPUs, each a process: the first on a machine of its own, the others on another."""
    host = gpu_host(tuple(f"cuda:{gpu}" for gpu in range(count))).as_processes("machines")
    devices = (replace(device, machine="b" if gpu else "a") for gpu, device in enumerate(host.devices))
    return replace(host, devices=tuple(devices))


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
    """Of random placements, what steps change in one place: as the simulator plans with random priorities, and orders
    that no planner would choose.
    """
    shape = (graph.num_ops, host.num_devices)
    problem = Problem.grouped(graph, host, Costs(generator.random(shape) * 1e-5 + 1e-6, "estimated"))
    simulator = Simulator(problem, threads=1)
    num_used = int(generator.choice((1, host.num_devices, host.num_devices)))  # or some would never do nothing
    home = random_devices(graph, num_used, generator)
    stays = (graph.colocation >= 0) | np.isin(np.arange(graph.num_ops), graph.tensor_op[graph.mutation_tensor])
    plans = []
    for _ in range(count):
        devices = np.where(stays, home, random_devices(graph, num_used, generator)).astype(np.int32)
        is_planned = generator.random() < 0.5
        priorities = generator.random(graph.num_ops)
        plans.append(simulator.plan(devices, priorities) if is_planned else naive_plan(graph, devices, generator))
    return tuple(plans)


def random_setting(seed: int) -> Setting:
    """The same one for the same seed."""
    generator = np.random.default_rng(seed)
    model, optimizer = str(generator.choice(list(MODELS))), str(generator.choice(list(OPTIMIZERS)))
    return setting_of(model, optimizer, random_host(generator), seed)


def setting_of(model: str, optimizer: str, host: Host, seed: int = 0) -> Setting:
    """A step on a host, with two random plans."""
    graph = graph_of(model, optimizer)
    names = " ".join(device.name for device in host.devices)
    plans = random_plans(graph, host, np.random.default_rng(seed), 2)
    return Setting(f"{seed}: {model}, {optimizer} on {names}", model, optimizer, graph, host, plans)


def late_copy() -> Setting:
    """A parameter that another GPU reads for what its update does not need: only the wait for the copy orders them."""
    graph = graph_of("two_layers", "momentum")
    devices, priorities = np.zeros(graph.num_ops, dtype=np.int32), np.zeros(graph.num_ops)
    devices[graph.names.index("mm")], priorities[graph.names.index("update_2.weight")] = 1, 1
    return _on_two_gpus("late copy", graph, devices, priorities)


def input_elsewhere() -> Setting:
    """All on one GPU but for the input."""
    graph = graph_of("two_layers", "momentum")
    devices = np.array([int(target != "input") for target in graph.targets], dtype=np.int32)
    return _on_two_gpus("input elsewhere", graph, devices, np.zeros(graph.num_ops))


def split_layers() -> Setting:
    """Two layers whose hidden width is split over two GPUs."""
    torch.manual_seed(0)
    case, host = MODELS["two_layers"](), gpu_host(("cuda:0", "cuda:1"))
    split = SplitPlan(("mlp",), 2)
    graph = capture(case.model, case.inputs, case.loss_fn, "momentum", targets=case.targets, split=split)
    plans = random_plans(graph, host, np.random.default_rng(0), 1)
    return Setting("split layers", "two_layers", "momentum", graph, host, plans)


def _on_two_gpus(name: str, graph: OpGraph, devices: NDArray[np.int32], priorities: NDArray[np.float64]) -> Setting:
    host = gpu_host(("cuda:0", "cuda:1"))
    problem = Problem.grouped(graph, host, Costs(np.full((graph.num_ops, 2), 1e-5), "estimated"))
    plan = Simulator(problem, threads=1).plan(devices, priorities)
    return Setting(name, "two_layers", "momentum", graph, host, (plan,))


@functools.cache
def expected_run(model: str, optimizer: str) -> Run:
    """The same step on one CPU core."""
    host, graph = core_host(1), graph_of(model, optimizer)
    crew = Crew(host.devices)
    try:
        return run_placed(graph, host, single(graph), crew)[0]
    finally:
        crew.stop()
