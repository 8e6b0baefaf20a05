"""What placed steps launch on GPUs is in order whatever the timing: proven by vector clocks on made-up GPUs.

Each run trains three steps with two plans in turn over one set of tensors and threads, and must leave the losses, the
parameters and the buffers of one CPU core, to the bit. `benchmarks/cuda_order.py` does the same with ten times as many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_gpus.gpu_plans import MODELS, gpu_host, input_elsewhere, random_setting, setting_of
from fake_gpus.late_queues import Policy
from fake_gpus.plan_runs import crew_of, judged, machine_installed, placed_steps, trained
from fake_gpus.scenarios import failed_and_run_again, gang, placed_model, timed_out_and_run_again
from fake_gpus.vector_clocks import Actor, Clock
from torch import nn

from rlplace.graphs import capture
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.traced_ops import TracingCosts
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing import host_runner
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.measure.timing.race import RaceProtocol

NUM_PLANS, AT_ONCE = 100, 10


@pytest.mark.parametrize("first", range(0, NUM_PLANS, AT_ONCE))
def test_random_plans(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        setting = random_setting(seed)
        verdict = judged(trained(setting, is_traced=seed % 4 == 0))
        assert not verdict.caught_by, f"{setting.name}: {verdict}"


@pytest.mark.slow
def test_random_plans_cover_what_they_should() -> None:
    settings = [random_setting(seed) for seed in range(NUM_PLANS)]
    assert {setting.model for setting in settings} == set(MODELS)
    devices = [setting.host.devices for setting in settings]
    assert {sum(each.backend == "cuda" for each in host) for host in devices} == set(range(1, 9))
    for name in ("cpu", "cuda:0", "cuda:0/1", "cuda:3"):
        assert any(each.name == name for host in devices for each in host)
    assert any(setting.plans[0].num_transfers > 30 for setting in settings)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "input_changed"])
def test_models_whose_state_is_read_and_set_between_steps(model: str) -> None:
    host = gpu_host(("cuda:0/0", "cuda:0/1", "cuda:1", "cpu"))
    for reads in ((), ("state_dict", "copy_to", "load_state_dict")):
        verdict = judged(placed_model(setting_of(model, "adamw", host, len(model)), reads))
        assert not verdict.caught_by, str(verdict)


@pytest.mark.parametrize("seed", range(200, 210))
def test_a_step_that_fails_leaves_nothing_behind(seed: int) -> None:
    setting = random_setting(seed)
    verdict = judged(failed_and_run_again(setting, 4))
    assert not verdict.caught_by, f"{setting.name}: {verdict}"


def test_a_step_that_is_stuck_leaves_nothing_behind() -> None:
    setting = setting_of("tied", "adam", gpu_host(("cuda:0", "cuda:1", "cuda:2")), 1)
    verdict = judged(timed_out_and_run_again(setting))
    assert not verdict.caught_by, str(verdict)


def test_cores_and_a_gang_of_them() -> None:
    verdict = judged(gang(setting_of("tied", "adam", gpu_host(("cuda:0",)))))
    assert not verdict.caught_by, str(verdict)


def test_a_timeline_of_gpus_has_one_item_at_a_time_on_each() -> None:
    """Also where updates that follow each other are one fused call, marked as one."""
    setting = input_elsewhere()
    graph, plan = setting.graph, setting.plans[0]
    with machine_installed("random"), crew_of(setting) as crew:
        step = placed_steps(setting, Residents(graph, setting.host), crew, is_traced=True)[0]
        step.run()
        timeline = step.timeline()
    is_timed = ~graph.is_source
    assert np.all(timeline.op_start_s[is_timed] < timeline.op_end_s[is_timed])
    assert np.all(timeline.transfer_start_s < timeline.transfer_end_s)
    for device in range(2):
        ops = [op for op in plan.sequence if op < graph.num_ops and is_timed[op] and plan.devices[op] == device]
        assert np.all(timeline.op_end_s[ops][:-1] <= timeline.op_start_s[ops][1:] + 1e-9)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x)) + torch.sin(torch.cos(x))


@pytest.mark.parametrize("names", [("cuda:0", "cuda:1"), ("cuda:0/0", "cuda:0/1"), ("cuda:0", "cpu")])
def test_what_stands_between_a_transfer_and_its_first_reader_runs_beside_the_copy(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the simulator: the copy is before its reader, and in no order with ops before that."""
    graph, host = capture(Branches(), torch.ones(4)), gpu_host(names)
    first, second, cos, sin, add = (k for k in range(graph.num_ops) if not graph.is_source[k])
    assert [graph.targets[op].split(".")[1] for op in (cos, sin, add)] == ["cos", "sin", "add"]
    devices = np.array([int(op not in (first, second)) for op in range(graph.num_ops)], dtype=np.int32)
    (source,) = np.flatnonzero(graph.is_source)
    n, sent = graph.num_ops, [int(graph.output_offsets[op]) for op in (source, second)]
    sequence = [source, n, first, second, n + 1, cos, sin, add]
    plan = Plan(devices, *(np.array(each, dtype=np.int32) for each in (sent, [0, 1], sequence)))

    costs = Costs(np.full((n, 2), 1e-4), "estimated")  # so that launches run ahead
    simulated = Simulator(Problem.grouped(graph, host, costs), threads=1).timeline(plan)
    assert simulated.op_start_s[sin] < simulated.transfer_end_s[1] <= simulated.op_start_s[add]

    ran: dict[str, tuple[Actor, Clock]] = {}
    with machine_installed("lazy") as machine:
        access = machine.order.access

        def note(actor: Actor, *rest: Any) -> None:
            access(actor, *rest)
            name = "copy" if "copies" in actor.name else rest[-1]
            ran[name] = actor, dict(actor.clock)  # the last of its kind: of copies, that to the second device

        monkeypatch.setattr(machine.order, "access", note)
        crew = Crew(host.devices)
        try:
            PlacedStep(graph, host, plan, Residents(graph, host), crew).run()
        finally:
            crew.stop()
        assert not machine.order.violations
    copying, at = ran["copy"]
    for name, is_after in (("aten.cos.default", False), ("aten.sin.default", False), ("aten.add.Tensor", True)):
        _, clock = ran[name]
        assert (clock.get(copying.number, 0) >= at[copying.number]) == is_after, name


@pytest.mark.parametrize(
    ("names", "policy"), [(("cuda:0", "cuda:1"), "random"), (("cuda:0/0", "cuda:0/1", "cpu"), "lazy")]
)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_plans_of_a_race_are_traced_in_order(
    names: tuple[str, ...], policy: Policy, is_sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of("two_layers", "momentum", gpu_host(names), 2)
    graph, num_devices = setting.graph, setting.host.num_devices
    problem = Problem.grouped(graph, setting.host, Costs(np.full((graph.num_ops, num_devices), 1e-5), "estimated"))
    if is_sampled:
        dear = TracingCosts(np.full(num_devices, 1e9), np.full(num_devices, 1e-6))
        monkeypatch.setattr(host_runner, "tracing_costs", lambda *_: dear)
    with machine_installed(policy) as machine:
        protocol = RaceProtocol(warmup=1, min_rounds=1, max_rounds=2, num_traced=1)
        runner = HostRunner(problem, Simulator(problem, threads=1), protocol=protocol)
        try:
            outcomes = runner.measure_plans(setting.plans)
        finally:
            runner.close()
    assert not machine.order.violations
    assert not machine.queues.failures
    runs = ~graph.is_source
    for outcome, plan in zip(outcomes, setting.plans, strict=True):
        timeline = outcome.timeline
        assert (outcome.status, timeline is None) == ("ok", False), outcome.why
        is_told = timeline.op_end_s > timeline.op_start_s
        cells = {(graph.signatures[op], plan.devices[op]) for op in np.flatnonzero(runs)}
        assert {(graph.signatures[op], plan.devices[op]) for op in np.flatnonzero(is_told)} == cells
        assert is_sampled or np.array_equal(is_told, runs)
        assert np.all(timeline.transfer_end_s > timeline.transfer_start_s)
        assert timeline.traced_op_s == pytest.approx(1e-6) or not is_sampled
