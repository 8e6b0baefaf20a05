"""Plain PyTorch on a thread of the host: how long it may take."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_hosts import core_device, core_host
from naive_plan import naive_plan
from placed_steps import HOST, NUM_STEPS, Run, alternating, assert_equal, run_placed
from small_models import mean_square
from torch import nn
from torch.overrides import TorchFunctionMode

from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.timing import eager_step
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.race import RaceProtocol, race


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
        y: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return y


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
