"""Plain PyTorch on a thread of the host: how long it may take."""

from __future__ import annotations

import threading

import pytest
import torch
from core_hosts import core_device, core_host
from torch import nn

from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.measure.run import eager
from rlplace.measure.run.eager import EagerStep
from rlplace.measure.run.race import RaceProtocol, race
from rlplace.measure.run.workers import Crew


def test_a_step_that_does_not_end_on_another_thread_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "LONGEST_S", 0.01)
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
