"""A placed step that fails says which op and where, hangs nobody, and runs again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from naive_plan import naive_plan
from placed_steps import HOST, single
from torch import Tensor, nn

from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.measure.execute import device_threads
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents

switches: dict[str, bool | threading.Event] = {"fails": False}


@torch.library.custom_op("rlplace_tests::checked", mutates_args=())
def checked(x: Tensor) -> Tensor:
    if switches["fails"] is True:
        raise ValueError("boom")
    if isinstance(switches["fails"], threading.Event):
        switches["fails"].wait(timeout=600)
    return x.clone()


@checked.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checked(x * 2) + 1


@pytest.fixture
def _off_again() -> Iterator[None]:
    yield
    switches["fails"] = False


def checked_step(crew: Crew, devices: list[int], *, is_traced: bool = False) -> PlacedStep:
    """Ops: input, mul, checked, add."""
    graph = capture(Checked(), torch.ones(3))
    plan = naive_plan(graph, np.array(devices, dtype=np.int32))
    return PlacedStep(graph, HOST, plan, Residents(graph, HOST), crew, is_traced=is_traced)


@pytest.mark.usefixtures("_off_again")
@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_a_failing_op_is_named_and_the_step_runs_again_afterwards(devices: list[int], crew: Crew) -> None:
    step, other = checked_step(crew, devices), checked_step(crew, [1, 0, 1, 0])
    for _ in range(2):
        switches["fails"] = True
        with pytest.raises(RunnerError) as failed:
            step.run()
        assert failed.value.op == "checked"
        message = str(failed.value)
        assert message == f"op 'checked' (rlplace_tests.checked.default) on cpu:{devices[2]}: ValueError: boom"
        assert isinstance(failed.value.__cause__, ValueError)
        switches["fails"] = False
        for runs in (other, step):
            runs.run()
            assert runs.result.tolist() == [3.0] * 3


@pytest.mark.usefixtures("_off_again")
def test_a_failure_does_not_keep_tensors_alive(crew: Crew) -> None:
    step = checked_step(crew, [0, 0, 0, 0])
    switches["fails"] = True
    with pytest.raises(RunnerError) as failed:
        step.run()
    cause = failed.value.__cause__
    assert cause is not None
    traceback = cause.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith("<placed step"):
            assert not any(isinstance(value, Tensor) for value in traceback.tb_frame.f_locals.values())
        traceback = traceback.tb_next


@pytest.mark.usefixtures("_off_again")
def test_a_stuck_op_is_a_timeout_and_everything_runs_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_threads, "GRACE_S", 0.05)
    crew = Crew(HOST.devices)
    step, other = checked_step(crew, [0, 0, 1, 0]), checked_step(crew, [1, 1, 0, 1])
    stuck = threading.Event()
    switches["fails"] = stuck
    with pytest.raises(TimeoutError, match="did not end its part"):
        step.run(deadline_s=0.2)
    switches["fails"] = False
    for runs in (other, step):
        runs.run()
        assert runs.result.tolist() == [3.0] * 3
    stuck.set()  # the thread left behind goes on, with channels of its own
    step.run()
    assert step.result.tolist() == [3.0] * 3
    crew.stop()


def test_an_op_that_cannot_run_where_it_is_says_so(crew: Crew) -> None:
    """Captured for shapes that the values behind it do not have: the failure is the op's, not ours."""
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4))
    residents = Residents(graph, HOST)
    step = PlacedStep(graph, HOST, single(graph), residents, crew)
    residents.tensor(graph.names.index("input_0"), 0).resize_(3, 5)
    with pytest.raises(RunnerError, match=r"op 'addmm' \(aten.addmm.default\) on cpu:0: RuntimeError"):
        step.run()
