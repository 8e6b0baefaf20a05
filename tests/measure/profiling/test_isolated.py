"""Ops timed one by one: that all of them are, not what they take."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host
from small_models import CASES
from torch import Tensor, nn

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.profiling import profile as isolated
from rlplace.measure.profiling.profile import Layout, isolated_s, layouts

HOST = core_host(2)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(HOST.devices)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "ENOUGH_S", 0.0)


def runs(graph: OpGraph) -> list[int]:
    return np.flatnonzero(~graph.is_source).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_op_of_every_model_runs_alone(name: str, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, views, random ops, custom layouts: none has to be estimated."""
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "momentum", targets=case.targets)
    known, state = layouts(graph), torch.get_rng_state()
    failed: list[BaseException] = []
    monkeypatch.setattr(cuda, "is_lost", lambda error: failed.append(error) is None and False)
    seconds = isolated_s(graph, HOST, 1, crew, runs(graph), known)
    assert seconds.shape == (len(runs(graph)),)
    assert np.all(np.isfinite(seconds))
    assert np.all(seconds > 0)
    assert failed == []
    assert torch.equal(state, torch.get_rng_state())


def test_the_tensors_of_one_op_are_gone_before_the_next(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["transformer_layer"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    make, seconds = Layout.make, isolated._seconds
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def tracked(layout: Layout, place: torch.device, generator: torch.Generator) -> Tensor:
        tensor = make(layout, place, generator)
        alive.append(weakref.ref(tensor))
        return tensor

    def timed(*arguments: object) -> float:
        nonlocal most
        assert [each() for each in alive] == [None] * len(alive)
        alive.clear()
        found = seconds(*arguments)  # type: ignore[arg-type]
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(Layout, "make", tracked)
    monkeypatch.setattr(isolated, "_seconds", timed)
    isolated_s(graph, HOST, 0, crew, runs(graph), layouts(graph))
    assert 1 < most < 20


state: dict[str, Exception | None] = {"raises": None}


@torch.library.custom_op("rlplace_tests_isolated::maybe", mutates_args=())
def maybe(x: Tensor) -> Tensor:
    if state["raises"] is not None:
        raise state["raises"]
    return x.clone()


@maybe.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return maybe(x * 2) + 1


@pytest.fixture
def graph() -> Iterator[OpGraph]:
    """Input, mul, maybe, add."""
    yield capture(Doubled(), torch.ones(300))
    state["raises"] = None


def test_an_op_that_fails_is_estimated_by_its_bytes(
    graph: OpGraph, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    state["raises"] = torch.OutOfMemoryError("too big alone")
    monkeypatch.setattr(isolated.timeit, "repeat", lambda run, *, number, repeat: [2e-6])
    mul, failed, add = isolated_s(graph, HOST, 0, crew, runs(graph), layouts(graph))
    assert mul == add == 2e-6
    rates = 2e-6 / graph.bytes_moved[[1, 3]]
    assert failed == pytest.approx(max(graph.bytes_moved[2] * np.median(rates), 2e-6))
    assert isolated_s(graph, HOST, 0, crew, [], {}).shape == (0,)


def test_when_all_fail_or_the_device_is_lost_it_is_an_error(graph: OpGraph, crew: Crew) -> None:
    state["raises"] = torch.OutOfMemoryError("too big alone")
    with pytest.raises(RunnerError, match="no op runs alone on cpu:0: OutOfMemoryError: too big alone"):
        isolated_s(graph, HOST, 0, crew, [2], layouts(graph))
    state["raises"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RunnerError, match="illegal memory access"):
        isolated_s(graph, HOST, 0, crew, runs(graph), layouts(graph))


def test_on_a_gpu_launches_get_ahead(monkeypatch: pytest.MonkeyPatch, graph: OpGraph) -> None:
    calls = plain_gpus.install(monkeypatch)
    monkeypatch.setattr(isolated, "torch_device", lambda device: torch.device("cpu"))
    host = plain_gpus.gpu_host(1, 1 << 30)
    crew = Crew(host.devices)
    seconds = isolated_s(graph, host, 0, crew, runs(graph), layouts(graph))
    crew.stop()
    assert np.all(seconds > 0)
    assert len(calls.held_back) == 3
    assert all(0 < cycles <= 1.5e8 for cycles in calls.held_back)
