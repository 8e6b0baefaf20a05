"""A small classifier, its batches, placed steps and modules of it on two core devices: for tests of training loops."""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from core_hosts import core_host
from naive_plan import naive_plan
from placed_steps import alternating
from torch import Tensor, nn
from torch.nn import functional

from rlplace.export import PlacedModel, PlacedModule, to_module
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Placement, Plan

HOST = core_host(2)
Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Layers with batch norm and dropout, a layer that is frozen, and one that nobody reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(self.frozen(x))))
        out: Tensor = self.second(self.dropout(hidden))
        return out


def classifier(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(dropout).to(dtype)


def batches(count: int, size: int = 5, seed: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def captured(model: nn.Module, optimizer: Any = None, **options: Any) -> OpGraph:
    (x, labels), *_ = batches(1)
    return capture(model, x, functional.cross_entropy, optimizer, targets=labels, **options)


def apart(graph: OpGraph) -> Plan:
    """Neighbouring ops on different devices."""
    return naive_plan(graph, alternating(graph, 2))


def placed(graph: OpGraph, **options: Any) -> PlacedModel:
    return PlacedModel(graph, HOST, apart(graph), **options)


def placement_of(graph: OpGraph) -> Placement:
    names = tuple(device.name for device in HOST.devices)
    return Placement(apart(graph), graph.fingerprint, HOST.fingerprint, names)


def module_of(model: nn.Module, graph: OpGraph | None = None) -> PlacedModule:
    graph = captured(model, "adam") if graph is None else graph
    return to_module(model, graph, placement_of(graph), host=HOST)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def gradients(named: Iterator[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    return {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in named}


def in_a_fork(call: Callable[[], Tensor]) -> Any:
    """What a call gives in a forked process: its values, or the kind of its error and what it says."""
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)

    def run() -> None:
        try:
            sending.send(call().tolist())
        except Exception as error:
            sending.send((type(error), str(error)))

    process = fork.Process(target=run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        process.start()
    try:
        assert receiving.poll(60), "it hangs"
        return receiving.recv()
    finally:
        process.kill()
        process.join()
