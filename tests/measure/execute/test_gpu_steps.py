"""Steps over real GPUs, parts of them and the CPU are the eager ones; what each device keeps and draws is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_hosts import NEEDS_GPU, WORDS, on_gpus
from naive_plan import naive_plan
from placed_steps import Run, alternating, assert_close, run_eager, run_placed, single
from small_models import CASES, mean_square, random
from torch import nn

from rlplace import cuda
from rlplace.export import matching_host
from rlplace.graphs import OpGraph, capture
from rlplace.graphs.opgraph import BACKWARD
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement
from rlplace.measure.problem import Plan

pytestmark = NEEDS_GPU


def run_on(host: Host, graph: OpGraph, plan: Plan) -> Run:
    crew = Crew(host.devices)
    try:
        run, _ = run_placed(graph, host, plan, crew)
    finally:
        crew.stop()
    return Run([loss.cpu() for loss in run.losses], {name: value.cpu() for name, value in run.state.items()})


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "attention", "lstm_cell", "constants"])
def test_a_step_is_the_eager_one_wherever_its_ops_are(word: str, name: str) -> None:
    host, case = on_gpus(word), CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    plan = naive_plan(graph, alternating(graph, host.num_devices))
    assert plan.num_transfers > 0
    assert_close(run_on(host, graph, plan), run_eager(case, "adam"), 1e-6)


@pytest.mark.parametrize("word", WORDS)
def test_the_backward_may_run_elsewhere_than_the_forward(word: str) -> None:
    host, case = on_gpus(word), CASES["attention"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    is_backward = (graph.phases == BACKWARD) & (graph.colocation < 0)
    for forward, backward in ((0, host.num_devices - 1), (host.num_devices - 1, 0)):
        plan = naive_plan(graph, np.where(is_backward, backward, forward).astype(np.int32))
        assert_close(run_on(host, graph, plan), run_eager(case, "adam"), 1e-6)


@pytest.mark.parametrize("word", ["cuda", "cuda/2", "cuda/4"])
def test_dropout_is_the_same_wherever_it_is_among_gpus(word: str) -> None:
    host = on_gpus(word)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.2)).double()
    graph = capture(model, random(4, 8), mean_square, "sgd")
    expected = run_on(host, graph, single(graph))
    for first in range(host.num_devices):
        devices = (alternating(graph, host.num_devices) + first) % host.num_devices
        assert_close(run_on(host, graph, naive_plan(graph, devices)), expected, 1e-9)


@pytest.mark.parametrize("word", WORDS)
def test_the_host_of_a_placement_is_found_again(word: str) -> None:
    host = on_gpus(word)
    assert {device.backend for device in host.devices} == ({"cuda", "cpu"} if "+" in word else {"cuda"})
    assert all(0 <= device.context_bytes < device.memory_bytes for device in host.devices)
    plan = Plan(*(np.zeros(0, dtype=np.int32) for _ in range(4)))
    names = tuple(device.name for device in host.devices)
    assert matching_host(Placement(plan, "graph", host.fingerprint, names)).fingerprint == host.fingerprint


def test_a_wait_that_nobody_asked_for_is_seen() -> None:
    number = torch.ones(1, device="cuda")
    with cuda.forbid_waits(), pytest.raises(RuntimeError):
        number.item()
    assert number.item() == 1.0
