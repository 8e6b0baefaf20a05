"""Placed steps on two core devices, with and without a gang of both, and the eager steps that they are held against."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from numpy.typing import NDArray
from small_models import Case
from torch import Tensor

from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS, torch_optimizer
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan

NUM_STEPS = 3
HOST = core_host(2)
GANG_HOST = core_host(2, has_gang=True)


@dataclass
class Run:
    """Losses and last state of some steps."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def run_placed(
    graph: OpGraph, host: Host, plan: Plan, crew: Crew, *, seed: int = 0, is_traced: bool = False
) -> tuple[Run, PlacedStep]:
    residents = Residents(graph, host)
    step = PlacedStep(graph, host, plan, residents, crew, seed=seed, is_traced=is_traced)
    run = Run()
    for number in range(NUM_STEPS):
        step.run(number)
        run.losses.append(step.result.clone().reshape(()))
    for op, source in require_program(graph).sources.items():
        if source.kind in ("parameter", "buffer"):
            run.state[source.key] = residents.tensor(op, int(plan.devices[op]))
    return run, step


def run_eager(case: Case, optimizer: str) -> Run:
    model, inputs = copy.deepcopy((case.model, case.inputs))
    args, kwargs = as_call(inputs)
    stepper = torch_optimizer(OPTIMIZERS[optimizer], [p for p in model.parameters() if p.requires_grad])
    run = Run()
    for _ in range(NUM_STEPS):
        stepper.zero_grad()
        loss = case.loss_fn(model(*args, **kwargs), *case.targets)
        loss.backward()
        stepper.step()
        run.losses.append(loss.detach().reshape(()))
    run.state = {name: value.detach() for name, value in model.named_parameters()} | dict(model.named_buffers())
    return run


def assert_equal(actual: Run, expected: Run) -> None:
    """To the bit."""
    assert all(torch.equal(one, other) for one, other in zip(actual.losses, expected.losses, strict=True))
    assert actual.state.keys() == expected.state.keys()
    assert all(torch.equal(actual.state[name], expected.state[name]) for name in expected.state)


def assert_close(actual: Run, expected: Run, tolerance: float) -> None:
    for one, other in zip(actual.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert actual.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        torch.testing.assert_close(actual.state[name], value, rtol=tolerance, atol=tolerance)


def single(graph: OpGraph) -> Plan:
    return naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))


def alternating(graph: OpGraph, num_devices: int) -> NDArray[np.int32]:
    devices = np.arange(graph.num_ops, dtype=np.int32) % num_devices
    together = graph.colocation >= 0
    devices[together] = graph.colocation[together] % num_devices
    return devices
