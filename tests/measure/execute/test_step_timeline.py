"""What a traced step says: when everything ran, in plan order, and what memory it held."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from machine_hosts import core_machines
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from placed_steps import GANG_HOST, HOST, assert_close, run_eager, run_placed
from small_models import CASES, mean_square, random
from torch import Tensor, nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.launch_code import StepCode
from rlplace.measure.execute.placed_step import allocated_bytes
from rlplace.measure.hosts.detect import detect_host
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan, Timeline


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_runs_as_planned(graph: OpGraph, host: Host, plan: Plan, timeline: Timeline) -> None:
    n, sources = graph.num_ops, graph.is_source
    start = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))
    end = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))
    assert np.all(start <= end)
    assert np.all(start >= 0)
    assert np.all(end[:n][sources] == 0)
    for tensor, op in zip(graph.input_tensors, graph.edge_op, strict=True):
        here = plan.devices[graph.tensor_op[tensor]] == plan.devices[op]
        of_copy = (plan.transfer_tensor == tensor) & (plan.transfer_destination == plan.devices[op])
        ready_s = end[graph.tensor_op[tensor]] if here else end[n + int(np.flatnonzero(of_copy)[0])]
        assert ready_s <= start[op]
    assert np.all(end[graph.tensor_op[plan.transfer_tensor]] <= timeline.transfer_start_s)
    for op, tensor in zip(graph.mutation_op, graph.mutation_tensor, strict=True):
        readers = graph.edge_op[graph.input_tensors == tensor]
        assert np.all(end[readers[readers != op]] <= start[op]) or not is_local(plan, readers, op)
        assert np.all(timeline.transfer_end_s[plan.transfer_tensor == tensor] <= start[op])
    cores = [[host.device_index[name] for name in device.members] or [d] for d, device in enumerate(host.devices)]
    where = np.concatenate((plan.devices, plan.transfer_destination))
    copies = {(route.source, route.destination) for route in host.routes if route.links}
    names = [device.name for device in host.devices]
    origin = plan.devices[graph.tensor_op[plan.transfer_tensor]]
    for core in range(host.num_devices):
        items = [
            item
            for item in plan.sequence.tolist()
            if core in cores[where[item]]
            and (not sources[item] if item < n else (names[origin[item - n]], names[where[item]]) in copies)
        ]
        assert np.all(end[items][:-1] <= start[items][1:]), "one item at a time, in plan order"


def is_local(plan: Plan, readers: NDArray[np.int32], op: int) -> bool:
    """Readers elsewhere may still work on their copy while the original is updated."""
    return bool(np.all(plan.devices[readers] == plan.devices[op]))


@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "buffers", "attention", "lstm_cell", "tied"])
@pytest.mark.parametrize("kind", ["plain", "gang"])
def test_a_timeline_keeps_every_rule(name: str, kind: str, crews: dict[str, Crew]) -> None:
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    host = {"plain": HOST, "gang": GANG_HOST}[kind]
    generator = np.random.default_rng(3)
    plan = naive_plan(graph, random_devices(graph, host.num_devices, generator), generator)
    _, step = run_placed(graph, host, plan, crews[kind], is_traced=True)
    timeline = step.timeline()
    assert_runs_as_planned(graph, host, plan, timeline)
    assert timeline.source == "measured"
    assert timeline.op_device.tolist() == plan.devices.tolist()
    assert timeline.transfer_source.tolist() == plan.devices[graph.tensor_op[plan.transfer_tensor]].tolist()


def test_memory_of_a_timeline_by_hand(crew: Crew) -> None:
    """y = relu(x w) on device 0, its sum on device 1: 8 bytes a number."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.weight).sum()

    graph = capture(Product(), random(3, 4))
    assert graph.targets[2:] == ("aten.mm.default", "aten.relu.default", "aten.sum.default")
    plan = naive_plan(graph, np.array([0, 0, 0, 0, 1], dtype=np.int32))
    _, step = run_placed(graph, HOST, plan, crew, is_traced=True)
    timeline = step.timeline()

    def levels(device: int) -> list[int]:
        return timeline.memory_bytes[timeline.memory_device == device].tolist()

    held = 8 * (4 * 6 + 3 * 4)
    # mm, relu; mm is freed when relu ends, relu when its copy has gone over
    assert levels(0) == [held, held + 144, held + 288, held + 144, held]
    # the copy of relu, the sum; the copy is freed when the sum ends, which stays
    assert levels(1) == [0, 144, 152, 8]
    freed_s = timeline.memory_time_s[timeline.memory_device == 0][-1]
    assert freed_s == timeline.transfer_end_s[0]


def test_scratch_memory_is_held_while_its_op_runs() -> None:
    """Of tanh, sin, cos and their sum, of 12 bytes each: sin takes 100 bytes more on this device, cos 40."""
    graph, begin_s, end_s = capture(Fork(), torch.ones(3)), np.arange(-1.0, 4.0).clip(0), np.arange(0.0, 5.0)
    plan = naive_plan(graph, np.zeros(5, dtype=np.int32))
    scratch = np.array([[0, 0], [0, 0], [100, 1], [40, 1], [0, 0]])
    code = StepCode(graph, HOST, plan)
    times_s, devices, levels = allocated_bytes(graph, HOST, plan, code, begin_s, end_s, scratch)
    held = list(zip(times_s[devices == 0].tolist(), levels[devices == 0].tolist(), strict=True))
    assert held == [
        *((0.0, 12), (0.0, 24), (1.0, 36), (1.0, 136)),
        *((2.0, 36), (2.0, 48), (2.0, 88), (3.0, 48), (3.0, 36), (3.0, 48)),
        *((4.0, 36), (4.0, 24)),
    ]


def test_optimizer_state_is_held_where_the_update_runs(crew: Crew) -> None:
    graph = capture(nn.Linear(4, 2, bias=False), torch.ones(3, 4), mean_square, "adam")
    plan = naive_plan(graph, np.where(graph.colocation >= 0, 1, 0).astype(np.int32))
    _, step = run_placed(graph, HOST, plan, crew, is_traced=True)
    timeline = step.timeline()
    start = [int(timeline.memory_bytes[timeline.memory_device == device][0]) for device in range(2)]
    assert start == [3 * 4 * 4, 4 * 8 + 2 * 4 * 8 + 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "attention", "lstm_cell", "constants", "dropout_zero"])
def test_a_gpu_and_the_cpu_share_a_step(name: str) -> None:
    host = detect_host(with_cpu=True)
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    crew, generator = Crew(host.devices), np.random.default_rng(0)
    plan = naive_plan(graph, random_devices(graph, host.num_devices, generator), generator)
    placed, step = run_placed(graph, host, plan, crew, is_traced=True)
    crew.stop()
    placed.losses = [loss.cpu() for loss in placed.losses]
    placed.state = {name: value.cpu() for name, value in placed.state.items()}
    assert_close(placed, run_eager(case, "adam"), 1e-6)
    timeline = step.timeline()
    runs = ~graph.is_source
    assert np.all(timeline.op_start_s[runs] <= timeline.op_end_s[runs])
    assert np.all(timeline.op_start_s >= -1e-3)
    assert np.all(timeline.transfer_start_s <= timeline.transfer_end_s)
    for device in range(host.num_devices):
        items = [op for op in plan.sequence.tolist() if op < graph.num_ops and runs[op] and plan.devices[op] == device]
        assert np.all(timeline.op_end_s[items][:-1] <= timeline.op_start_s[items][1:] + 1e-5)


class Fork(nn.Module):
    """One tensor that two ops read."""

    def forward(self, x: Tensor) -> Tensor:
        made = x.tanh()
        return made.sin() + made.cos()


def test_a_relay_and_the_maker_of_a_tensor_hold_it_until_each_has_sent_it() -> None:
    """Of 12 bytes: from device 0 to 2 until 5 s, from 2, which has read it by 6 s, to 3 until 9 s."""
    graph, host = capture(Fork(), torch.ones(3)), core_machines("aabb")
    assert [name.partition(".")[0] for name in graph.targets] == ["input", "aten", "aten", "aten", "aten"]
    plan = naive_plan(graph, np.array([0, 0, 2, 3, 3], dtype=np.int32))
    sent = list(zip(plan.transfer_tensor.tolist(), plan.transfer_destination.tolist(), strict=True))
    assert sent == [(1, 2), (1, 3), (2, 3)]
    begin_s = np.array([0.0, 0.0, 5.0, 9.0, 10.0, 1.0, 5.0, 6.0])
    end_s = np.array([0.0, 1.0, 6.0, 10.0, 11.0, 5.0, 9.0, 7.0])
    levels = zip(*allocated_bytes(graph, host, plan, StepCode(graph, host, plan), begin_s, end_s), strict=True)
    held = [(moment_s, int(device), int(level)) for moment_s, device, level in levels if device in (0, 2)]
    assert [each for each in held if each[1] == 0] == [(0.0, 0, 12), (0.0, 0, 24), (5.0, 0, 12)]
    assert [each for each in held if each[1] == 2] == [
        (0.0, 2, 0),
        (1.0, 2, 12),
        (5.0, 2, 24),
        (7.0, 2, 12),
        (9.0, 2, 0),
    ]
