"""Costs from traced steps, and from ops one by one: what is done with the figures, not what they are."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host
from numpy.typing import NDArray
from small_models import CASES, mean_square, random
from torch import nn

from rlplace import cuda
from rlplace.errors import InvalidValue, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.rank_programs import rank_programs
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Timeline, single_device_plan
from rlplace.measure.profiling import profile
from rlplace.measure.profiling.profile import profile_costs, share_by_signature
from rlplace.measure.timing.race import Watch


def test_an_op_has_the_median_of_its_steps_and_equal_ops_the_mean_of_theirs() -> None:
    samples_s = np.array([[1.0, 2.0, 9.0, 5.0], [2.0, 2.0, 6.0, 5.0], [9.0, 2.0, 6.0, 1.0]])
    shared = share_by_signature(("a", "a", "a", "b"), samples_s)
    # medians 2, 2, 6 and 5
    assert shared.tolist() == [10 / 3, 10 / 3, 10 / 3, 5.0]
    assert shared.sum() == pytest.approx(np.median(samples_s, axis=0).sum())


def test_profiled_costs_of_a_training_step() -> None:
    case = CASES["lstm_cell"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    told: list[str] = []
    state = {name: value.clone() for name, value in case.model.state_dict().items()}
    costs = profile_costs(graph, core_host(2, has_gang=True), num_steps=3, warmup=1, on_progress=told.append)
    assert costs.source == "profiled"
    assert costs.op_time_s.shape == (graph.num_ops, 3)
    assert np.all(costs.op_time_s[graph.is_source] == 0)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    assert np.array_equal(costs.op_time_s[:, 0], costs.op_time_s[:, 1]), "devices of one kind share figures"
    assert len(told) == 2, "one run for each kind"
    assert "cpu:0 (cpu-core)" in told[0]
    for signature in set(graph.signatures):
        alike = [op for op in range(graph.num_ops) if graph.signatures[op] == signature]
        assert len(set(costs.op_time_s[alike, 0].tolist())) == 1
    assert all(torch.equal(value, state[name]) for name, value in case.model.state_dict().items())


@pytest.mark.parametrize(("most_s", "steps"), [(0.0, 2), (float("inf"), 7)])
def test_where_the_time_is_over_one_step_after_the_first_is_traced(most_s: float, steps: int) -> None:
    begun: list[int] = []

    class Counting(Watch):
        def begin(self, contender: int, *, is_made: bool = True) -> None:
            begun.append(contender)

    graph = capture(nn.Linear(4, 4), torch.ones(2, 4), lambda y: y.sum(), "sgd")
    costs = profile_costs(graph, core_host(2), num_steps=4, warmup=3, most_s=most_s, watch=Counting())
    assert begun == [0] * steps
    assert np.all(costs.op_time_s[~graph.is_source] > 0)


def test_an_op_takes_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input, then two ops: 1.0..1.5 and 2.0..4.0 s; what lies between them is the second's."""
    graph = capture(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.ones(3))
    none = np.zeros(0)
    timeline = Timeline(
        np.zeros(3, dtype=np.int32),
        np.array([0.0, 1.0, 2.0]),
        np.array([0.0, 1.5, 4.0]),
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        "measured",
    )

    class Step:
        launch_s = (0.0,)

        def __init__(self, *_: object, **__: object) -> None: ...
        def unload(self) -> None: ...
        def run(self, number: int) -> None: ...
        def timeline(self) -> Timeline:
            return timeline

    monkeypatch.setattr(profile, "PlacedStep", Step)
    assert profile_costs(graph, core_host(1), num_steps=2).op_time_s[:, 0].tolist() == [0.0, 0.5, 2.5]
    assert timeline.op_start_s.tolist() == [0.0, 1.0, 2.0]


def test_a_graph_file_alone_cannot_be_profiled() -> None:
    from micrographs import op_graph

    with pytest.raises(InvalidValue, match="capture it again"):
        profile_costs(op_graph([[], [0]]), core_host(1))


def tiny(host: Host, *names: str) -> Host:
    """Devices of those names have next to no memory."""
    devices = tuple(
        dataclasses.replace(each, memory_bytes=100, memory_pool="") if each.name in names else each
        for each in host.devices
    )
    return dataclasses.replace(host, devices=devices)


@pytest.fixture
def told() -> list[str]:
    return []


def training(name: str = "lstm_cell") -> OpGraph:
    case = CASES[name]()
    return capture(case.model, case.inputs, case.loss_fn, "adam")


def check_isolated(graph: OpGraph, costs: Costs, device: int) -> None:
    runs = ~graph.is_source
    assert np.all(costs.op_time_s[graph.is_source, device] == 0)
    assert np.all(np.isfinite(costs.op_time_s[runs, device]))
    assert np.all(costs.op_time_s[runs, device] > 0)
    by_signature: dict[str, set[float]] = defaultdict(set)
    for op in np.flatnonzero(runs):
        by_signature[graph.signatures[op]].add(float(costs.op_time_s[op, device]))
    assert all(len(figures) == 1 for figures in by_signature.values())


def test_where_the_step_does_not_fit_ops_are_timed_one_by_one(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()
    monkeypatch.setattr(profile, "_trace_device", None)
    costs = profile_costs(graph, tiny(core_host(2), "cpu:0", "cpu:1"), on_progress=told.append)
    assert costs.source == "profiled"
    assert len(told) == 1
    assert "one by one on cpu:0 (cpu-core): the whole step needs" in told[0]
    check_isolated(graph, costs, 0)
    assert np.array_equal(costs.op_time_s[:, 0], costs.op_time_s[:, 1])


def test_the_device_of_a_kind_that_holds_the_step_is_traced(told: list[str]) -> None:
    graph = training("linear")
    profile_costs(graph, tiny(core_host(2), "cpu:0"), num_steps=1, warmup=1, on_progress=told.append)
    assert len(told) == 1
    assert "ops on cpu:1 (cpu-core)" in told[0]


def test_running_out_of_memory_half_way_is_too_small_as_well(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()

    def original(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Residents, "_original", original)
    costs = profile_costs(graph, core_host(1), on_progress=told.append)
    assert len(told) == 2
    assert "ran out of its memory" in told[1]
    check_isolated(graph, costs, 0)


def test_another_failure_of_the_step_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(*_: object) -> torch.Tensor:
        raise ValueError("boom")

    monkeypatch.setattr(Residents, "_original", original)
    with pytest.raises(RunnerError, match="ValueError: boom"):
        profile_costs(training(), core_host(1))


def test_figures_of_ops_alone_are_scaled_by_what_a_traced_device_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, every op takes 2 s, in a step on the gang 3 s: so it does on a core, which is too small for the step."""
    graph = training("linear")
    asked: list[int] = []

    def alone(graph: OpGraph, host: Host, device: int, *rest: Any) -> NDArray[np.float64]:
        asked.append(device)
        return np.full(len(rest[1]), 2.0)

    def traced(graph: OpGraph, host: Host, device: int, *_: object, **__: object) -> NDArray[np.float64]:
        return np.where(graph.is_source, 0.0, 3.0)[None]

    monkeypatch.setattr(profile, "isolated_s", alone)
    monkeypatch.setattr(profile, "_trace_device", traced)
    host = tiny(core_host(2, has_gang=True), "cpu:0", "cpu:1")
    op_time_s = profile_costs(graph, host).op_time_s[~graph.is_source]
    assert np.all(op_time_s == 3.0)
    assert asked == [0, 2]
    monkeypatch.setattr(profile, "MOST_RATIO", 1.25)
    op_time_s = profile_costs(graph, host).op_time_s[~graph.is_source]
    assert np.all(op_time_s == [2.5, 2.5, 3.0]), "a ratio beyond all reason is a disturbed measurement"


def test_launches_run_ahead_of_a_traced_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held back from the second warm step on, at the start and after every so many ops; residents are given back."""
    calls = plain_gpus.install(monkeypatch)
    monkeypatch.setattr(profile, "HOLD_EVERY", 5)
    graph = training()
    costs = profile_costs(graph, plain_gpus.gpu_host(1, 1 << 30), num_steps=4, warmup=3)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    # a run of updates is one call
    program = rank_programs(graph, plain_gpus.gpu_host(1, 1 << 30), single_device_plan(graph, 0)).programs[0]
    num_held = -(-sum(kind in ("op", "updates") for kind, _, _ in program) // 5)
    assert len(calls.held_back) == (1 + 4) * num_held
    assert len(set(calls.held_back)) == 1
    assert 0 < calls.held_back[0] <= 1.5e8
    assert calls.num_given_back == 2, "before the limit holds, and after the residents are gone"
    assert [num_bytes for _, num_bytes in calls.limits] == [1 << 30, cuda.UNLIMITED]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_profiled_costs_on_a_gpu() -> None:
    graph = capture(nn.Linear(64, 64), random(8, 64, dtype=torch.float32), mean_square, "adam")
    costs = profile_costs(graph, Host.detect(), num_steps=3, warmup=1)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    assert np.all(np.isfinite(costs.op_time_s))
