"""Critical paths, worked out by hand and held against the simulator's times on random problems."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import BIG, plain_host, problem_of, random_problem

from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import CriticalPaths, Simulator

seeds = st.integers(0, 2**32 - 1)
Item = tuple[str, int] | tuple[str, int, int]


def paths_of(problem: Problem, *plans: Plan) -> CriticalPaths:
    simulator = Simulator(problem, threads=1)
    return simulator.critical_paths(simulator.check_plans(plans))


def path_of(problem: Problem, devices: list[int]) -> tuple[list[Item], float]:
    """The items of the critical path, and the step time."""
    plan = Simulator(problem, threads=1).plan(np.array(devices, dtype=np.int32))
    paths, n = paths_of(problem, plan), len(devices)
    sends = list(zip(plan.transfer_tensor.tolist(), plan.transfer_destination.tolist(), strict=True))
    return [("op", i) if i < n else ("send", *sends[i - n]) for i in paths.items.tolist()], float(paths.step_s[0])


def durations(problem: Problem, plan: Plan) -> np.ndarray:
    """(N + K,) seconds of each item, launches and co-running aside."""
    n, graph = problem.graph.num_ops, problem.graph
    op_s = problem.costs.op_time_s[np.arange(n), plan.devices] * ~graph.is_source
    pair = plan.devices[graph.tensor_op[plan.transfer_tensor]], plan.transfer_destination
    sent_s = (
        problem.transfer_latency_s[pair]
        + graph.tensor_bytes[plan.transfer_tensor] * (problem.transfer_s_per_byte[pair])
    )
    return np.concatenate([op_s, sent_s])


def test_a_chain_is_its_own_critical_path_and_a_source_is_on_none() -> None:
    problem = problem_of(op_graph([[], [0], [1]]), plain_host(1), [1.0, 2.0, 3.0])
    assert path_of(problem, [0, 0, 0]) == ([("op", 0), ("op", 1), ("op", 2)], 6.0)
    problem = problem_of(op_graph([[], [0], [1]], targets=["input", "aten.op", "aten.op"]), plain_host(1), [9.0, 2, 3])
    assert path_of(problem, [0, 0, 0]) == ([("op", 1), ("op", 2)], 5.0)


def test_a_diamond_over_two_devices_goes_by_the_branch_that_is_copied() -> None:
    problem = problem_of(op_graph([[], [0], [0], [1, 2]], 100), plain_host(2), [1.0, 1.0, 5.0, 1.0])
    expected = [("op", 0), ("send", 0, 1), ("op", 2), ("send", 2, 0), ("op", 3)]
    assert path_of(problem, [0, 0, 1, 0]) == (expected, 9.0)
    short = replace(problem, costs=Costs(np.array([[1.0] * 2, [9.0] * 2, [5.0] * 2, [1.0] * 2]), "estimated"))
    assert path_of(short, [0, 0, 1, 0]) == ([("op", 0), ("op", 1), ("op", 3)], 11.0)


def test_a_copy_waits_for_the_one_before_it_on_a_shared_link() -> None:
    graph = op_graph([[], [], [0], [1]], [500, 100, 1, 1])
    problem = problem_of(graph, plain_host(3), [1.0, 0.5, 1.0, 1.0])
    # op 1 ends at 1.5, but the way up of device 0 is taken from 1 to 6
    expected = [("op", 0), ("send", 0, 1), ("send", 1, 2), ("op", 3)]
    assert path_of(problem, [0, 0, 1, 2]) == (expected, 8.0)


def test_an_update_waits_for_readers_and_for_copies_of_what_it_changes() -> None:
    graph = op_graph([[], [0], [0]], [500, 1, 1], targets=["parameter", "aten.op", "aten.op"], mutations=[(2, 0)])
    problem = problem_of(graph, plain_host(2), [0.0, 0.5, 1.0])
    assert path_of(problem, [0, 1, 0]) == ([("send", 0, 1), ("op", 2)], 6.0)
    assert path_of(problem, [0, 0, 0]) == ([("op", 1), ("op", 2)], 1.5)


def gang_host(*, blocks: bool = False) -> Host:
    """Two devices and the gang of both, which takes over what they hold; copies may block where they come from."""
    devices = (*(Device(f"d{k}", "any", "simulated", BIG) for k in range(2)),)
    gang = Device("both", "any", "simulated", BIG, members=("d0", "d1"))
    handed = [Route(one, other, ()) for k in range(2) for one, other in ((f"d{k}", "both"), ("both", f"d{k}"))]
    copied = [Route(f"d{k}", f"d{1 - k}", ("bus",), blocks_source=blocks) for k in range(2)]
    return Host("gang", (*devices, gang), (Link("bus", 100.0),), (*handed, *copied))


def test_a_gang_waits_for_the_later_member() -> None:
    problem = problem_of(op_graph([[], [], [0]]), gang_host(), [1.0, 3.0, 1.0])
    assert path_of(problem, [0, 1, 2]) == ([("op", 1), ("op", 2)], 4.0)
    assert path_of(problem, [1, 0, 2]) == ([("op", 1), ("op", 2)], 4.0)


def test_what_is_handed_over_takes_no_time_on_the_path() -> None:
    problem = problem_of(op_graph([[], [0]], 100), gang_host(), [1.0, 2.0])
    path, step_s = path_of(problem, [0, 2])
    assert (path[0], path[-1], step_s) == (("op", 0), ("op", 1), 3.0)


def test_a_device_waits_for_a_copy_that_blocks_it() -> None:
    problem = problem_of(op_graph([[], [0], []], 500), gang_host(blocks=True), [1.0, 0.5, 1.0])
    plan = Simulator(problem, threads=1).plan(np.array([0, 1, 0], dtype=np.int32), np.array([3.0, 2.0, 1.0]))
    paths = paths_of(problem, replace(plan, sequence=np.array([0, 3, 2, 1], dtype=np.int32)))
    assert paths.items.tolist() == [0, 3, 2]
    assert paths.step_s.tolist() == [7.0]


def test_a_plan_that_does_not_fit_has_no_path_and_the_others_keep_theirs() -> None:
    host = plain_host(2)
    small = replace(host, devices=(host.devices[0], replace(host.devices[1], memory_bytes=150)))
    problem = problem_of(op_graph([[], [0], [1]], 100), small, [1.0, 1.0, 1.0])
    simulator = Simulator(problem, threads=1)
    plans = [simulator.plan(np.array(devices, dtype=np.int32)) for devices in ([0] * 3, [1] * 3, [0] * 3)]
    paths = paths_of(problem, *plans)
    assert paths.step_s.tolist() == [3.0, np.inf, 3.0]
    assert paths.offsets.tolist() == [0, 3, 3, 6]
    assert paths.items.tolist() == [0, 1, 2, 0, 1, 2]


def test_no_plans_have_no_paths() -> None:
    paths = paths_of(problem_of(op_graph([[]]), plain_host(1), [1.0]))
    assert (len(paths.step_s), len(paths.items), paths.offsets.tolist()) == (0, 0, [0])


def unlaunched(rng: np.random.Generator, num_ops: int, *, corun: bool) -> Problem:
    """Any problem in which launching takes no time."""
    problem = random_problem(rng, num_ops)
    host = replace(problem.host, dispatch_s=0.0, copy_dispatch_s=0.0)
    return replace(problem, host=host if corun else replace(host, corun_slowdown=()))


@pytest.mark.slow
@given(seed=seeds, num_ops=st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_the_path_takes_as_long_as_the_step(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = unlaunched(rng, num_ops, corun=False)
    simulator = Simulator(problem, threads=1)
    placements = rng.integers(0, problem.host.num_devices, (3, num_ops)).astype(np.int32)
    plans = [simulator.plan(devices) for devices in placements]
    paths = paths_of(problem, *plans)
    for b, plan in enumerate(plans):
        items, outcome = paths.items[paths.offsets[b] : paths.offsets[b + 1]], simulator.retime(plan)
        assert paths.step_s[b] == outcome.step_time_s
        if outcome.ok:
            assert durations(problem, plan)[items].sum() == pytest.approx(outcome.step_time_s, rel=1e-12, abs=1e-12)
        else:
            assert len(items) == 0


@pytest.mark.slow
@given(seed=seeds, num_ops=st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_the_path_leaves_no_gap(seed: int, num_ops: int) -> None:
    """Also where ops that run beside others take longer."""
    rng = np.random.default_rng(seed)
    problem = unlaunched(rng, num_ops, corun=True)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32))
    paths, timeline = paths_of(problem, plan), simulator.timeline(plan)
    start_s = np.concatenate([timeline.op_start_s, timeline.transfer_start_s])[paths.items]
    end_s = np.concatenate([timeline.op_end_s, timeline.transfer_end_s])[paths.items]
    if len(paths.items):
        np.testing.assert_allclose([0.0, *end_s], [*start_s, paths.step_s[0]], rtol=1e-12, atol=1e-12)


@given(seed=seeds, num_ops=st.integers(5, 60))
@settings(max_examples=150, deadline=None)
def test_a_factor_counts_for_its_share_of_the_path(seed: int, num_ops: int) -> None:
    """d log(step time) / d log(factor), by central differences; times that do not tie have one critical path."""
    rng = np.random.default_rng(seed)
    problem = unlaunched(rng, num_ops, corun=False)
    costs = rng.uniform(0.5, 3.0, (num_ops, problem.host.num_devices))
    links = tuple(replace(link, bandwidth_bytes_per_s=rng.uniform(50, 300)) for link in problem.host.links)
    problem = replace(problem, costs=Costs(costs, "estimated"), host=replace(problem.host, links=links))
    chosen = rng.random(num_ops) < 0.3
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32))
    paths, batch = paths_of(problem, plan), simulator.check_plans([plan])
    if not np.isfinite(paths.step_s[0]) or paths.step_s[0] == 0:
        return
    ops = [item for item in paths.items.tolist() if item < num_ops and chosen[item]]
    share = durations(problem, plan)[ops].sum() / paths.step_s[0]
    logs = []
    for step in (-1e-6, 1e-6):
        scaled = Costs(np.where(chosen[:, None], np.exp(step), 1.0) * costs, "estimated")
        timed = Simulator(replace(problem, costs=scaled), threads=1).retime_batch(batch)
        logs.append(np.log(timed[0].step_time_s))
    assert (logs[1] - logs[0]) / 2e-6 == pytest.approx(share, abs=1e-5)


def test_the_ops_of_a_critical_path_are_told_of_a_placement_and_a_copy_stands_for_the_op_it_is_from() -> None:
    problem = problem_of(op_graph([[], [0], [0], [1, 2]], 100), plain_host(2), [1.0, 1.0, 5.0, 1.0])
    simulator = Simulator(problem, threads=1)
    assert simulator.critical_ops(np.array([0, 0, 1, 0])).tolist() == [3, 2, 2, 0, 0]
    fork = problem_of(op_graph([[], [0], [0]], 1), plain_host(2), [1.0, 3.0, 3.0])
    ops = [
        Simulator(fork).critical_ops(np.zeros(3, dtype=np.int32), np.array(order, dtype=float)).tolist()
        for order in ([3, 2, 1], [3, 1, 2])
    ]
    assert ops == [[2, 1, 0], [1, 2, 0]]  # what has the device before, though nothing is read of it


def test_what_does_not_fit_has_no_critical_ops_and_nor_has_a_throughput() -> None:
    host = plain_host(2)
    small = replace(host, devices=tuple(replace(device, memory_bytes=150) for device in host.devices))
    problem = problem_of(op_graph([[], [0], [0], [1, 2]], 100), small, [1.0] * 4)
    assert not len(Simulator(problem).critical_ops(np.zeros(4, dtype=np.int32)))
    fits = replace(problem, host=host)
    assert len(Simulator(fits).critical_ops(np.zeros(4, dtype=np.int32))) == 4
    assert not len(Simulator(fits, objective="throughput").critical_ops(np.zeros(4, dtype=np.int32)))
