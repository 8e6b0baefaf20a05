"""GPUs without memory left, at every single allocation of a step and by a limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from core_hosts import core_host
from fake_gpus.gpu_plans import Setting, gpu_host, setting_of
from fake_gpus.machine import Machine
from fake_gpus.plan_runs import LATEST_S, crew_of, judged, machine_installed, placed_steps, plain, train
from naive_plan import naive_plan
from torch import Tensor, nn

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.export import PlacedModel
from rlplace.graphs import SplitPlan, capture
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.residents import Residents
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.measure.timing.race import RaceProtocol

NAMES = ("cuda:0/0", "cuda:0/1", "cuda:1", "cpu")


def test_no_allocation_of_a_step_may_fail_unseen() -> None:
    setting = setting_of("linear", "adam", gpu_host(NAMES), 1)

    def body(machine: Machine) -> list[str]:
        with crew_of(setting) as crew:
            residents = Residents(setting.graph, setting.host)
            steps = placed_steps(setting, residents, crew)
            before = machine.num_allocations
            steps[0].run(deadline_s=LATEST_S)
            num_allocations = machine.num_allocations - before
            assert num_allocations > 10
            for allocation in range(1, num_allocations + 1):
                machine.fails_at = machine.num_allocations + allocation
                with pytest.raises(RunnerError) as failed:
                    steps[0].run(deadline_s=LATEST_S)
                assert cuda.is_out_of_memory(failed.value)
                assert not cuda.is_sticky(failed.value)
                machine.fails_at = None
                machine.order.forgive("race", "wait")
                steps[0].run(deadline_s=LATEST_S)
            residents.reset()
            return train(setting, residents, steps)

    verdict = judged(body, "random")
    assert not verdict.caught_by, str(verdict)


def runner_of(setting: Setting) -> tuple[HostRunner, Problem]:
    shape = (setting.graph.num_ops, setting.host.num_devices)
    problem = Problem.grouped(setting.graph, setting.host, Costs(np.full(shape, 1e-5), "estimated"))
    protocol = RaceProtocol(warmup=1, min_rounds=1, max_rounds=2)
    return HostRunner(problem, Simulator(problem, threads=1), protocol=protocol), problem


def test_a_plan_that_does_not_fit_is_measured_as_out_of_memory() -> None:
    setting = setting_of("batch_norm_train", "adam", gpu_host(NAMES), 1)
    with machine_installed("random", 1) as machine:
        runner, _ = runner_of(setting)
        try:
            (fits,) = runner.measure_plans(setting.plans[:1])
            assert fits.status == "ok"
            machine.fails_at = machine.num_allocations + 12
            (too_big,) = runner.measure_plans(setting.plans[:1])
            assert too_big.status == "oom"
            assert "out of memory" in too_big.why
            machine.order.forgive("race", "wait")
            (again,) = runner.measure_plans(setting.plans[:1])
            assert again.status == "ok"
        finally:
            runner.close()
    assert machine.order.violations == []


def test_a_limit_is_kept_and_a_peak_is_told() -> None:
    with machine_installed() as machine:
        place = torch.device("cuda", 1)
        cuda.limit_memory(place, 1000)
        with machine.attached():
            first = torch.zeros(100, dtype=torch.float64, device=place)
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(100, dtype=torch.float64, device=place)
            assert cuda.peak_bytes(place) == 800
            del first
            cuda.forget_peak(place)
            assert cuda.peak_bytes(place) == 0
            torch.zeros(100, dtype=torch.float64, device=place)
            assert cuda.peak_bytes(place) == 800


def test_a_split_model_is_loaded_and_saved_by_gpus_without_room_for_whole_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    graph = capture(model, torch.randn(4, 8), Tensor.sum, "adam", split=SplitPlan(("mlp",), 2))
    plan = naive_plan(graph, np.maximum(graph.shard, 0).astype(np.int32))
    with PlacedModel(graph, core_host(2), plan) as whole:
        whole(torch.randn(4, 8))
        whole.save(path := tmp_path / "step.safetensors")
        state = whole.state_dict()
    with machine_installed() as machine:
        step = PlacedModel(graph, gpu_host(("cuda:0", "cuda:1")), plan)
        assert machine.peak_bytes[0] - machine.live_bytes[0] < 64 * 8 * 4
        unsplit = sum(each.nbytes for name, each in state.items() if name not in step._state.split)
        machine.limit_bytes[0] = machine.live_bytes[0] + unsplit
        step.load(path)
        found = [each.copy("cpu") for each in step._state.stored().values()]
        assert len(found) == 3 * len(state) + len(state)
        step.copy_to(model)
        step.load_state_dict(state)
        copies = {name: plain(each) for name, each in step.state_dict().items()}
        step.close()
    for one in (model.state_dict(), copies):
        assert all(torch.equal(one[name], each) for name, each in state.items())
