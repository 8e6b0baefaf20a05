"""A placed step is the eager step wherever its ops run; it is loaded, traced, and fails by name."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import process_host
from faulty_ops import switched_graph
from gpu_hosts import NEEDS_GPU, WORDS, on_gpus
from machine_hosts import core_machines
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from placed_steps import (
    GANG_HOST,
    HOST,
    NUM_STEPS,
    Run,
    alternating,
    assert_close,
    assert_equal,
    run_eager,
    run_placed,
    single,
)
from rank_threads import rank_residents, rank_threads
from small_models import CASES, Case, Dropouts, mean_square, random, step_graph
from torch import Tensor, nn

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.export import matching_host
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import BACKWARD, OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS
from rlplace.measure.execute import device_threads
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.launch_code import StepCode
from rlplace.measure.execute.placed_step import PlacedStep, allocated_bytes
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.detect import detect_host
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement
from rlplace.measure.problem import Plan, Timeline
from rlplace.workloads import build, parse_workload


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_random_placements_train_like_one_device_and_like_eager(
    name: str, optimizer: str, crews: dict[str, Crew]
) -> None:
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, optimizer, targets=case.targets)
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
    graph = step_graph("batch_norm_train", "adamw")
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


def test_fused_attention_over_two_devices_trains_like_eager(crew: Crew) -> None:
    """Its forward and its backward on different devices, too."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    case = Case(model, random(3, 5, 8), mean_square)
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    expected = run_eager(case, "adam")
    forwards = [op for op in range(graph.num_ops) if graph.targets[op] == "rlplace.attention.default"]
    assert len(forwards) == 2
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    devices[forwards] = 1
    for plan in (
        naive_plan(graph, devices),
        *(naive_plan(graph, random_devices(graph, 2, np.random.default_rng(seed))) for seed in range(2)),
    ):
        assert_close(run_placed(graph, HOST, plan, crew)[0], expected, 1e-6)


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


def switched_step(crew: Crew, devices: list[int]) -> PlacedStep:
    graph = switched_graph()
    plan = naive_plan(graph, np.array(devices, dtype=np.int32))
    return PlacedStep(graph, HOST, plan, Residents(graph, HOST), crew)


@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_a_failing_op_is_named_and_the_step_runs_again_afterwards(
    devices: list[int], crew: Crew, switch: dict[str, Any]
) -> None:
    step, other = switched_step(crew, devices), switched_step(crew, [1, 0, 1, 0])
    op = "op 'switched' (rlplace_tests_faults.switched.default)"
    for _ in range(2):
        switch["fails"] = ValueError("boom")
        with pytest.raises(RunnerError) as failed:
            step.run()
        assert failed.value.op == "switched"
        assert str(failed.value) == f"{op} on cpu:{devices[2]}: ValueError: boom"
        assert isinstance(failed.value.__cause__, ValueError)
        switch["fails"] = None
        for runs in (other, step):
            runs.run()
            assert runs.result.tolist() == [3.0] * 3


def test_a_failure_does_not_keep_tensors_alive(crew: Crew, switch: dict[str, Any]) -> None:
    step = switched_step(crew, [0, 0, 0, 0])
    switch["fails"] = ValueError("boom")
    with pytest.raises(RunnerError) as failed:
        step.run()
    cause = failed.value.__cause__
    traceback = cause.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith("<placed step"):
            assert not any(isinstance(value, Tensor) for value in traceback.tb_frame.f_locals.values())
        traceback = traceback.tb_next


def test_a_stuck_op_is_a_timeout_and_everything_runs_again_afterwards(
    switch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_threads, "GRACE_S", 0.05)
    crew, stuck = Crew(HOST.devices), threading.Event()
    step, other = switched_step(crew, [0, 0, 1, 0]), switched_step(crew, [1, 1, 0, 1])
    switch["fails"] = stuck
    with pytest.raises(TimeoutError, match="did not end its part"):
        step.run(deadline_s=0.2)
    switch["fails"] = None
    for runs in (other, step):
        runs.run()
        assert runs.result.tolist() == [3.0] * 3
    stuck.set()  # the thread left behind goes on, with channels of its own
    step.run()
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


def training(name: str = "batch_norm_train") -> OpGraph:
    torch.manual_seed(0)
    return step_graph(name)


def step_of(graph: OpGraph, gang: Crew, *, is_traced: bool = False) -> tuple[PlacedStep, Residents]:
    residents = Residents(graph, GANG_HOST)
    plan = naive_plan(graph, alternating(graph, 3))
    return PlacedStep(graph, GANG_HOST, plan, residents, gang, is_traced=is_traced), residents


@pytest.fixture
def gang(crews: dict[str, Crew]) -> Crew:
    return crews["gang"]


def test_it_is_loaded_when_it_first_runs_or_before(gang: Crew) -> None:
    step, residents = step_of(training(), gang)
    assert not step.is_loaded
    assert residents.made == frozenset(), "nothing is held before"
    step.run()
    assert step.is_loaded
    assert residents.made == step.needs
    other, residents = step_of(training(), gang)
    other.load()
    assert other.is_loaded
    assert residents.made == other.needs


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True])
def test_unloading_lets_go_of_every_tensor(is_traced: bool, gang: Crew) -> None:
    """By reference counts alone: memory is needed now, not when a collector comes by."""
    step, residents = step_of(training(), gang, is_traced=is_traced)
    step.run()
    tensors = [weakref.ref(residents.tensor(op, 0)) for op in require_program(step._graph).sources]
    states = [weakref.ref(state.moments[0]) for state in residents._states.values()]
    result = weakref.ref(step.result)
    gc.collect()
    gc.disable()
    try:
        step.unload()
        assert result() is None
        assert all(each() is not None for each in tensors), "they are there for others"
        residents.keep_only(())
        assert [each() for each in (*tensors, *states)] == [None] * (len(tensors) + len(states))
    finally:
        gc.enable()


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("has_ranks", [False, True])
def test_a_step_that_is_gone_has_let_go_of_every_tensor(is_traced: bool, has_ranks: bool, gang: Crew) -> None:
    """By reference counts alone: the collector would free them in any thread, and late."""
    graph, host = training(), process_host(3) if has_ranks else GANG_HOST
    with rank_threads(graph, host) if has_ranks else contextlib.nullcontext(gang) as workers:
        residents = rank_residents(graph, host, workers) if has_ranks else Residents(graph, host)
        plan = naive_plan(graph, alternating(graph, 3))
        step = PlacedStep(graph, host, plan, residents, workers, is_traced=is_traced)
        step.run()
        held = [residents._tensors.values(), (state.moments[0] for state in residents._states.values())]
        tensors = [weakref.ref(each) for own in held for each in own] + [weakref.ref(step.result)]
        gc.collect()
        gc.disable()
        try:
            del step, residents, held
            assert [each() for each in tensors] == [None] * len(tensors)
        finally:
            gc.enable()


def test_it_goes_on_where_it_was_if_its_residents_stayed(gang: Crew) -> None:
    graph = training()
    losses: dict[bool, list[Tensor]] = {}
    for is_unloaded in (False, True):
        step, _ = step_of(graph, gang)
        losses[is_unloaded] = []
        for number in range(3):
            step.run(number)
            losses[is_unloaded].append(step.result.clone())
            if is_unloaded:
                step.unload()
                assert not step.is_loaded
    assert all(torch.equal(*pair) for pair in zip(losses[False], losses[True], strict=True))
    assert len({float(loss) for loss in losses[True]}) == 3


def test_residents_made_anew_are_as_at_capture(gang: Crew) -> None:
    step, residents = step_of(training(), gang)
    losses = []
    for _ in range(2):
        step.run(0)
        losses.append(step.result.clone())
        step.unload()
        residents.keep_only(())
    assert torch.equal(*losses)


def test_there_is_no_last_step_to_tell_about_when_it_is_not_loaded(gang: Crew) -> None:
    step, _ = step_of(training(), gang, is_traced=True)
    for _ in range(2):
        with pytest.raises(RunnerError, match="not loaded"):
            _ = step.result
        with pytest.raises(RunnerError, match="not loaded"):
            step.timeline()
        step.run()
        assert np.any(step.timeline().op_end_s > 0)
        step.unload()


def test_a_step_that_cannot_be_loaded_holds_nothing_and_says_why(gang: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()
    step, residents = step_of(graph, gang)
    make, made = residents._original, []

    def original(op: int) -> Tensor:
        if len(made) == 3:
            raise torch.OutOfMemoryError("no memory for parameters")
        made.append(weakref.ref(make(op)))
        return make(op)

    monkeypatch.setattr(residents, "_original", original)
    with pytest.raises(RunnerError, match="could not be loaded: OutOfMemoryError: no memory for parameters") as failed:
        step.run()
    assert isinstance(failed.value.__cause__, torch.OutOfMemoryError)
    assert not step.is_loaded
    kept = [weakref.ref(tensor) for tensor in residents._tensors.values()]
    residents.keep_only(())
    assert [each() for each in kept] == [None] * 3, "the error does not hold them either"
    monkeypatch.setattr(residents, "_original", make)
    step.run()
    assert torch.isfinite(step.result)


def test_what_it_needs_is_where_its_ops_are(gang: Crew) -> None:
    graph = training("linear")
    step = PlacedStep(graph, GANG_HOST, single(graph), Residents(graph, GANG_HOST), gang)
    updates = [op for op, target in enumerate(graph.targets) if target.startswith("update.")]
    assert step.needs == {(op, "cpu") for op in (*require_program(graph).sources, *updates)}


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
    graph = step_graph(name)
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


def run_on(host: Host, graph: OpGraph, plan: Plan) -> Run:
    crew = Crew(host.devices)
    try:
        run, _ = run_placed(graph, host, plan, crew)
    finally:
        crew.stop()
    return Run([loss.cpu() for loss in run.losses], {name: value.cpu() for name, value in run.state.items()})


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


@on_a_gpu
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "attention", "lstm_cell", "constants"])
def test_a_step_is_the_eager_one_wherever_its_ops_are(word: str, name: str) -> None:
    host, case = on_gpus(word), CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    plan = naive_plan(graph, alternating(graph, host.num_devices))
    assert plan.num_transfers > 0
    assert_close(run_on(host, graph, plan), run_eager(case, "adam"), 1e-6)


@on_a_gpu
@pytest.mark.parametrize("word", WORDS)
def test_the_backward_may_run_elsewhere_than_the_forward(word: str) -> None:
    host, case = on_gpus(word), CASES["attention"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    is_backward = (graph.phases == BACKWARD) & (graph.colocation < 0)
    for forward, backward in ((0, host.num_devices - 1), (host.num_devices - 1, 0)):
        plan = naive_plan(graph, np.where(is_backward, backward, forward).astype(np.int32))
        assert_close(run_on(host, graph, plan), run_eager(case, "adam"), 1e-6)


@on_a_gpu
@pytest.mark.parametrize("word", ["cuda", "cuda/2", "cuda/4"])
def test_dropout_is_the_same_wherever_it_is_among_gpus(word: str) -> None:
    host = on_gpus(word)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.2)).double()
    graph = capture(model, random(4, 8), mean_square, "sgd")
    expected = run_on(host, graph, single(graph))
    for first in range(host.num_devices):
        devices = (alternating(graph, host.num_devices) + first) % host.num_devices
        assert_close(run_on(host, graph, naive_plan(graph, devices)), expected, 1e-9)


@on_a_gpu
@pytest.mark.parametrize("word", WORDS)
def test_the_host_of_a_placement_is_found_again(word: str) -> None:
    host = on_gpus(word)
    assert {device.backend for device in host.devices} == ({"cuda", "cpu"} if "+" in word else {"cuda"})
    assert all(0 <= device.context_bytes < device.memory_bytes for device in host.devices)
    plan = Plan(*(np.zeros(0, dtype=np.int32) for _ in range(4)))
    names = tuple(device.name for device in host.devices)
    assert matching_host(Placement(plan, "graph", host.fingerprint, names)).fingerprint == host.fingerprint


@on_a_gpu
def test_a_wait_that_nobody_asked_for_is_seen() -> None:
    number = torch.ones(1, device="cuda")
    with cuda.forbid_waits(), pytest.raises(RuntimeError):
        number.item()
    assert number.item() == 1.0
