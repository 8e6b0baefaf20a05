"""A placed step is the eager step, wherever its ops run; and it fails without hanging."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from small_models import CASES, Case, Dropouts, mean_square, random
from torch import Tensor, nn

from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.graphs.capture import as_call
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS, torch_optimizer
from rlplace.measure import workers
from rlplace.measure.detect import detect_host
from rlplace.measure.host import Host
from rlplace.measure.measurement import Timeline
from rlplace.measure.placed_step import PlacedStep
from rlplace.measure.plan import Plan
from rlplace.measure.residents import Residents
from rlplace.measure.workers import Crew
from rlplace.workloads.registry import build, parse_workload

NUM_STEPS = 3
HOST = core_host(2)
GANG_HOST = core_host(2, has_gang=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[str, Crew]]:
    made = {"plain": Crew(HOST.devices), "gang": Crew(GANG_HOST.devices)}
    yield made
    for crew in made.values():
        crew.stop()


@pytest.fixture
def crew(crews: dict[str, Crew]) -> Crew:
    return crews["plain"]


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
        step.run(number, deadline_s=60.0)
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
        loss = case.loss_fn(model(*args, **kwargs))
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_random_placements_train_like_one_device_and_like_eager(
    name: str, optimizer: str, crews: dict[str, Crew]
) -> None:
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, optimizer)
    reference, _ = run_placed(graph, HOST, single(graph), crews["plain"])
    assert_close(reference, run_eager(case, optimizer), max(case.atol, 1e-6))
    for kind, host in (("plain", HOST), ("gang", GANG_HOST)):
        generator = np.random.default_rng(len(name))
        plan = naive_plan(graph, random_devices(graph, host.num_devices, generator), generator)
        placed, _ = run_placed(graph, host, plan, crews[kind])
        assert_equal(placed, reference)


@pytest.mark.parametrize("seed", range(5))
def test_many_orders_of_one_training_step(seed: int, crews: dict[str, Crew]) -> None:
    """Batch norm, counters and updates in place, in orders that no planner would choose."""
    case = CASES["batch_norm_train"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adamw")
    generator = np.random.default_rng(seed)
    plan = naive_plan(graph, random_devices(graph, 3, generator), generator)
    placed, _ = run_placed(graph, GANG_HOST, plan, crews["gang"])
    assert_equal(placed, run_placed(graph, HOST, single(graph), crews["plain"])[0])


def test_it_runs_on_this_machines_own_cores() -> None:
    host = detect_host("cores")
    case = CASES["attention"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "sgd")
    crew = Crew(host.devices)
    try:
        placed, _ = run_placed(graph, host, naive_plan(graph, alternating(graph, host.num_devices)), crew)
    finally:
        crew.stop()
    assert_close(placed, run_eager(case, "sgd"), 1e-6)


def in_float64(name: str) -> Case:
    """A workload without dropout."""
    workload = build(parse_workload(name))
    assert workload.loss_fn is not None
    model = workload.model.double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = tuple(x.double() if x.is_floating_point() else x for x in tuple(workload.inputs))
    return Case(model, inputs, workload.loss_fn)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("inception_v3@batch=2,image_size=75,classes=3", marks=pytest.mark.slow),
        "nmt@layers=2,units=8,vocab=11,steps=3,batch=2",
    ],
)
def test_a_workload_over_two_devices_trains_like_eager(name: str, crew: Crew) -> None:
    case = in_float64(name)
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    generator = np.random.default_rng(0)
    placed, _ = run_placed(graph, HOST, naive_plan(graph, random_devices(graph, 2, generator), generator), crew)
    assert_close(placed, run_eager(case, "adam"), 1e-6)


def alternating(graph: OpGraph, num_devices: int) -> NDArray[np.int32]:
    devices = np.arange(graph.num_ops, dtype=np.int32) % num_devices
    together = graph.colocation >= 0
    devices[together] = graph.colocation[together] % num_devices
    return devices


@pytest.mark.parametrize("seed", [0, 1])
def test_placement_does_not_change_dropout(seed: int, crew: Crew) -> None:
    model, x = Dropouts(0.5), random(16, 4)
    graph = capture(model, x, mean_square, "sgd")
    generator = np.random.default_rng(seed)
    plan = naive_plan(graph, random_devices(graph, 2, generator), generator)
    placed, _ = run_placed(graph, HOST, plan, crew, seed=seed)
    reference, _ = run_placed(graph, HOST, single(graph), crew, seed=seed)
    assert_equal(placed, reference)
    other, _ = run_placed(graph, HOST, single(graph), crew, seed=seed + 2)
    assert not torch.equal(other.losses[0], reference.losses[0])


def test_every_step_draws_anew_and_the_users_generator_stays_as_it_was(crew: Crew) -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.rand_like(x), torch.rand(x.shape)

    graph = capture(Draws(), torch.ones(4))
    before = torch.get_rng_state()
    step = PlacedStep(graph, HOST, single(graph), Residents(graph, HOST), crew)
    drawn = []
    for number in (0, 1, 0):
        step.run(number)
        drawn.append([value.clone() for value in step.result])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[2]))
    assert not torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))
    assert not torch.equal(drawn[0][0], drawn[0][1]), "ops draw apart"


def test_inference_returns_what_the_model_returns(crew: Crew) -> None:
    model = nn.LSTM(4, 5, dtype=torch.float64)
    x = random(3, 2, 4)
    graph = capture(model, x)
    step = PlacedStep(graph, HOST, naive_plan(graph, alternating(graph, 2)), Residents(graph, HOST), crew)
    step.run()
    output, (hidden, cell) = step.result
    expected_output, (expected_hidden, expected_cell) = model(x)
    for actual, expected in ((output, expected_output), (hidden, expected_hidden), (cell, expected_cell)):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-9, atol=1e-9)


def test_plans_that_share_residents_train_one_model(crew: Crew) -> None:
    case = CASES["tied"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    residents = Residents(graph, HOST)
    plans = [single(graph), naive_plan(graph, alternating(graph, 2))]
    steps = [PlacedStep(graph, HOST, plan, residents, crew) for plan in plans]
    losses = []
    for number in range(NUM_STEPS):
        steps[number % 2].run(number)
        losses.append(steps[number % 2].result.clone())
    expected = run_eager(case, "adam").losses
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_a_parameter_is_copied_before_it_is_updated(crew: Crew) -> None:
    """Its reader runs elsewhere, late; the gradient does not need that reader, so only the wait keeps them in order."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            late = x
            for _ in range(20):
                late = torch.tanh(late @ late)
            with torch.no_grad():
                late = late @ self.weight
            return (self.weight * x).sum() + late.sum()

    graph = capture(Late(), random(64, 64), lambda y: y, "sgd")
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    late = [op for op in range(graph.num_ops) if graph.targets[op] in ("aten.mm.default", "aten.tanh.default")]
    devices[late] = 1
    plan = naive_plan(graph, devices)
    assert [graph.names[graph.tensor_op[tensor]] for tensor in plan.transfer_tensor][:1] == ["weight"]
    reference, _ = run_placed(graph, HOST, single(graph), crew)
    for _ in range(3):
        assert_equal(run_placed(graph, HOST, plan, crew)[0], reference)


# What a traced step says


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
            item for item in plan.sequence.tolist()
            if core in cores[where[item]]
            and (not sources[item] if item < n else (names[origin[item - n]], names[where[item]]) in copies)
        ]  # fmt: skip
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


# What goes wrong


switches: dict[str, bool | threading.Event] = {"fails": False}


@torch.library.custom_op("rlplace_tests::checked", mutates_args=())
def checked(x: Tensor) -> Tensor:
    if switches["fails"] is True:
        raise ValueError("boom")
    if isinstance(switches["fails"], threading.Event):
        switches["fails"].wait(timeout=60)
    return x.clone()


@checked.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checked(x * 2) + 1


@pytest.fixture
def _off_again() -> Iterator[None]:
    yield
    switches["fails"] = False


def checked_step(crew: Crew, devices: list[int], *, is_traced: bool = False) -> PlacedStep:
    """Ops: input, mul, checked, add."""
    graph = capture(Checked(), torch.ones(3))
    plan = naive_plan(graph, np.array(devices, dtype=np.int32))
    return PlacedStep(graph, HOST, plan, Residents(graph, HOST), crew, is_traced=is_traced)


@pytest.mark.usefixtures("_off_again")
@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_a_failing_op_is_named_and_the_step_runs_again_afterwards(devices: list[int], crew: Crew) -> None:
    step, other = checked_step(crew, devices), checked_step(crew, [1, 0, 1, 0])
    for _ in range(2):
        switches["fails"] = True
        with pytest.raises(RunnerError) as failed:
            step.run(deadline_s=60.0)
        assert failed.value.op == "checked"
        message = str(failed.value)
        assert message == f"op 'checked' (rlplace_tests.checked.default) on cpu:{devices[2]}: ValueError: boom"
        assert isinstance(failed.value.__cause__, ValueError)
        switches["fails"] = False
        for runs in (other, step):
            runs.run(deadline_s=60.0)
            assert runs.result.tolist() == [3.0] * 3


@pytest.mark.usefixtures("_off_again")
def test_a_failure_does_not_keep_tensors_alive(crew: Crew) -> None:
    step = checked_step(crew, [0, 0, 0, 0])
    switches["fails"] = True
    with pytest.raises(RunnerError) as failed:
        step.run()
    cause = failed.value.__cause__
    assert cause is not None
    traceback = cause.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith("<placed step"):
            assert not any(isinstance(value, Tensor) for value in traceback.tb_frame.f_locals.values())
        traceback = traceback.tb_next


@pytest.mark.usefixtures("_off_again")
def test_a_stuck_op_is_a_timeout_and_everything_runs_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 0.05)
    crew = Crew(HOST.devices)
    step, other = checked_step(crew, [0, 0, 1, 0]), checked_step(crew, [1, 1, 0, 1])
    stuck = threading.Event()
    switches["fails"] = stuck
    with pytest.raises(TimeoutError, match="did not end its part"):
        step.run(deadline_s=0.2)
    switches["fails"] = False
    for runs in (other, step):
        runs.run(deadline_s=60.0)
        assert runs.result.tolist() == [3.0] * 3
    stuck.set()  # the thread left behind goes on, with channels of its own
    step.run(deadline_s=60.0)
    assert step.result.tolist() == [3.0] * 3
    crew.stop()


def test_an_op_that_cannot_run_where_it_is_says_so(crew: Crew) -> None:
    """Captured for shapes that the values behind it do not have: the failure is the op's, not ours."""
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4))
    residents = Residents(graph, HOST)
    step = PlacedStep(graph, HOST, single(graph), residents, crew)
    residents.tensor(graph.names.index("input_0"), 0).resize_(3, 5)
    with pytest.raises(RunnerError, match=r"op 'addmm' \(aten.addmm.default\) on cpu:0: RuntimeError"):
        step.run()
