"""A placed step is the eager step, wherever its ops run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from naive_plan import naive_plan, random_devices
from placed_steps import (
    GANG_HOST,
    HOST,
    NUM_STEPS,
    alternating,
    assert_close,
    assert_equal,
    run_eager,
    run_placed,
    single,
)
from small_models import CASES, Case, Dropouts, mean_square, random
from torch import Tensor, nn

from rlplace.graphs import capture
from rlplace.graphs.optimizers import OPTIMIZERS
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.detect import detect_host
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
