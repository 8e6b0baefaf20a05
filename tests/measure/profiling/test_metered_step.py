"""What devices hold while a step runs: against peaks worked by hand, the simulator's, and those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from placed_steps import GANG_HOST, HOST, single
from small_models import step_graph
from torch import Tensor, nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.detect import detect_host
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.profiling.metered_step import MeteredStep
from rlplace.measure.profiling.profile import seen_workspaces
from rlplace.measure.simulate.simulator import Simulator

ELEMENTS = 1 << 10
SIZE = 4 * ELEMENTS
SCALAR = 4


class Chain(nn.Module):
    """`sum(exp(sin(x)))`: most is held while `exp` runs, `x`, `sin` and its own output.

    What a step returned is let go when the next one begins.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp().sum()


def chain() -> OpGraph:
    return capture(Chain(), torch.ones(ELEMENTS))


def metered(graph: OpGraph, host: Host, plan: Plan, crew: Crew, *, num_steps: int = 2) -> MeteredStep:
    step = MeteredStep(graph, host, plan, Residents(graph, host), crew, marks_ops=True)
    for number in range(num_steps):
        step.run(number)
    return step


def on(graph: OpGraph, devices: dict[str, int]) -> Plan:
    """Each op where its target's name says, the rest on the first device."""
    placed = [next((d for word, d in devices.items() if word in target), 0) for target in graph.targets]
    return naive_plan(graph, np.array(placed, dtype=np.int32))


@pytest.mark.parametrize(
    ("devices", "peaks"),
    [
        ({}, (3 * SIZE, 0)),
        ({"exp": 1, "sum": 1}, (2 * SIZE, 2 * SIZE)),
        ({"sum": 1}, (3 * SIZE, SIZE + SCALAR)),
        ({"exp": 1}, (2 * SIZE + SCALAR, 2 * SIZE)),
    ],
)
def test_peaks_worked_by_hand(devices: dict[str, int], peaks: Sequence[int], crew: Crew) -> None:
    graph = chain()
    step = metered(graph, HOST, on(graph, devices), crew)
    assert step.peak_bytes == tuple(peaks)
    assert torch.equal(step.result, Chain()(torch.ones(ELEMENTS)))


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_step_does_not_keep_what_the_last_one_returned(num_steps: int, crew: Crew) -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    graph = capture(Exp(), torch.ones(ELEMENTS))
    assert metered(graph, HOST, single(graph), crew, num_steps=num_steps).peak_bytes == (2 * SIZE, 0)


def test_what_an_op_needs_while_it_runs_is_its_outputs_and_what_it_takes_for_itself(crew: Crew) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, x).logsumexp(dim=1)

    graph = capture(Norm(), torch.randn(64, 8))
    needed = metered(graph, HOST, single(graph), crew).needed_bytes
    assert np.all(needed[graph.is_source] == 0)
    assert np.all(needed >= graph.output_bytes * ~graph.is_source)
    logsumexp = next(op for op, target in enumerate(graph.targets) if "logsumexp" in target)
    assert needed[logsumexp] == graph.output_bytes[logsumexp] + graph.workspace_bytes[logsumexp]


@pytest.mark.parametrize("name", ["linear", "batch_norm_train"])
def test_residents_are_what_the_graph_says(name: str, crew: Crew) -> None:
    graph = step_graph(name)
    before = metered(graph, HOST, single(graph), crew, num_steps=1)
    resident = int(graph.output_bytes[graph.is_source].sum() + graph.state_bytes.sum())
    assert resident <= before.peak_bytes[0] <= 3 * resident + int(graph.output_bytes.sum())


class Wide(nn.Module):
    """A stack of layers whose activations are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_on_one_device_it_is_what_plain_pytorch_holds(crew: Crew) -> None:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(2048, 64)
    graph = capture(model, x, torch.sum, "sgd")
    placed = metered(graph, HOST, single(graph), crew).peak_bytes[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            torch.sum(model(x)).backward()
            optimizer.step()
    resident = sum(t.nbytes for t in (x, *model.parameters()))
    eager = resident + int(np.cumsum([event.nbytes() for event in memory_events(profiler)]).max())
    assert placed == pytest.approx(eager, rel=0.05)


def memory_events(profiler: torch.profiler.profile) -> list[torch._C._autograd._KinetoEvent]:
    """Every block that was allocated or freed, in order of time."""
    results = profiler.profiler.kineto_results
    return sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns())


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("name", ["linear", "lstm_cell", "batch_norm_train", "attention"])
def test_on_one_device_it_is_what_is_simulated(name: str, optimizer: str, crew: Crew) -> None:
    """With the scratch that ops were seen to take; to within a few scalars that PyTorch makes of numbers."""
    graph = step_graph(name, optimizer)
    seen = seen_workspaces(graph, HOST, 0, Residents(graph, HOST), crew)[:, None].repeat(2, axis=1)
    costs = Costs(np.where(graph.is_source, 0.0, 1e-5)[:, None].repeat(2, axis=1), "profiled", seen)
    simulator = Simulator(Problem.grouped(graph, HOST, costs), threads=1)
    plan = simulator.plan(np.zeros(graph.num_ops, dtype=np.int32))
    held = metered(graph, HOST, plan, crew).peak_bytes[0]
    assert abs(held - simulator.retime(plan).peak_bytes[0]) <= 64


def test_handed_over_tensors_are_counted_once_in_all(crews: dict[str, Crew]) -> None:
    graph = chain()
    gang = len(GANG_HOST.devices) - 1
    step = metered(graph, GANG_HOST, on(graph, {"exp": gang}), crews["gang"])
    assert sum(step.peak_bytes) <= 3 * SIZE + SIZE + 3 * SCALAR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_it_is_what_its_allocator_counts() -> None:
    host = detect_host("cuda")
    graph = capture(Chain(), torch.ones(1 << 24))
    crew = Crew(host.devices)
    before = torch.cuda.memory_allocated()  # workspaces of libraries, which other tests of this process used
    try:
        step = metered(graph, host, single(graph), crew)
        assert step.peak_bytes[0] - before == pytest.approx(3 * 4 * (1 << 24), rel=0.1)
    finally:
        crew.stop()


def test_hosts_of_one_core_work(crew: Crew) -> None:
    host = core_host(1)
    alone = Crew(host.devices)
    try:
        graph = chain()
        assert metered(graph, host, single(graph), alone).peak_bytes == (3 * SIZE,)
    finally:
        alone.stop()
