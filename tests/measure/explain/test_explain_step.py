"""Critical paths, cuts, shares of devices and advice: by hand, exact on random problems, and of measured steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import BIG, plain_host, problem_of, random_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import (
    DATA_PARALLEL,
    EAGER,
    MOST_POINTS,
    ONE_DEVICE,
    RULES,
    advise_on,
    costliest_cuts,
    critical_items,
    device_shares,
    disturbance_of,
    explain,
    find_critical_path,
    memory_curves,
    what_is_sent,
)
from rlplace.measure.explain.explanation import (
    SCHEMA,
    Advice,
    Alternative,
    CriticalPath,
    CutEdge,
    DeviceShare,
    Explanation,
    ModuleShare,
    PathPart,
    RouteShare,
)
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.simulator import Simulator

seeds = st.integers(0, 2**32 - 1)


def planned(problem: Problem, devices: list[int]) -> tuple[Plan, Timeline]:
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array(devices, dtype=np.int32))
    return plan, simulator.timeline(plan)


def path_of(problem: Problem, plan: Plan, timeline: Timeline) -> CriticalPath:
    return find_critical_path(problem, plan, timeline, critical_items(problem, plan, timeline))


def check_is_exact(path: CriticalPath, step_s: float) -> None:
    """Parts follow each other from 0 to the end of the step, and every sum of them is the step."""
    assert path.seconds == step_s
    reached_s = 0.0
    for part in path.parts:
        assert part.start_s == reached_s
        reached_s = part.end_s
    assert sum(part.seconds for part in path.parts) == pytest.approx(step_s, rel=1e-12, abs=1e-12)
    assert path.op_s + path.transfer_s + path.wait_s == pytest.approx(step_s, rel=1e-12, abs=1e-12)
    assert sum(module.seconds for module in path.modules) == pytest.approx(path.op_s, rel=1e-12, abs=1e-12)
    assert sum(route.seconds for route in path.routes) == pytest.approx(path.transfer_s, rel=1e-12, abs=1e-12)


def test_a_diamond_goes_by_the_branch_that_is_copied() -> None:
    graph = replace(op_graph([[], [0], [0], [1, 2]], 100), modules=("stem", "left", "right", "head"))
    problem = problem_of(graph, plain_host(2), [1.0, 1.0, 5.0, 1.0])
    path = path_of(problem, *planned(problem, [0, 0, 1, 0]))
    found = [(part.kind, part.source, part.device, part.module, part.seconds) for part in path.parts]
    assert found == [
        ("op", "", "d0", "stem", 1.0),
        ("transfer", "d0", "d1", "stem", 1.0),
        ("op", "", "d1", "right", 5.0),
        ("transfer", "d1", "d0", "right", 1.0),
        ("op", "", "d0", "head", 1.0),
    ]
    assert [part.what for part in path.parts] == ["", "activation", "", "activation", ""]
    check_is_exact(path, 9.0)
    assert (path.op_s, path.transfer_s, path.wait_s) == (7.0, 2.0, 0.0)
    assert [(share.module, share.seconds) for share in path.modules] == [("right", 5.0), ("head", 1.0), ("stem", 1.0)]
    assert [(route.source, route.destination, route.num_bytes) for route in path.routes] == [
        ("d0", "d1", 100),
        ("d1", "d0", 100),
    ]


def test_ops_in_a_row_of_one_module_and_phase_are_one_part() -> None:
    graph = replace(
        op_graph([[], [0], [1], [2]], phases=[FORWARD, FORWARD, BACKWARD, BACKWARD]), modules=("a", "a", "a", "b")
    )
    problem = problem_of(graph, plain_host(1), [1.0, 2.0, 3.0, 4.0])
    path = path_of(problem, *planned(problem, [0] * 4))
    assert [(part.module, part.phase, part.num_ops, part.seconds) for part in path.parts] == [
        ("a", "forward", 2, 3.0),
        ("a", "backward", 1, 3.0),
        ("b", "backward", 1, 4.0),
    ]
    assert path.parts[0].name == "op0"


def test_launches_are_waits() -> None:
    host = plain_host(1, dispatch_s=2.0, run_ahead=1)
    problem = problem_of(op_graph([[], [0]]), host, [1.0, 1.0])
    path = path_of(problem, *planned(problem, [0, 0]))
    assert [(part.kind, part.seconds) for part in path.parts] == [
        ("wait", 2.0),
        ("op", 1.0),
        ("wait", 2.0),
        ("op", 1.0),
    ]
    assert [part.name for part in path.parts] == ["op0", "op0", "op1", "op1"]
    assert path.wait_s == 4.0


def test_a_step_of_sources_alone_has_no_path() -> None:
    problem = problem_of(op_graph([[]], targets=["input"]), plain_host(1), [1.0])
    path = path_of(problem, *planned(problem, [0]))
    assert (path.parts, path.seconds, path.op_s) == ((), 0.0, 0.0)


def test_a_timeline_of_another_plan_is_refused() -> None:
    problem = problem_of(op_graph([[], [0]]), plain_host(2), [1.0, 1.0])
    (plan, _), (_, timeline) = planned(problem, [0, 1]), planned(problem, [0, 0])
    with pytest.raises(InvalidValue, match=r"2 ops and 0 transfers.*expected the plan's 2 ops and 1 transfers"):
        critical_items(problem, plan, timeline)


@pytest.mark.slow
@given(seed=seeds, num_ops=st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_the_parts_add_up_to_the_step_on_any_problem(seed: int, num_ops: int) -> None:
    """Gangs, shared links, blocking copies, updates, launches of either kind and co-running among them."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32))
    outcome, timeline = simulator.retime(plan), simulator.timeline(plan)
    path = path_of(problem, plan, timeline)
    step_s = max(timeline.op_end_s.max(initial=0.0), timeline.transfer_end_s.max(initial=0.0))
    assert not outcome.ok or outcome.step_time_s == step_s
    check_is_exact(path, step_s)
    if problem.host.dispatch_s == problem.host.copy_dispatch_s == 0:
        assert path.wait_s == 0.0


@given(seed=seeds, num_ops=st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_the_parts_add_up_where_clocks_are_noisy(seed: int, num_ops: int) -> None:
    """A measured step differs from the model: items overlap what they wait for, and stop later than planned."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32))
    timeline = simulator.timeline(plan)
    shifts = [rng.uniform(-0.4, 0.4, len(times)) for times in (timeline.op_start_s, timeline.transfer_start_s)]
    noisy = replace(
        timeline,
        op_start_s=timeline.op_start_s + shifts[0],
        op_end_s=timeline.op_end_s + np.maximum(shifts[0], 0.0),
        transfer_start_s=timeline.transfer_start_s + shifts[1],
        transfer_end_s=timeline.transfer_end_s + np.maximum(shifts[1], 0.0),
        source="measured",
    )
    runs = ~problem.graph.is_source
    path = path_of(problem, plan, noisy)
    step_s = max(noisy.op_end_s[runs].max(initial=0.0), noisy.transfer_end_s.max(initial=0.0))
    check_is_exact(path, step_s)


def test_a_measured_item_is_bound_by_what_ended_before_its_middle() -> None:
    """The model has op 1 and op 2 share a link; in the measured step their copies overlapped."""
    graph = op_graph([[], [], [0], [1]], [100, 100, 1, 1])
    problem = problem_of(graph, plain_host(2), [1.0, 1.0, 1.0, 1.0])
    plan, timeline = planned(problem, [0, 0, 1, 1])
    order = [(int(t), int(d)) for t, d in zip(plan.transfer_tensor, plan.transfer_destination, strict=True)]
    assert order == [(0, 1), (1, 1)]
    # op 0 until 1, op 1 until 2; copies 1.0-3.9 and 2.0-4.0, though one link carries both; then ops 2 and 3
    noisy = replace(
        timeline,
        op_start_s=np.array([0.0, 1.0, 4.1, 5.1]),
        op_end_s=np.array([1.0, 2.0, 5.1, 6.0]),
        transfer_start_s=np.array([1.0, 2.0]),
        transfer_end_s=np.array([3.9, 4.0]),
        source="measured",
    )
    path = path_of(problem, plan, noisy)
    check_is_exact(path, 6.0)
    assert [(part.kind, part.name) for part in path.parts][:4] == [
        ("op", "op0"),
        ("transfer", "op0"),
        ("wait", "op2"),
        ("op", "op2"),
    ]


def cuts_of(graph: OpGraph, devices: list[int], count: int = 10) -> tuple[CutEdge, ...]:
    problem = problem_of(graph, plain_host(max(devices) + 1))
    plan, timeline = planned(problem, devices)
    return costliest_cuts(problem, plan, timeline, critical_items(problem, plan, timeline), count)


def test_the_longest_come_first_with_who_reads_them() -> None:
    graph = replace(op_graph([[], [], [1], [1], [0]], [100, 500, 1, 1, 1]), modules=tuple("abcde"))
    cuts = cuts_of(graph, [0, 1, 2, 2, 3])
    assert [(cut.op, cut.module, cut.reader, cut.reader_module, cut.num_readers) for cut in cuts] == [
        ("op1", "b", "op2", "c", 2),
        ("op0", "a", "op4", "e", 1),
    ]
    assert [(cut.source, cut.destination, cut.num_bytes, cut.seconds) for cut in cuts] == [
        ("d1", "d2", 500, 5.0),
        ("d0", "d3", 100, 1.0),
    ]
    assert [cut.is_critical for cut in cuts] == [True, False]
    assert cuts_of(graph, [0, 1, 2, 2, 3], count=1) == cuts[:1]
    assert cuts_of(graph, [0, 0, 0, 0, 0]) == ()


def test_what_is_sent() -> None:
    targets = ["parameter", "input", "aten.op", "aten.op", "update.adam", "buffer"]
    phases = [FORWARD, FORWARD, FORWARD, BACKWARD, UPDATE, FORWARD]
    graph = op_graph([[], [], [0], [2], [3], []], targets=targets, phases=phases)
    found = [what_is_sent(graph, op) for op in range(6)]
    assert found == ["parameter", "input", "activation", "gradient", "parameter", "parameter"]


def test_a_chain_over_two_devices_by_hand() -> None:
    graph = op_graph([[], [0]], [100, 1])
    problem = problem_of(graph, plain_host(2), [2.0, 3.0])
    shares = device_shares(problem, *planned(problem, [0, 1]), [7, 8])
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
    problem = problem_of(op_graph([[], [0]], 100), host, 2.0)
    shares = device_shares(problem, *planned(problem, [0, 2]), [0, 0, 0])
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
    step_s = timeline.step_s
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
    problem = problem_of(op_graph([[]]), plain_host(2))
    _, timeline = planned(problem, [0])
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


GIB = 1 << 30


def device(name: str, busy_s: float, *, peak: float = 0.5, members: tuple[str, ...] = ()) -> DeviceShare:
    peak_bytes = int(peak * 16 * GIB)
    return DeviceShare(
        name, "gpu", 10, busy_s, 0.0, 1.0 - busy_s, 0, 0, peak_bytes, 16 * GIB, memory_pool="", members=members
    )


def path(op_s: float, transfer_s: float = 0.0, wait_s: float = 0.0) -> CriticalPath:
    routes = (
        RouteShare("gpu:1", "gpu:0", transfer_s * 0.6, 3, 30),
        RouteShare("gpu:0", "gpu:1", transfer_s * 0.4, 1, 9),
    )
    modules = (ModuleShare("decoder.attention", "backward", 0.6 * op_s, 40), ModuleShare("", "forward", 0.4 * op_s, 9))
    sent = (
        PathPart("transfer", 0.0, 0.1, "gpu:1", "op", "m", "backward", "gpu:0", num_bytes=9, what="gradient"),
        PathPart("transfer", 0.1, 0.3, "gpu:0", "op", "m", "forward", "gpu:1", num_bytes=9, what="activation"),
        PathPart("transfer", 0.3, 0.9, "gpu:2", "op", "m", "forward", "gpu:1", num_bytes=9, what="parameter"),
    )
    return CriticalPath(sent if transfer_s else (), op_s, transfer_s, wait_s, modules, routes if transfer_s else ())


PLAIN = Explanation(
    schema=SCHEMA,
    graph_fingerprint="0" * 16,
    host="host",
    method="learned",
    kind="simulated",
    step_time_s=1.0,
    explained_s=1.0,
    bound_s=0.5,
    bound="total work",
    num_ops=20,
    num_micro_batches=1,
    num_transfers=4,
    transfer_bytes=39,
    devices=(device("gpu:0", 0.8), device("gpu:1", 0.7)),
    path=path(1.0),
    cuts=(),
    memory=(),
    alternatives=(Alternative(ONE_DEVICE, 1.5, "simulated"), Alternative(EAGER, None, "simulated", "simulated host")),
    advice=Advice("keep", ""),
)


def beside(*others: Alternative) -> Explanation:
    return replace(PLAIN, alternatives=others)


CASES = {
    "data-parallel": (
        beside(Alternative(DATA_PARALLEL, 0.6, "estimated")),
        "Cut the batch (`--micro-batches auto`): data parallelism is estimated at 600 ms a step, this placement takes "
        "1,000 ms.",
    ),
    "use-eager": (
        beside(Alternative(EAGER, 0.8, "measured"), Alternative(ONE_DEVICE, 0.9, "measured")),
        "Use eager: it is faster (800 ms a step, 1,000 ms as placed).",
    ),
    "one-device": (
        beside(Alternative(ONE_DEVICE, 1.02, "measured")),
        "One device is as good (1,020 ms a step, 1,000 ms as placed): export nothing.",
    ),
    "memory": (
        replace(PLAIN, devices=(device("gpu:0", 0.8, peak=0.97), device("gpu:1", 0.7))),
        "gpu:0 is full to 97 %: leave room before you train for long, with a smaller batch or micro-batches "
        "(`--micro-batches auto`).",
    ),
    "near-bound": (replace(PLAIN, bound_s=0.962), "Keep this placement: it is within 4 % of the bound (total work)."),
    "transfers": (
        replace(PLAIN, path=path(0.69, 0.31)),
        "Copies of activations between gpu:0 and gpu:1 take 31 % of the step: a coarser grouping "
        "(fewer `--groups`) or micro-batches (`--micro-batches auto`) may help.",
    ),
    "waits": (
        replace(PLAIN, path=path(0.6, 0.05, 0.35)),
        "Launches and other waits of the host take 35 % of the step: its ops are short, and a larger batch may help "
        "more than another placement.",
    ),
    "chain": (
        replace(PLAIN, devices=(device("gpu:0", 0.8), device("gpu:1", 0.2)), path=path(0.9, 0.1), num_micro_batches=4),
        "One chain of ops is 90 % of the step, most of it in the backward of decoder.attention (54 %), and devices are "
        "idle for 50 % of it: another number of micro-batches than 4, or a split of its ops (`--split auto`), may give "
        "them work.",
    ),
    "keep": (
        PLAIN,
        "Keep this placement: it takes 67 % of one device's step; none can take less than 50 % of its own step time.",
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_speaks_where_it_is_right(rule: str) -> None:
    explanation, sentence = CASES[rule]
    assert advise_on(explanation) == Advice(rule, sentence)


def test_every_rule_has_a_case_and_they_are_asked_in_order() -> None:
    assert [*RULES, "keep"] == list(CASES)
    everything = replace(
        PLAIN,
        bound_s=1.0,
        devices=(device("gpu:0", 0.8, peak=0.97), device("gpu:1", 0.1)),
        path=path(0.5, 0.25, 0.25),
        alternatives=(
            Alternative(EAGER, 1.0, "measured"),
            Alternative(ONE_DEVICE, 1.0, "measured"),
            Alternative(DATA_PARALLEL, 0.5, "estimated"),
        ),
    )
    assert advise_on(everything).rule == "data-parallel"
    cut = replace(everything, num_micro_batches=2)
    assert advise_on(cut).rule == "use-eager"
    assert "as fast" in advise_on(cut).sentence
    without_eager = replace(cut, alternatives=cut.alternatives[1:])
    assert advise_on(without_eager).rule == "one-device"
    alone = replace(cut, alternatives=cut.alternatives[2:])
    assert advise_on(alone).rule == "memory"
    roomy = replace(alone, devices=PLAIN.devices)
    assert advise_on(roomy).rule == "near-bound"
    assert advise_on(replace(roomy, bound_s=0.5)).rule == "transfers"


@pytest.mark.parametrize(("bound_s", "is_near"), [(0.94, False), (0.96, True), (1.04, True), (1.1, False)])
def test_a_step_far_below_the_bound_is_not_near_it(bound_s: float, is_near: bool) -> None:
    """The bound's costs are wrong there."""
    assert (advise_on(replace(PLAIN, bound_s=bound_s)).rule == "near-bound") == is_near


def test_an_even_split_is_compared_with_eager_too() -> None:
    split, single = Alternative(DATA_PARALLEL, 0.6, "estimated"), Alternative(ONE_DEVICE, 1.0, "measured")
    assert advise_on(beside(single, split)).rule == "data-parallel"  # as `rlplace advise` has it
    assert advise_on(beside(single, split, Alternative(EAGER, 0.62, "measured"))).rule == "use-eager"


def test_a_gang_that_runs_nothing_makes_no_device_idle() -> None:
    gang = device("both", 0.0, members=("gpu:0", "gpu:1"))
    explanation = replace(PLAIN, devices=(*PLAIN.devices, gang), path=path(0.9, 0.1))
    assert advise_on(explanation).rule == "keep"


def test_a_step_that_takes_no_time_is_kept() -> None:
    nothing = replace(PLAIN, step_time_s=0.0, explained_s=0.0, bound_s=0.0, alternatives=(), path=path(0.0))
    assert advise_on(nothing) == Advice("keep", "Keep this placement: the step takes no time.")


def test_without_one_device_the_bound_alone_is_told() -> None:
    forced = beside(Alternative(ONE_DEVICE, None, "simulated", "does not fit"))
    assert advise_on(forced).sentence == "Keep this placement: none can take less than 50 % of its own step time."


def measured(step_time_s: float, spread_s: float, *others: Alternative) -> Explanation:
    """A step of 4 s, as if it had been measured."""
    problem = problem_of(op_graph([[], [0], [1], [2]]), plain_host(2))
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.zeros(4, dtype=np.int32))
    timeline = replace(simulator.timeline(plan), source="measured")
    return explain(problem, plan, timeline, step_time_s=step_time_s, spread_s=spread_s, alternatives=others)


@pytest.mark.parametrize(
    ("step_time_s", "spread_s", "words"),
    [
        (4.0, 0.3, ""),
        (4.0, 1.0, "its steps scatter by ± 25 % around their median."),
        (3.3, 0.0, ""),
        (2.5, 0.0, "the step that is explained took 160 % of the median."),
        (8.0, 0.1, "the step that is explained took 50 % of the median."),
        (8.0, 4.0, "scatter by ± 50 % around their median; the step that is explained took 50 % of the median."),
    ],
)
def test_steps_that_scatter_and_an_unusual_one_are_signs(step_time_s: float, spread_s: float, words: str) -> None:
    said = disturbance_of(measured(step_time_s, spread_s))
    assert words in said
    assert bool(said) == bool(words)
    assert measured(step_time_s, spread_s).disturbed == said


def test_what_lies_within_the_scatter_tells_nothing() -> None:
    others = Alternative("one device", 4.5, "measured"), Alternative("eager", 6.0, "measured")
    said = disturbance_of(measured(4.0, 1.0, *others, Alternative("data parallel", 4.1, "estimated")))
    assert "the difference to one device is within that, and tells nothing" in said
    assert disturbance_of(measured(4.0, 0.3, *others)) == ""


def test_a_simulated_step_is_never_disturbed() -> None:
    assert disturbance_of(replace(measured(4.0, 3.0), kind="simulated")) == ""
