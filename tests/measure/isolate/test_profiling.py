"""Profiling in a worker: the figures of `profile_costs`, and a step that breaks its process is an error."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from core_hosts import core_host
from faulty_ops import faulty_graph
from torch import nn

from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate import isolated_runner as profiling
from rlplace.measure.isolate.isolated_runner import profile_isolated


def two_kinds() -> Host:
    """Two cores of two kinds, so that both are profiled; ops of `faulty_graph` are faulty on the second."""
    host = core_host(2)
    return dataclasses.replace(host, devices=(host.devices[0], dataclasses.replace(host.devices[1], kind="other")))


def training() -> OpGraph:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    return capture(model, torch.randn(8, 16), lambda y: y.square().mean(), "adam")


@pytest.mark.slow
def test_a_worker_profiles_every_op_on_every_device() -> None:
    graph, said = training(), list[str]()
    costs = profile_isolated(graph, two_kinds(), num_steps=3, warmup=1, on_progress=said.append, isolated=True)
    assert costs.source == "profiled"
    assert costs.op_time_s.shape == (graph.num_ops, 2)
    assert np.array_equal(costs.op_time_s > 0, np.repeat(~graph.is_source[:, None], 2, axis=1))
    assert costs.workspace_bytes is not None
    assert np.all(costs.workspace_bytes >= graph.workspace_bytes[:, None])
    assert said == [
        f"profiling {graph.num_ops} ops on cpu:0 (cpu-core)",
        f"profiling {graph.num_ops} ops on cpu:1 (other)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("abort", r"the worker died: .*SIGABRT.* in profiling on cpu:1, op 'faulty'"),
        ("hang", r"a step did not end within 4 s: profiling on cpu:1, op 'faulty'"),
        ("raise", r"faulty.*boom"),
    ],
)
def test_a_step_that_fails_is_an_error_that_names_the_op(kind: str, words: str) -> None:
    with pytest.raises(RunnerError, match=words):
        profile_isolated(faulty_graph((kind,)), two_kinds(), num_steps=1, warmup=1, isolated=True, longest_s=4.0)


def stub(graph: OpGraph, host: Host, **_: object) -> Costs:
    return Costs(np.full((graph.num_ops, host.num_devices), float(os.getpid())), "profiled")


def test_it_profiles_here_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile_costs", stub)
    monkeypatch.setattr(profiling, "Fleet", None)
    assert profile_isolated(training(), core_host(2), isolated=False).op_time_s[0, 0] == os.getpid()


def test_where_no_worker_can_be_had_it_warns_and_profiles_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_worker(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(profiling, "profile_costs", stub)
    monkeypatch.setattr(profiling, "Fleet", no_worker)
    with pytest.warns(RuntimeWarning, match="profiled in this process, as no worker can be had: .*too many open files"):
        assert profile_isolated(training(), core_host(2), isolated=True).op_time_s[0, 0] == os.getpid()
