"""GPUs that are processes: what ranks launch is in order whatever the timing, though only messages order them.

Losses must be those of one CPU core, to the bit. `test_cuda_mutants` takes every wait out in turn.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_gpus.fake_ranks import fake_ranks, processes, rank_steps
from fake_gpus.gpu_plans import MODELS, Setting, gpu_host, host_of_machines, setting_of
from fake_gpus.late_queues import POLICIES, Policy
from fake_gpus.plan_runs import LATEST_S, judged, machine_installed
from fake_gpus.vector_clocks import Actor, StreamActor
from rank_threads import rank_residents

from rlplace.errors import RunnerError
from rlplace.graphs.optimizers import OPTIMIZERS
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute import launch_code
from rlplace.measure.execute.rank_programs import RankPrograms, rank_programs
from rlplace.measure.problem import Problem, transfer_sources
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.measure.timing.race import RaceProtocol

NUM_PLANS = 40


def ranks_setting(seed: int) -> Setting:
    """A random model on two to four GPUs."""
    generator = np.random.default_rng(seed)
    model, optimizer = str(generator.choice(list(MODELS))), str(generator.choice(list(OPTIMIZERS)))
    names = tuple(f"cuda:{gpu}" for gpu in range(2 + seed % 3))
    return setting_of(model, optimizer, gpu_host(names), seed)


@pytest.mark.parametrize("policy", ["now", *POLICIES])
def test_random_plans(policy: Policy) -> None:
    num_transfers = 0
    for seed in range(NUM_PLANS):
        setting = ranks_setting(seed)
        num_transfers += sum(plan.num_transfers for plan in setting.plans)
        verdict = judged(processes(setting, is_traced=seed % 4 == 0), policy, seed)
        assert not verdict.caught_by, f"{setting.name}: {verdict}"
    assert num_transfers > 10 * NUM_PLANS


@pytest.mark.parametrize("policy", ["now", *POLICIES])
def test_random_plans_with_relays(policy: Policy) -> None:
    """The first GPU on a machine of its own, two or three on another."""
    num_relayed = 0
    for seed in range(NUM_PLANS // 4):
        setting = setting_of(sorted(MODELS)[seed % len(MODELS)], "adam", host_of_machines(3 + seed % 2), seed)
        for plan in setting.plans:
            home = plan.devices[setting.graph.tensor_op[plan.transfer_tensor]]
            num_relayed += int((transfer_sources(setting.graph, setting.host, plan) != home).sum())
        verdict = judged(processes(setting, is_traced=seed % 4 == 0), policy, seed)
        assert not verdict.caught_by, f"{setting.name}: {verdict}"
    assert num_relayed > NUM_PLANS // 2


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_run_that_is_over_has_freed_its_memory_without_the_collector(is_traced: bool) -> None:
    """Each rank in its own thread; a collector, in any other, would not wait for what the rank launched."""
    setting = setting_of("batch_norm_train", "adam", host_of_machines(3), 0)
    gc.collect()
    gc.disable()
    try:
        with machine_installed("lazy") as machine:
            assert processes(setting, is_traced=is_traced)(machine) == []
            assert machine.num_allocations > 0
            assert machine.live_bytes == [0] * machine.num_gpus
            assert not machine.order.violations
    finally:
        gc.enable()


def problem_of(setting: Setting) -> Problem:
    shape = (setting.graph.num_ops, setting.host.num_devices)
    return Problem.grouped(setting.graph, setting.host, Costs(np.full(shape, 1e-5), "estimated"))


def swapped(made: RankPrograms) -> RankPrograms | None:
    """Two receives of a rank from one other change places, where the sizes of their tensors differ."""
    plan, graph = made.plan, made.graph
    source, to = plan.devices[graph.tensor_op[plan.transfer_tensor]], plan.transfer_destination
    for a in range(plan.num_transfers):
        for b in range(a + 1, plan.num_transfers):
            one, other = (int(graph.tensor_bytes[plan.transfer_tensor[k]]) for k in (a, b))
            if (source[a], to[a]) != (source[b], to[b]) or one == other:
                continue
            merged = list(made.merged)
            first, second = (
                next(at for at, (_, each) in enumerate(merged) if each[:2] == ("receive", graph.num_ops + k))
                for k in (a, b)
            )
            merged[first], merged[second] = merged[second], merged[first]
            return replace(made, merged=tuple(merged))
    return None


def test_messages_of_a_pair_in_another_order_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    num_swapped = 0
    for seed in range(12):
        setting = ranks_setting(seed)

        def mutant(*args: Any, **given: Any) -> RankPrograms:
            nonlocal num_swapped
            made = rank_programs(*args, **given)
            other = swapped(made)
            num_swapped += other is not None
            return other or made

        before = num_swapped
        with monkeypatch.context() as patch:
            patch.setattr(launch_code, "rank_programs", mutant)
            verdict = judged(processes(setting), "lazy", seed)
        assert bool(verdict.caught_by) == (num_swapped > before), setting.name
    assert num_swapped >= 12


def test_an_op_that_fails_is_named_and_its_ranks_run_nothing_more() -> None:
    """No memory is left at one allocation of a step after another; the other ranks give their parts up."""
    setting = setting_of("linear", "adam", gpu_host(("cuda:0", "cuda:1")), 0)
    assert setting.plans[0].num_transfers > 0
    for allocation in (1, 3, 6, 9):
        with machine_installed("random", allocation) as machine, fake_ranks(machine, setting) as crew:
            steps = rank_steps(setting, crew)
            assert not crew.is_spent
            machine.fails_at = machine.num_allocations + allocation
            with pytest.raises(RunnerError, match=r"(op|transfer) .* on cuda:[01].*: OutOfMemoryError"):
                steps[0].run(deadline_s=LATEST_S)
            assert crew.is_spent
            with pytest.raises(RunnerError):
                steps[1].run(deadline_s=LATEST_S)


def test_a_process_touches_no_gpu_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each other one would cost it a context there; here plans are raced and traced."""
    setting = setting_of("two_layers", "adam", gpu_host(("cuda:0", "cuda:1", "cuda:2")), 0)
    used: dict[str, set[str]] = {}
    with machine_installed("lazy") as machine:
        use = machine.order.use

        def note(host: Actor, stream: StreamActor) -> None:
            used.setdefault(host.name, set()).add(stream.name.rpartition(" ")[2])
            use(host, stream)

        monkeypatch.setattr(machine.order, "use", note)
        with fake_ranks(machine, setting) as crew:
            problem = problem_of(setting)
            residents = rank_residents(setting.graph, setting.host, crew)
            protocol = RaceProtocol(warmup=1, min_rounds=2, max_rounds=2, num_traced=1)
            simulator = Simulator(problem, threads=1)
            runner = HostRunner(problem, simulator, protocol=protocol, crew=crew, residents=residents)
            runner.measure_plans(setting.plans[:1])
            found = runner.measure_plans(setting.plans)  # once more: what is there already is set back first
            runner.close()
    assert [each.status for each in found] == ["ok"] * len(setting.plans), found
    is_run = ~setting.graph.is_source
    for each in found:
        assert each.timeline is not None
        assert (each.timeline.op_end_s[is_run] > each.timeline.op_start_s[is_run]).all()
    assert not machine.order.violations
    first = used.pop("MainThread") | used.pop("rlplace cuda:0")
    assert first == {"cuda:0"}
    assert used == {"rank 1": {"cuda:1"}, "rank 2": {"cuda:2"}}
