"""Plain PyTorch beside placements: whole, in micro-batches, compiled; and how long it may take."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_device, core_host
from naive_plan import naive_plan
from placed_steps import HOST, NUM_STEPS, Run, alternating, assert_equal, run_placed
from small_models import CASES, Case, ConvNorm, Function, mean_square, random, step_graph
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlplace.errors import InvalidValue, RunnerError
from rlplace.export.formats import check_export
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.files import cache_folder
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew, Streams, Worker
from rlplace.measure.problem import Plan
from rlplace.measure.timing import eager_step
from rlplace.measure.timing.eager_step import CudaGraphStep, EagerRecipe, EagerStep
from rlplace.measure.timing.race import RaceProtocol, race
from rlplace.measure.timing.threads import usable_cores


def test_a_step_that_does_not_end_on_another_thread_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_step, "LONGEST_S", 0.01)
    released = threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    graph, host = capture(Slow(), torch.ones(3)), core_host(1)
    crew = Crew((core_device("cpu:0"),))
    (worker,) = crew.workers
    step = EagerStep(graph, host, worker=worker, transform=lambda _: lambda _: released.wait())
    (lane,) = race([step], protocol=RaceProtocol(warmup=0))
    assert isinstance(lane.error, TimeoutError)
    with pytest.raises(RunnerError, match="still busy"):  # another step does not take the late one's end for its own
        EagerStep(graph, host, worker=worker)()
    ran: list[int] = []
    crew.run([ran.append], 7, on_error=lambda: None, deadline_s=60.0)  # on a fresh thread
    assert ran == [7]
    assert crew.workers != [worker]
    released.set()
    crew.stop()


@pytest.mark.parametrize("on_worker", [False, True])
def test_what_keeps_torch_compile_away_is_no_part_of_the_seconds(
    on_worker: bool, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        told.append("enter")
        yield
        told.append("leave")

    def clock() -> float:
        told.append("clock")
        return 0.0

    monkeypatch.setattr(eager_step, "uncompiled", noted)
    step = EagerStep(capture(Projects(), torch.ones(2, 24), mean_square, "sgd"), HOST)
    step.worker = crew.workers[0] if on_worker else None
    monkeypatch.setattr(eager_step.time, "perf_counter", clock)
    step()
    assert told == ["enter", "clock", "clock", "leave"]


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("on_worker", [False, True])
def test_a_step_captured_under_autocast_runs_eagerly_with_its_casts(on_worker: bool, crew: Crew) -> None:
    torch.manual_seed(0)
    model, x = Projects(), torch.randn(8, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, x, mean_square, "sgd")
    plain = EagerStep(capture(model, x, mean_square, "sgd"), HOST)
    eager = EagerStep(graph, HOST, num_threads=1, worker=crew.workers[0] if on_worker else None)
    plan = naive_plan(graph, alternating(graph, 2))
    losses = []
    for _ in range(NUM_STEPS):
        eager()
        plain()
        losses.append(eager.loss.clone())
    placed, _ = run_placed(graph, HOST, plan, crew)
    assert_equal(placed, Run(losses, {name: value.detach() for name, value in eager.state_dict().items()}))
    assert not torch.equal(plain.loss, losses[-1]), "the casts make a difference"
    assert not torch.is_autocast_enabled("cpu")


class _DoubleZeros(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.double() if func is torch.zeros else made


def test_a_mode_around_the_step_leaves_step_counters_float32() -> None:
    """CUDA's fused Adam reads them as float32, whatever they are."""
    eager = EagerStep(capture(Projects(), torch.randn(8, 24), mean_square, "adam"), HOST)
    with _DoubleZeros():
        eager()
    states = list(eager._optimizer.state.values())  # type: ignore[union-attr]
    assert states
    assert {state["step"].dtype for state in states} == {torch.float32}


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return step_graph("linear")


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


LABELS = torch.tensor([0, 5, 2, 4, 1])


def joined_case() -> Case:
    loss = functional.cross_entropy
    return Case(Function(torch.tanh), random(5, 4), loss, targets=(LABELS,))


def captured(case: Case, count: int = 2) -> OpGraph:
    return capture(case.model, case.inputs, case.loss_fn, "adam", targets=case.targets, micro_batches=count)


def apart(graph: OpGraph) -> Plan:
    """Micro-batch k on core k, what is shared on the first."""
    return naive_plan(graph, np.maximum(graph.micro_batch, 0).astype(np.int32))


CUT = {
    "separate": lambda: Case(Function(torch.tanh), random(5, 4), mean_square),
    "joined": joined_case,
    "batch norm": lambda: Case(ConvNorm(), random(5, 2, 5, 5), mean_square),
}


@pytest.mark.parametrize("name", CUT)
def test_micro_batches_on_cores_of_their_own_train_as_eager_does(name: str, crew: Crew) -> None:
    graph = captured(CUT[name]())
    eager = EagerStep(graph, HOST, num_threads=1, in_micro_batches=name == "batch norm")
    run, _ = run_placed(graph, HOST, apart(graph), crew)
    losses = []
    for _ in range(NUM_STEPS):
        eager()
        losses.append(eager.loss.clone().reshape(()))
    torch.testing.assert_close(run.losses, losses, rtol=1e-9, atol=1e-9)
    for state, value in eager.state_dict().items():
        torch.testing.assert_close(run.state[state], value.detach(), rtol=1e-9, atol=1e-9)
    assert check_export(graph, HOST, apart(graph)).ok
    whole, parts = EagerStep(graph, HOST), EagerStep(graph, HOST, in_micro_batches=True)
    whole()
    parts()
    assert torch.allclose(whole.loss, parts.loss) == (name != "batch norm")


def test_a_placed_step_takes_the_whole_batch() -> None:
    case = joined_case()
    placed = PlacedModel(captured(case), HOST, apart(captured(case)), other_shapes="refuse")
    try:
        loss = case.loss_fn(case.model(case.inputs), LABELS).detach()
        torch.testing.assert_close(placed(case.inputs, targets=LABELS), loss)
        other = placed(case.inputs + 1, targets=LABELS)
        assert not torch.equal(other, loss)
        for size in (4, 6):
            with pytest.raises(InvalidValue, match=rf"input_0 is .*\({size}, 4\).*expected .*\(5, 4\)"):
                placed(random(size, 4), targets=LABELS)
    finally:
        placed.close()


def test_inference_returns_the_whole_output() -> None:
    case = joined_case()
    graph = capture(case.model, case.inputs, micro_batches=2)
    placed = PlacedModel(graph, HOST, apart(graph))
    eager = EagerStep(graph, HOST, in_micro_batches=True)
    try:
        eager()
        x = random(5, 4, seed=9)
        torch.testing.assert_close(placed(x), case.model(x).detach())
        torch.testing.assert_close(eager.loss, case.model(case.inputs).detach())
    finally:
        placed.close()
