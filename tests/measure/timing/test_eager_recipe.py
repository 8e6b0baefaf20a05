"""`EagerRecipe`: the steps of plain PyTorch that a race can have beside placements."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from core_hosts import core_device
from placed_steps import HOST
from small_models import CASES

from rlplace.errors import InvalidValue, RunnerError
from rlplace.files import cache_folder
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Streams, Worker
from rlplace.measure.timing.eager_step import CudaGraphStep, EagerRecipe, EagerStep
from rlplace.measure.timing.threads import usable_cores


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    case = CASES["linear"]()
    return capture(case.model, case.inputs, case.loss_fn, "adam")


@pytest.fixture
def widest() -> Iterator[Worker]:
    made = Worker(core_device("cpu:all", cores=usable_cores()), Streams())
    yield made
    made.stop()


def test_a_step_with_all_cores_runs_on_the_thread_that_has_them(graph: OpGraph, widest: Worker) -> None:
    step = EagerRecipe().timer(graph, HOST, widest)
    assert isinstance(step, EagerStep)
    assert step.worker is widest
    assert step() > 0
    narrow = EagerRecipe(num_threads=len(usable_cores()) + 1).timer(graph, HOST, widest)
    assert isinstance(narrow, EagerStep)
    assert narrow.worker is None


def test_a_model_is_compiled_before_the_race(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    steps: list[EagerStep] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    run = EagerStep._step
    monkeypatch.setattr(EagerStep, "_step", lambda self, **options: steps.append(self) or run(self, **options))
    timer = EagerRecipe(num_threads=1, is_compiled=True).timer(graph, HOST, None)
    assert (len(compiled), steps) == (1, [timer])


@pytest.mark.parametrize("own", [None, "/var/mine"])
def test_what_is_compiled_is_kept_where_only_this_user_writes(
    own: str | None, graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str | None] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own or "")
    if own is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(
        torch, "compile", lambda model: folders.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR")) or model
    )
    EagerRecipe(num_threads=1, is_compiled=True).timer(graph, HOST, None)
    assert folders == [own or str(cache_folder() / "torchinductor")]


@pytest.mark.slow
def test_a_cuda_graph_keeps_the_tensors_that_it_writes_into(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a graph holds addresses; here the step that owns the tensors must outlive its capture."""
    steps: list[weakref.ref[EagerStep]] = []

    def as_cuda_graph(self: EagerStep) -> Callable[[], None]:
        steps.append(weakref.ref(self))
        assert self._optimizer is not None
        assert all(group["capturable"] for group in self._optimizer.param_groups)
        return lambda: None

    monkeypatch.setattr(EagerStep, "as_cuda_graph", as_cuda_graph)
    step = EagerRecipe(is_cuda_graph=True).timer(graph, HOST, None)
    assert isinstance(step, CudaGraphStep)
    gc.collect()
    assert steps[0]() is not None
    del step
    gc.collect()
    assert steps[0]() is None


def test_a_step_that_no_cuda_graph_can_hold_says_so(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: EagerStep) -> Callable[[], None]:
        raise RuntimeError("it synchronises")

    monkeypatch.setattr(EagerStep, "as_cuda_graph", refuses)
    with pytest.raises(RunnerError, match="cannot be captured as a CUDA graph: it synchronises"):
        EagerRecipe(is_cuda_graph=True).timer(graph, HOST, None)


def test_a_graph_from_a_file_has_no_step() -> None:
    case = CASES["linear"]()
    graph = dataclasses.replace(capture(case.model, case.inputs, case.loss_fn, "adam"), program=None)
    with pytest.raises(InvalidValue, match="capture it again"):
        EagerRecipe().timer(graph, HOST, None)
