"""What tracing costs, which ops are traced where all would cost too much, and what a traced duration on a core holds.

An op's duration ends when its thread has the interpreter's lock back, not when its work is done.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from naive_plan import naive_plan, random_devices
from placed_steps import HOST
from torch import Tensor, nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute import traced_ops
from rlplace.measure.execute.device_threads import Crew, HostClock
from rlplace.measure.execute.launch_code import StepCode
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.traced_ops import TracingCosts, sampled_items, tracing_costs
from rlplace.measure.problem import Plan, Timeline


@functools.cache
def training() -> OpGraph:
    """Six layers, ops of which have the same signatures."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
    return capture(model, torch.ones(3, 4), torch.sum, "adam")


def plan_of(graph: OpGraph, seed: int = 0) -> Plan:
    return naive_plan(graph, random_devices(graph, 2, np.random.default_rng(seed)))


def test_tracing_is_timed_on_each_device(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = tracing_costs(HOST, crew)
    assert costs.thread_s.shape == (2,)
    assert np.all(costs.thread_s > 0)
    assert np.array_equal(costs.recorded_s, costs.thread_s), "an op begins where the one before ended"
    reads = itertools.count()
    monkeypatch.setattr(HostClock, "mark", lambda _: float(next(reads)))
    one_gpu = replace(HOST.devices[1], backend="cuda")
    monkeypatch.setattr(traced_ops, "clock_of", lambda _: HostClock())
    costs = tracing_costs(replace(HOST, devices=(HOST.devices[0], one_gpu)), crew)
    assert costs.recorded_s[1] == 1.0, "between two readings, of which there is one a second"
    assert next(reads) == 2 * 2 * traced_ops.NUM_MARKED * traced_ops.REPEATS


def test_what_tracing_adds_is_the_mean_over_the_ops_of_a_plan() -> None:
    graph = training()
    costs = TracingCosts(np.array([9.0, 9.0]), np.array([1.0, 4.0]))
    ops = np.flatnonzero(~graph.is_source)
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    devices[ops[:1]] = 1
    assert costs.added_s(graph, naive_plan(graph, devices)) == pytest.approx((4.0 + len(ops) - 1) / len(ops))


@pytest.mark.parametrize("seed", range(3))
def test_of_each_signature_on_each_device_an_op_is_traced_then_any(seed: int) -> None:
    graph, n = training(), training().num_ops
    plan = plan_of(graph, seed)
    runs = np.flatnonzero(~graph.is_source)
    cells = {(graph.signatures[op], int(plan.devices[op])) for op in runs}
    counts = np.bincount(plan.devices[runs], minlength=2)
    least = [len({cell for cell in cells if cell[1] == device}) for device in range(2)]
    assert np.all(counts > least), "or nothing would be drawn"
    for most in ([0, 0], [least[0] + 2, 0], [10**6, counts[1] - 1]):
        items = sampled_items(graph, plan, most, np.random.default_rng(seed))
        assert items is not None
        ops = [item for item in items if item < n]
        assert {item for item in items if item >= n} == set(range(n, n + plan.num_transfers))
        assert {(graph.signatures[op], int(plan.devices[op])) for op in ops} == cells
        expected = [min(max(at_most, few), count) for at_most, few, count in zip(most, least, counts, strict=True)]
        assert np.bincount(plan.devices[ops], minlength=2).tolist() == expected
        assert not graph.is_source[ops].any()
    assert sampled_items(graph, plan, counts, np.random.default_rng(seed)) is None, "all of them"


def test_the_sample_is_one_of_the_seed() -> None:
    graph = training()
    plan = plan_of(graph)
    first, same, other = (sampled_items(graph, plan, [20, 20], np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first == same
    assert first != other


def test_all_ops_are_traced_where_that_takes_a_twentieth_of_the_step() -> None:
    graph = training()
    plan = plan_of(graph)
    runs = ~graph.is_source
    counts = np.bincount(plan.devices[runs], minlength=2) + np.bincount(plan.transfer_destination, minlength=2)
    costs, busiest = TracingCosts(np.full(2, 1e-6), np.full(2, 1e-7)), int(counts.max())
    generator = np.random.default_rng(0)
    assert costs.traced(graph, plan, busiest * 2.001e-5, generator) is None
    items = costs.traced(graph, plan, busiest * 1.999e-5, generator)
    assert items is not None
    assert len(items) == runs.sum() + plan.num_transfers - (counts == busiest).sum(), "one less on the busiest"
    assert TracingCosts(np.zeros(2), np.zeros(2)).traced(graph, plan, 1e-9, generator) is None, "it costs nothing"


def test_ops_that_are_not_traced_have_no_times_and_the_step_computes_the_same(crew: Crew) -> None:
    graph = training()
    plan = plan_of(graph)
    items = sampled_items(graph, plan, [0, 0], np.random.default_rng(0))
    assert items is not None
    results, steps = [], []
    for options in ({}, {"is_traced": True}, {"is_traced": True, "traced": items}):
        step = PlacedStep(graph, HOST, plan, Residents(graph, HOST), crew, **options)
        step.run()
        results.append(step.result.clone())
        steps.append(step)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    timeline = steps[2].timeline(has_memory=False)
    is_update = np.array([target.startswith("update") for target in graph.targets])
    is_traced = np.isin(np.arange(graph.num_ops), list(items))
    assert np.all(timeline.op_end_s[is_traced] > timeline.op_start_s[is_traced])
    untold = ~is_traced & ~is_update  # updates that are one call with a traced one share its time
    assert untold.any()
    assert np.all(timeline.op_end_s[untold] == timeline.op_start_s[untold])
    assert np.all(timeline.transfer_end_s > timeline.transfer_start_s)


def test_an_op_is_found_by_its_line_whatever_is_traced() -> None:
    graph = training()
    plan = plan_of(graph)
    every = StepCode(graph, HOST, plan, is_traced=True)
    some = StepCode(
        graph, HOST, plan, is_traced=True, traced=sampled_items(graph, plan, [0, 0], np.random.default_rng(0))
    )
    assert some.line_items == every.line_items
    for sampled, whole in zip(some.sources, every.sources, strict=True):
        assert 0 < sampled.count("clock()") < whole.count("clock()")


# Two ops at once: `told` is done when it is told so, while the thread of the other device has the interpreter's lock


state: dict[str, float] = {}
HELD_S = 0.02


@torch.library.custom_op("rlplace_tests_traced::told", mutates_args=())
def told(x: Tensor) -> Tensor:
    """A copy of `x`, once a byte has come, for which the lock is let go of."""
    state["waits"] = 1.0
    os.read(int(state["reader"]), 1)
    return x.clone()


@torch.library.custom_op("rlplace_tests_traced::tells", mutates_args=())
def tells(x: Tensor) -> Tensor:
    """A copy of `x`; the byte is sent with the lock in hand, which is kept for a while."""
    while "waits" not in state:
        time.sleep(1e-4)
    ctypes.PyDLL(None).write(int(state["writer"]), b"x", 1)
    state["told_s"] = time.perf_counter()
    while time.perf_counter() < state["told_s"] + HELD_S:
        pass
    state["let_go_s"] = time.perf_counter()
    return x.clone()


for each in (told, tells):
    each.register_fake(torch.empty_like)


class Both(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return told(x) + tells(x)


def test_a_duration_on_a_core_ends_when_the_thread_has_the_lock_back(crew: Crew) -> None:
    """The op's work was done before; what is recorded beyond it is what another thread kept the lock for."""
    graph = capture(Both(), torch.ones(3))
    waiting, holding = (graph.targets.index(f"rlplace_tests_traced.{name}.default") for name in ("told", "tells"))
    plan = naive_plan(graph, np.array([int(op == holding) for op in range(graph.num_ops)], dtype=np.int32))
    step = PlacedStep(graph, HOST, plan, Residents(graph, HOST), crew, is_traced=True)
    reader, writer = os.pipe()
    interval_s = sys.getswitchinterval()
    state.clear()
    state.update(reader=reader, writer=writer)
    try:
        sys.setswitchinterval(1000.0)  # a thread keeps the lock until it waits for something
        step.run()
    finally:
        sys.setswitchinterval(interval_s)
        os.close(reader)
        os.close(writer)
    timeline: Timeline = step.timeline()
    done_s, back_s = (state[name] - step._marks.started_s for name in ("told_s", "let_go_s"))
    assert timeline.op_start_s[waiting] < done_s
    assert timeline.op_end_s[waiting] >= back_s >= done_s + HELD_S
    duration_s = timeline.op_end_s[waiting] - timeline.op_start_s[waiting]
    assert duration_s - (done_s - timeline.op_start_s[waiting]) >= HELD_S, "that much is not the op's"
