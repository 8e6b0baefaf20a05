"""What devices do: every instant is busy, a copy alone, or idle; and what they hold over time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import BIG, plain_host, random_problem

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import MOST_POINTS, device_shares, memory_curves, step_end_s
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

seeds = st.integers(0, 2**32 - 1)


def test_a_chain_over_two_devices_by_hand() -> None:
    graph = op_graph([[], [0]], [100, 1])
    problem = Problem(graph, plain_host(2), Costs(np.array([[2.0, 2.0], [3.0, 3.0]]), "estimated"), Grouping([0, 1]))
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 1], dtype=np.int32))
    shares = device_shares(problem, plan, simulator.timeline(plan), [7, 8])
    # op 0 until 2, its copy until 3, op 1 until 6
    assert [(share.busy_s, share.transfer_s, share.idle_s) for share in shares] == [(2.0, 1.0, 3.0), (3.0, 1.0, 2.0)]
    assert [(share.sent_bytes, share.received_bytes, share.num_ops) for share in shares] == [(100, 0, 1), (0, 100, 1)]
    assert [(share.peak_bytes, share.capacity_bytes) for share in shares] == [(7, BIG), (8, BIG)]


def test_a_gangs_op_keeps_its_members_busy_and_a_handover_is_no_copy() -> None:
    devices = (*(Device(f"d{k}", "any", "simulated", BIG) for k in range(2)),)
    gang = Device("both", "any", "simulated", BIG, members=("d0", "d1"))
    handed = [Route(one, other, ()) for k in range(2) for one, other in ((f"d{k}", "both"), ("both", f"d{k}"))]
    copied = [Route(f"d{k}", f"d{1 - k}", ("bus",)) for k in range(2)]
    host = Host("gang", (*devices, gang), (Link("bus", 100.0),), (*handed, *copied))
    costs = Costs(np.full((2, 3), 2.0), "estimated")
    problem = Problem(op_graph([[], [0]], 100), host, costs, Grouping([0, 1]))
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 2], dtype=np.int32))
    shares = device_shares(problem, plan, simulator.timeline(plan), [0, 0, 0])
    assert [(share.busy_s, share.idle_s) for share in shares] == [(4.0, 0.0), (2.0, 2.0), (2.0, 2.0)]
    assert [share.sent_bytes for share in shares] == [0, 0, 0]
    assert shares[2].members == ("d0", "d1")


@given(seed=seeds, num_ops=st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_every_device_accounts_for_the_whole_step(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32))
    timeline, peaks = simulator.timeline(plan), simulator.retime(plan).peak_bytes
    shares = device_shares(problem, plan, timeline, peaks)
    step_s = step_end_s(timeline)
    for share in shares:
        assert share.busy_s + share.transfer_s + share.idle_s == pytest.approx(step_s, rel=1e-9, abs=1e-9)
    assert sum(share.num_ops for share in shares) == np.count_nonzero(~problem.graph.is_source)
    plain = [share for share in shares if not share.members]
    if len(plain) == len(shares):
        assert sum(share.sent_bytes for share in shares) == sum(share.received_bytes for share in shares)
        durations = timeline.op_end_s - timeline.op_start_s
        for index, share in enumerate(shares):
            assert share.busy_s == pytest.approx(durations[plan.devices == index].sum(), rel=1e-9, abs=1e-9)


@given(seed=seeds, num_ops=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_memory_curves_reach_the_peak_and_never_pass_it(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    positive = Costs(problem.costs.op_time_s + 0.01, "estimated")  # what takes no time is never seen to hold memory
    problem = replace(problem, costs=positive)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32))
    curves = memory_curves(problem, simulator.timeline(plan))
    peaks = simulator.retime(plan).peak_bytes
    for curve, peak in zip(curves, peaks, strict=True):
        assert curve.time_s[0] == 0.0
        assert list(curve.time_s) == sorted(curve.time_s)
        assert max(curve.num_bytes) <= peak


def test_a_long_curve_keeps_its_peak() -> None:
    problem = Problem(op_graph([[]]), plain_host(2), Costs(np.ones((1, 2)), "estimated"), Grouping([0]))
    simulator = Simulator(problem, threads=1)
    timeline = simulator.timeline(simulator.plan(np.zeros(1, dtype=np.int32)))
    held = np.random.default_rng(0).permutation(5000)
    long = replace(
        timeline,
        memory_time_s=np.arange(5000, dtype=np.float64),
        memory_device=np.ones(5000, dtype=np.int32),
        memory_bytes=held,
    )
    empty, curve = memory_curves(problem, long)
    assert empty.time_s == ()
    assert len(curve.time_s) <= MOST_POINTS
    assert curve.time_s[0] == 0.0
    assert max(curve.num_bytes) == 4999
    assert curve.time_s[curve.num_bytes.index(4999)] == float(np.argmax(held))
    nothing = replace(timeline, memory_time_s=np.zeros(0), memory_device=held[:0], memory_bytes=held[:0])
    assert memory_curves(problem, nothing) == ()
