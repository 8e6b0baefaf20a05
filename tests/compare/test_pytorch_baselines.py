"""PyTorch baselines: which rows there are, and what runs behind them."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from core_hosts import core_host

from rlplace import cuda
from rlplace.compare import pytorch_baselines as module
from rlplace.compare.pytorch_baselines import BASELINES, pytorch_baselines, replica_devices
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.gpus import gpu_host
from rlplace.measure.hosts.host import Host, Link, Route
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import Problem
from rlplace.measure.run.eager import EagerStep
from rlplace.workloads import WorkloadSpec, build, parse_workload

TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"


def on_cores(spec: WorkloadSpec, num_devices: int = 2) -> Problem:
    work = build(spec)
    graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    costs = Costs(np.full((graph.num_ops, num_devices), 1e-5), "profiled")
    return Problem(graph, core_host(num_devices), costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))


@pytest.mark.slow
def test_every_row_of_a_real_host_runs_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    spec = parse_workload(TINY)
    said: list[str] = []
    with pytorch_baselines(
        on_cores(spec), spec, tuple(BASELINES), default_size="small", seed=0, say=said.append
    ) as entries:
        rows = {row.method: (row, timer) for row, timer in entries}
        assert tuple(rows) == tuple(BASELINES)
        assert not any(row.is_placement for row, _ in rows.values())
        for name in ("eager", "all-cores", "torch-compile", "ddp"):
            timer = rows[name][1]
            assert timer is not None, rows[name][0].why
            assert timer() > 0
    skipped, timer = rows["cuda-graph"]
    assert (skipped.status, timer) == ("skipped", None)
    assert "no GPU" in skipped.why
    assert len(compiled) == 1
    assert any("torch.compile" in line for line in said)


def test_a_model_too_big_for_one_gpu_is_a_row_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_workload(TINY)
    problem = on_cores(spec)

    def too_big(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(module, "EagerStep", too_big)
    with pytorch_baselines(problem, spec, ("eager",), default_size="small", seed=0, say=lambda _: None) as entries:
        ((row, timer),) = entries
    assert (row.method, row.status, timer) == ("eager", "oom", None)
    assert "9 GiB" in row.why


def test_replicas_need_a_batch_and_devices() -> None:
    spec = parse_workload(TINY)
    name = ("ddp",)
    with pytorch_baselines(on_cores(spec, 1), spec, name, default_size="small", seed=0, say=print) as ((row, timer),):
        assert (row.status, timer) == ("skipped", None)
        assert "one device" in row.why
    with pytorch_baselines(on_cores(spec), None, name, default_size="small", seed=0, say=print) as ((row, _),):
        assert "no batch" in row.why
    odd = parse_workload(TINY.replace("batch=4", "batch=3"))
    with pytorch_baselines(on_cores(spec), odd, name, default_size="small", seed=0, say=print) as ((row, _),):
        assert "multiple of 2" in row.why


def test_a_simulated_host_knows_data_parallelism_alone() -> None:
    spec = parse_workload("nmt@small,layers=1,units=8,steps=2,vocab=20,batch=64")
    work = build(spec)
    graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    problem = Problem.estimate(graph, resolve_host("4xV100-pcie"), num_groups=4)
    with pytorch_baselines(problem, spec, tuple(BASELINES), default_size="paper", seed=0, say=print) as entries:
        rows = {row.method: row for row, timer in entries if timer is None}
    assert rows["ddp"].ok
    assert len(rows["ddp"].peak_bytes) == 4
    assert rows["ddp"].value_s > 0
    assert [rows[name].status for name in BASELINES if name != "ddp"] == ["skipped"] * 4


def test_where_there_are_gpus_they_alone_get_replicas() -> None:
    spec = parse_workload(TINY)
    problem = on_cores(spec)
    assert [device.name for device in replica_devices(problem)] == ["cpu:0", "cpu:1"]
    first, second = problem.host.devices
    gpu = dataclasses.replace(first, name="cuda:1", kind="gpu", backend="cuda", cores=())
    ways = (Route("cpu:1", "cuda:1", ("bus",)), Route("cuda:1", "cpu:1", ("bus",)))
    host = Host("mixed", (second, gpu), (Link("bus", 1e9),), ways)
    assert replica_devices(dataclasses.replace(problem, host=host)) == [gpu]


def test_a_gpu_in_parts_gets_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "num_gpus", lambda: 2)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, 7 << 30))
    graph = on_cores(parse_workload(TINY)).graph
    host = gpu_host("lab", num_parts=2, with_cpu=True, cores=(0, 1), ram_bytes=1 << 30)
    problem = Problem.grouped(graph, host, Costs(np.ones((graph.num_ops, 5)), "profiled"), 4)
    assert [device.name for device in replica_devices(problem)] == ["cuda:0/0", "cuda:1/0"]


def test_a_cuda_graph_keeps_the_tensors_that_it_writes_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a graph holds addresses; here the step that owns the tensors must outlive its capture."""
    steps: list[weakref.ref[EagerStep]] = []

    def as_cuda_graph(self: EagerStep) -> Callable[[], None]:
        steps.append(weakref.ref(self))
        assert self._optimizer is not None
        assert all(group["capturable"] for group in self._optimizer.param_groups)
        return lambda: None

    monkeypatch.setattr(EagerStep, "as_cuda_graph", as_cuda_graph)
    step = module._CudaGraphStep(on_cores(parse_workload(TINY)))
    gc.collect()
    assert steps[0]() is not None
    del step
    gc.collect()
    assert steps[0]() is None
