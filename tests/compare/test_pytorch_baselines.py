"""PyTorch baselines: which rows there are, and what runs behind them.

Data parallelism: shares of a batch, and real replicas.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from core_hosts import core_host
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace import cuda
from rlplace.compare.pytorch_baselines import (
    BASELINES,
    _parts,
    check_groups,
    pytorch_baselines,
    replica_devices,
    with_batch_share,
)
from rlplace.compare.replicas import Replicas, ReplicaTeam
from rlplace.errors import InvalidValue, RunnerError, UserError
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.detect import gpu_host
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import Problem
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.workloads import WorkloadSpec, build, parse_workload

TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"


def on_cores(spec: WorkloadSpec, num_devices: int = 2) -> Problem:
    work = build(spec)
    graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    costs = Costs(np.full((graph.num_ops, num_devices), 1e-5), "profiled")
    return Problem(graph, core_host(num_devices), costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))


@pytest.mark.slow
def test_every_row_of_a_real_host_runs_or_says_why() -> None:
    spec = parse_workload(TINY)
    with pytorch_baselines(
        on_cores(spec), spec, tuple(BASELINES), default_size="small", seed=0, say=lambda _: None
    ) as entries:
        rows = {row.method: (row, timer) for row, timer in entries}
        assert tuple(rows) == tuple(BASELINES)
        assert not any(row.is_placement for row, _ in rows.values())
        assert rows["eager"][1] == EagerRecipe(num_threads=1)
        assert rows["all-cores"][1] == EagerRecipe()
        assert rows["torch-compile"][1] == EagerRecipe(num_threads=1, is_compiled=True)
        replicas = rows["ddp"][1]
        assert callable(replicas), rows["ddp"][0].why
        assert replicas() > 0
        assert rows["ddp"][0].why.startswith("buckets of ")
        rounded, sharded = rows["ddp-bf16-gradients"], rows["fsdp2"]
        assert callable(rounded[1]), rounded[0].why
        assert "another arithmetic" in rounded[0].why
        assert callable(sharded[1]), sharded[0].why
        assert sharded[1]() > 0
        stages = rows["torch-pipeline"]
        assert callable(stages[1]), stages[0].why
        assert "2 stages, cut before " in stages[0].why
        assert stages[1]() > 0
    skipped, timer = rows["cuda-graph"]
    assert (skipped.status, timer) == ("skipped", None)
    assert "no GPU" in skipped.why


def test_a_model_without_values_has_no_step_of_its_own() -> None:
    spec = parse_workload(TINY)
    problem = on_cores(spec)
    with FakeTensorMode():
        fake = nn.Linear(2, 2)
    assert problem.graph.program is not None
    origin = dataclasses.replace(problem.graph.program.origin, model=fake)
    program = dataclasses.replace(problem.graph.program, origin=origin)
    problem = dataclasses.replace(problem, graph=dataclasses.replace(problem.graph, program=program))
    with pytorch_baselines(problem, spec, ("eager",), default_size="small", seed=0, say=lambda _: None) as entries:
        ((row, recipe),) = entries
    assert (row.method, row.status, recipe) == ("eager", "skipped", None)
    assert "fake tensors" in row.why


def test_a_model_that_makes_no_pipeline_says_why() -> None:
    spec = parse_workload("rnnlm@layers=2,units=8,vocab=11,steps=3,batch=4")
    name = ("torch-pipeline",)
    with pytorch_baselines(on_cores(spec), spec, name, default_size="small", seed=0, say=print) as ((row, timer),):
        assert (row.status, timer) == ("skipped", None)
        assert "modules that run once and not first" in row.why
        assert "\n" not in row.why


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
    assert [rows[name].status for name in BASELINES if name != "ddp"] == ["skipped"] * (len(BASELINES) - 1)


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


CORE = Device("cpu", "cpu-core", "cpu", 1 << 30)
"""Pinned nowhere."""


def test_a_share_of_the_batch() -> None:
    share = with_batch_share(parse_workload(TINY), 2, "small")
    assert dict(share.options)["batch"] == 2
    assert share.config().units == 8  # type: ignore[union-attr]
    assert with_batch_share(parse_workload("nmt"), 4, "paper").config().batch == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 3), (8, 4)])
def test_a_share_is_cut_into_as_many_micro_batches_as_are_equal(batch: int, most: int) -> None:
    share = with_batch_share(parse_workload(f"nmt@small,batch={2 * batch}"), 2, "small")
    parts = _parts(share, 4, "small")
    assert list(parts) == sorted({1, most})
    assert parts[1] == share
    assert dict(parts[most].options)["batch"] == batch // most


@pytest.mark.parametrize(("text", "words"), [("nmt@batch=3", "multiple of 2"), ("some.module:function", "batch")])
def test_what_cannot_be_shared_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidValue, match=words) as caught:
        with_batch_share(parse_workload(text), 2, "small", "fsdp2")
    assert "fsdp2" in str(caught.value)


def test_stages_that_share_two_parameters_in_different_ways_are_refused() -> None:
    check_groups({"words": (0, 3), "head": (3, 0), "norm": (1, 2)})
    with pytest.raises(UserError, match="share words, stages"):
        check_groups({"norm": (1, 4), "words": (0, 3), "head": (0, 2, 3)})


@pytest.mark.slow
def test_replicas_step_together() -> None:
    options = {"workload": TINY, "in_bf16": False}
    both = {f"{mb:g} MB": options | {"bucket_mb": mb} for mb in (1.0, 25.0)}
    team = ReplicaTeam(Replicas("ddp", both), [CORE, CORE])
    try:
        assert team.note in both
        assert all(team() > 0 for _ in range(3))
    finally:
        team.close()


PARENT = """
import os, signal, sys
from rlplace.compare.replicas import ReplicaTeam, Replicas
from rlplace.measure.hosts.host import Device
core = Device("cpu", "cpu-core", "cpu", 1 << 30)
if __name__ == "__main__":
    options = {"workload": sys.argv[1], "in_bf16": False, "bucket_mb": 1.0}
    team = ReplicaTeam(Replicas("ddp", {"only": options}), [core])
    replica = team._processes[0].pid
    os.kill(replica, signal.SIGSTOP)
    print(replica, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sends the signal")
def test_a_stopped_replica_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    words = [sys.executable, str(script), TINY]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    replica, until_s = int(done.stdout), time.monotonic() + 60
    while Path(f"/proc/{replica}").exists() and " Z " not in Path(f"/proc/{replica}/stat").read_text():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.slow
def test_a_replica_that_cannot_start_says_why() -> None:
    with pytest.raises(RunnerError, match="no_such_module"):
        ReplicaTeam(Replicas("ddp", {"only": {"workload": "no_such_module:f"}}), [CORE])
