"""What timelines teach: known factors from a few steps, whatever is disturbed, missing, or on a clock of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans
from micrographs import op_graph
from random_problems import plain_host, problem_of

from rlplace.measure.host_model import (
    HostModel,
    Posterior,
    Prior,
    Scales,
    TraceConfig,
    TracedMedians,
    TracedPrior,
    TracedSteps,
    describe,
)
from rlplace.measure.host_model.traced_steps import as_modelled
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.compiled_problem import main_producers
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import TrueTimer, Truth, true_problem

WIDE = Prior(op_type=1.0, device=0.5, bandwidth=1.0, latency=1.0, overhead_s=0.1, overhead=1.0)
TRACED = TracedPrior(signature=0.5, moved=0.1, moved_deviation=1.0)
EXACT = TraceConfig(
    bias=1e-5, common=1e-5, noise=1e-5, link_noise=1e-5, added_s=1e-9, added=0.0, iterations=60, tolerance=1e-9
)


def scales_of(host: Host, num_ops: int = 60) -> Scales:
    return Scales(learnable_problem(host, num_ops), WIDE, None, TRACED)


def some_factors(scales: Scales, seed: int) -> np.ndarray:
    return 0.5 * np.random.default_rng(seed).standard_normal(len(scales)) * scales.deviation


def timelines_of(problem: Problem, plans: list[Plan]) -> list[Timeline]:
    simulator = Simulator(problem, threads=1)
    return [simulator.timeline(plan) for plan in plans]


def fitted(scales: Scales, timelines: list[Timeline], config: TraceConfig | None = None) -> Scales:
    steps = TracedSteps(scales, config)
    for timeline in timelines:
        steps.add(timeline)
    return steps.known()


def common(scales: Scales) -> float:
    """The factor on the share by which moved inputs make any op longer."""
    return math.exp(float(scales.mean[scales.moved_at]))


def shifted(timeline: Timeline, offset_s: np.ndarray) -> Timeline:
    """As clocks that are off by so much would have it."""
    ops, sent = offset_s[timeline.op_device], offset_s[timeline.transfer_destination]
    return replace(
        timeline,
        op_start_s=timeline.op_start_s + ops,
        op_end_s=timeline.op_end_s + ops,
        transfer_start_s=timeline.transfer_start_s + sent,
        transfer_end_s=timeline.transfer_end_s + sent,
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_four_traced_plans_without_noise_tell_the_host(seed: int) -> None:
    """Op times and step times of other plans to a thousandth: the factors themselves, but for shifts between them.

    The share by which moved inputs make an op longer is that of all ops where no op of its signature had any.
    """
    scales, generator = scales_of(paired_host(3)), np.random.default_rng(seed)
    true, graph = scales.apply(some_factors(scales, seed)), scales.problem.graph
    plans = varied_plans(scales.problem, generator, 4)
    known = fitted(scales, timelines_of(true, plans), EXACT)
    learned, signature = known.apply(known.mean), np.array(graph.signatures)
    np.testing.assert_allclose(learned.costs.op_time_s, true.costs.op_time_s, rtol=1e-3)
    largest = main_producers(graph)
    moved = np.any([(plan.devices[largest] != plan.devices) & ~graph.is_source for plan in plans], axis=0)
    is_told, factors = np.isin(signature, signature[moved]), (learned.costs.moved_factor, true.costs.moved_factor)
    np.testing.assert_allclose(factors[0][is_told], factors[1][is_told], rtol=1e-3)
    np.testing.assert_allclose(factors[0][~is_told & ~graph.is_source], 1.0 + 0.1 * common(known), rtol=1e-3)
    true = replace(true, costs=replace(true.costs, moved_factor=np.where(is_told, *reversed(factors))))
    others = varied_plans(scales.problem, generator, 10)
    np.testing.assert_allclose(step_times(learned, others), step_times(true, others), rtol=1e-3)


def test_links_that_routes_share_are_told_apart() -> None:
    scales, generator = scales_of(plain_host(4, 100.0)), np.random.default_rng(0)
    x = np.array([0.3 * generator.standard_normal() for _ in scales.items])
    for place, item in enumerate(scales.items):  # every way up slower than all ways down but that of device 3
        if item.kind == "bandwidth":
            x[place] = {"up": -0.5, "down": 0.2}[item.name.split()[0]] + 0.1 * x[place]
    true = scales.apply(x)
    known = fitted(scales, timelines_of(true, varied_plans(scales.problem, generator, 4)), EXACT)
    others = varied_plans(scales.problem, generator, 10)
    np.testing.assert_allclose(step_times(known.apply(known.mean), others), step_times(true, others), rtol=5e-3)


def hidden_links() -> tuple[Scales, Problem, TracedSteps]:
    """Factors, a truth in which links are up to three times as fast as given, and four traced steps of it."""
    scales, generator = scales_of(plain_host(4, 100.0)), np.random.default_rng(3)
    x = np.array([1.1 * generator.uniform(-1.0, 1.0) * (item.kind == "bandwidth") for item in scales.items])
    true, steps = scales.apply(x), TracedSteps(scales, EXACT)
    for step in timelines_of(true, varied_plans(scales.problem, generator, 4)):
        steps.add(step)
    return scales, true, steps


def route_speeds(problem: Problem) -> np.ndarray:
    speeds = {link.name: link.bandwidth_bytes_per_s for link in problem.host.links}
    return np.array([min(speeds[name] for name in route.links) for route in problem.host.routes])


def test_routes_are_as_fast_as_seen_whichever_of_their_links_is_the_slowest() -> None:
    _, true, steps = hidden_links()
    known = steps.known()
    np.testing.assert_allclose(route_speeds(known.apply(known.mean)), route_speeds(true), rtol=5e-3)


@pytest.mark.slow
def test_draws_keep_the_speeds_of_routes_and_leave_the_other_links_free() -> None:
    scales, true, steps = hidden_links()
    known, generator = steps.known(), np.random.default_rng(0)
    drawn = [known.at(steps.drawn(generator.standard_normal(len(scales)), generator)) for _ in range(30)]
    for x in drawn:
        np.testing.assert_allclose(route_speeds(scales.apply(x)), route_speeds(true), rtol=1e-2)
    spread = np.std(drawn, axis=0)[scales.bandwidth_at]
    assert spread.min() < 1e-3
    assert spread.max() > 0.1


def test_seconds_that_tracing_is_known_to_add_are_removed() -> None:
    """Where timelines do not tell it, it is taken for the ops' own: a fifth of an op of a second."""
    scales, generator, added_s = scales_of(paired_host(3)), np.random.default_rng(2), 0.2
    true = scales.apply(some_factors(scales, 2))
    steps = timelines_of(true, varied_plans(scales.problem, generator, 4))
    untold = [replace(step, op_end_s=step.op_end_s + added_s * ~scales.problem.graph.is_source) for step in steps]
    told = [replace(step, traced_op_s=added_s) for step in untold]
    others = varied_plans(scales.problem, generator, 10)
    off = [
        np.abs(np.log(step_times(known.apply(known.mean), others) / step_times(true, others))).mean()
        for known in (fitted(scales, each) for each in (untold, told))
    ]
    assert off[1] < 0.5 * off[0]


@pytest.mark.slow
def test_clocks_that_are_off_change_nothing() -> None:
    scales = scales_of(paired_host(3))
    steps = timelines_of(
        scales.apply(some_factors(scales, 1)), varied_plans(scales.problem, np.random.default_rng(1), 4)
    )
    offset_s = np.array([-40.0, 7.0, 0.5])
    once, again = fitted(scales, steps), fitted(scales, [shifted(step, offset_s) for step in steps])
    np.testing.assert_allclose(again.mean, once.mean, atol=1e-9)


@pytest.mark.slow
def test_a_few_ops_that_were_held_up_hardly_count() -> None:
    scales, generator = scales_of(paired_host(3), 200), np.random.default_rng(2)
    true = scales.apply(some_factors(scales, 2))
    steps = timelines_of(true, varied_plans(scales.problem, generator, 4))
    disturbed = []
    for step in steps:
        end_s = np.array(step.op_end_s)
        held = generator.random(len(end_s)) < 0.02
        disturbed.append(
            replace(step, op_end_s=np.where(held, step.op_start_s + 8.0 * (end_s - step.op_start_s), end_s))
        )
    ratios = [
        known.apply(known.mean).costs.op_time_s / true.costs.op_time_s
        for known in (fitted(scales, steps), fitted(scales, disturbed))
    ]
    assert np.abs(np.log(ratios[1])).max() < np.abs(np.log(ratios[0])).max() + 0.05


def test_records_that_are_missing_say_nothing() -> None:
    """NaN, or an end before its start, as where a record was overwritten by its double."""
    scales = scales_of(paired_host(3), 200)
    true = scales.apply(some_factors(scales, 3))
    (step, *rest) = timelines_of(true, varied_plans(scales.problem, np.random.default_rng(3), 4))
    end_s = np.array(step.op_end_s)
    end_s[::7], end_s[3::7] = np.nan, -1.0
    sent_s = np.array(step.transfer_end_s)
    sent_s[::5] = np.nan
    known = fitted(scales, [replace(step, op_end_s=end_s, transfer_end_s=sent_s), *rest], EXACT)
    np.testing.assert_allclose(known.apply(known.mean).costs.op_time_s, true.costs.op_time_s, rtol=1e-3)


def test_transfers_that_are_recorded_twice_say_the_same() -> None:
    scales = scales_of(paired_host(3))
    true, generator = scales.apply(some_factors(scales, 3)), np.random.default_rng(3)
    doubled = []
    for step in timelines_of(true, varied_plans(scales.problem, generator, 4)):
        names = [f"transfer_{name}" for name in ("tensor", "source", "destination", "start_s", "end_s")]
        doubled.append(replace(step, **{name: np.tile(getattr(step, name), 2) for name in names}))
    known, others = fitted(scales, doubled, EXACT), varied_plans(scales.problem, generator, 10)
    np.testing.assert_allclose(step_times(known.apply(known.mean), others), step_times(true, others), rtol=1e-3)


def longer(timeline: Timeline, factor: np.ndarray) -> Timeline:
    """Every op so many times as long (N, D)."""
    factor = factor[np.arange(len(factor)), timeline.op_device]
    return replace(timeline, op_end_s=timeline.op_start_s + factor * (timeline.op_end_s - timeline.op_start_s))


@pytest.mark.slow
def test_signatures_are_taken_to_differ_as_far_as_they_do() -> None:
    """Where ops of a type are off alike, less is left unknown of each signature than where they are not."""
    scales = scales_of(paired_host(3))
    is_signature = np.array([item.kind == "signature" for item in scales.items])
    steps = timelines_of(scales.problem, varied_plans(scales.problem, np.random.default_rng(8), 4))
    left = []
    for spread in (0.0, 0.5):
        of_signature = np.random.default_rng(9).lognormal(0.0, spread, scales.problem.graph.num_ops)
        factor = np.repeat(of_signature[:, None], 3, axis=1)  # each op has a signature of its own
        left.append(fitted(scales, [longer(step, factor) for step in steps]).deviation[is_signature].mean())
    assert left[0] < 0.7 * left[1]


@pytest.mark.slow
def test_ops_that_fit_badly_leave_more_unknown() -> None:
    """Each op on each device off by its own factor, as no factor can tell: less is known of how devices differ."""
    scales = scales_of(paired_host(3), 120)
    steps = timelines_of(scales.problem, varied_plans(scales.problem, np.random.default_rng(10), 4))
    left = []
    for spread in (0.03, 0.3):
        factor = np.random.default_rng(11).lognormal(0.0, spread, (120, 3))
        root = fitted(scales, [longer(step, factor) for step in steps]).spread(np.eye(len(scales)))
        left.append(np.linalg.norm(root[scales.device_at[0]] - root[scales.device_at[1]]))
    assert left[1] > 2.0 * left[0]


@pytest.mark.slow
def test_a_device_that_no_plan_used_is_as_sure_as_its_kind() -> None:
    """Its own factor stays as the prior has it, in mean and in width; types of its kind are known from the others."""
    scales = scales_of(plain_host(3, 100.0))
    x = some_factors(scales, 4)
    true, simulator = scales.apply(x), Simulator(scales.problem, threads=1)
    generator = np.random.default_rng(4)
    plans = [simulator.plan(generator.integers(0, 2, scales.problem.graph.num_ops).astype(np.int32)) for _ in range(4)]
    known = fitted(scales, timelines_of(true, plans))
    place = int(scales.device_at[2])
    assert known.mean[place] == pytest.approx(0.0, abs=1e-6)
    assert known.deviation[place] == pytest.approx(scales.deviation[place], rel=1e-6)
    others = [int(scales.device_at[d]) for d in (0, 1)]
    assert (known.deviation[others] < scales.deviation[others]).all()


@pytest.mark.slow
def test_step_times_correct_what_tracing_adds() -> None:
    """Durations alone cannot say how much of them is tracing; step times, which are measured without it, can."""
    scales = Scales(learnable_problem(paired_host(3), 60), replace(WIDE, overhead_s=0.01, overhead=0.5), None, TRACED)
    true = scales.apply(some_factors(scales, 5))
    plans = varied_plans(scales.problem, np.random.default_rng(5), 12)
    model = HostModel(scales)
    for plan, step_s in zip(plans, step_times(true, plans), strict=True):
        traced = Simulator(true, threads=1).timeline(plan)
        slower = replace(traced, op_end_s=traced.op_start_s + 1.05 * (traced.op_end_s - traced.op_start_s))
        model.learn([plan], [Measurement("ok", step_s, (step_s,), timeline=slower)])
    others = varied_plans(scales.problem, np.random.default_rng(6), 10)
    log_ratio = np.log(step_times(model.fit().problem, others) / step_times(true, others))
    assert np.abs(log_ratio).mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moderate", "hard"])
def test_a_few_traces_of_a_truth_beat_as_many_step_times(kind: str) -> None:
    problem = learnable_problem(paired_host(4), 120)
    costs = replace(problem.costs, op_time_s=problem.costs.op_time_s * 1e-3)
    problem = replace(problem, costs=costs)
    plans, others = (varied_plans(problem, np.random.default_rng(k), 4) for k in range(2))
    errors = {True: 0.0, False: 0.0}
    for seed in range(4):
        true = true_problem(problem, Truth(kind, seed))
        for is_traced in errors:
            model = HostModel(Scales(problem, Prior(), None, TracedPrior() if is_traced else None))
            model.learn(plans, TrueTimer(true, seed, is_traced=is_traced).measure_plans(plans))
            said_s = step_times(model.fit().problem, others)
            errors[is_traced] += float(np.abs(np.log(said_s / step_times(true, others))).mean())
    assert errors[True] < 0.5 * errors[False]


def test_a_host_of_one_device_that_sends_nothing_is_learned_too() -> None:
    scales = scales_of(plain_host(1))
    true = scales.apply(some_factors(scales, 7))
    plan = Simulator(scales.problem).plan(np.zeros(scales.problem.graph.num_ops, dtype=np.int32))
    known = fitted(scales, timelines_of(true, [plan] * 4), EXACT)
    np.testing.assert_allclose(known.apply(known.mean).costs.op_time_s, true.costs.op_time_s, rtol=1e-3)


def test_without_traces_the_prior_stays() -> None:
    scales = scales_of(paired_host(3))
    assert TracedSteps(scales).known() is scales
    assert np.array_equal(Posterior.prior(scales).mean, np.zeros(len(scales)))


def test_medians_are_those_by_hand() -> None:
    """On d0 mm twice (2 and 4 s), on d1 mm (9 s) and add; both devices are of one kind. Copies of 10, 30 and 50 bytes
    take 0.3, 0.7 and 1.2 s: slopes 0.02, 0.025 and 0.0225; without 0.0225 a byte 0.075, 0.025 and 0.075 are left."""
    targets = ["parameter", "parameter", *["aten.mm"] * 3, "aten.add"]
    graph = op_graph([[], [], [0], [2], [0, 1, 3], [4]], [10, 50, 10, 30, 30, 10], targets=targets)
    graph = replace(graph, signatures=("parameter", "parameter", "mm of 10", "mm of 10", "mm of 30", "add"))
    host = paired_host(2)
    problem = problem_of(graph, host)
    plan = Simulator(problem).plan(np.array([0, 0, 0, 0, 1, 1], dtype=np.int32))
    step = Simulator(problem).timeline(plan)
    end_s = step.op_start_s + np.array([0.0, 0.0, 2.0, 4.0, 9.0, 0.25])
    took_s = np.array([{10: 0.3, 30: 0.7, 50: 1.2}[int(graph.tensor_bytes[t])] for t in step.transfer_tensor])
    medians = TracedMedians(problem)
    assert medians.problem() is problem
    medians.add(replace(step, op_end_s=end_s, transfer_end_s=step.transfer_start_s + took_s))
    learned = medians.problem()
    for i, seconds in ((2, 8**0.5), (3, 8**0.5), (4, 9.0), (5, 0.25)):  # of two the middle, of their logarithms
        assert learned.costs.op_time_s[i] == pytest.approx([seconds] * 2)
    used, unused = learned.host.links
    assert (used.latency_s, 1.0 / used.bandwidth_bytes_per_s) == pytest.approx((0.075, 0.0225))
    assert unused == host.links[1]


def cores_timeline(problem: Problem, **times: list[float]) -> Timeline:
    """Of ops 0 -> 1 -> 3 and 0 -> 2 -> 3, of which 2 is on the second of two cores."""
    none = np.zeros(0)
    return Timeline(
        np.array([0, 0, 1, 0], dtype=np.int32),
        np.array(times["start"]),
        np.array(times["end"]),
        np.array([0, 2], dtype=np.int32),
        np.array([0, 1], dtype=np.int32),
        np.array([1, 0], dtype=np.int32),
        np.array(times["take"]),
        np.array(times["taken"]),
        none,
        none.astype(np.int32),
        none.astype(np.int64),
        "measured",
    )


def cores_problem() -> Problem:
    graph = op_graph([[], [0], [0], [1, 2]], 100)
    host = plain_host(2, 100.0)
    cores = tuple(replace(device, backend="cpu", cores=(k,)) for k, device in enumerate(host.devices))
    return problem_of(graph, replace(host, devices=cores), source="profiled")


TIMES = {"start": [1.0, 11.0, 15.0, 33.0], "end": [10.0, 30.0, 20.0, 40.0], "take": [13.0, 30.5], "taken": [14.0, 31.0]}
"""Op 0 makes its tensor at 10; core 1 waits for it and has it at 14; op 2 runs to 20; core 0 takes that at 31, late."""


def test_on_cores_an_op_begins_where_the_item_before_ended_and_a_transfer_where_its_tensor_was_made() -> None:
    problem = cores_problem()
    timeline = cores_timeline(problem, **TIMES)
    found = as_modelled(timeline, problem.graph, problem.host)
    assert found.op_start_s.tolist() == [0.0, 10.0, 14.0, 31.0]
    assert found.op_end_s.tolist() == timeline.op_end_s.tolist()
    assert (found.transfer_end_s - found.transfer_start_s).tolist() == [4.0, 0.0], "nobody waited for the second"


def test_where_a_sample_of_ops_was_traced_durations_stay_as_they_are() -> None:
    """What came before an op may have no record: here op 1, before op 3."""
    problem = cores_problem()
    times = TIMES | {"start": [1.0, 0.0, 15.0, 33.0], "end": [10.0, 0.0, 20.0, 40.0]}
    timeline = cores_timeline(problem, **times)
    found = as_modelled(timeline, problem.graph, problem.host)
    assert found.op_start_s.tolist() == [1.0, 0.0, 14.0, 33.0], "all of core 1 was traced"
    assert found.transfer_start_s.tolist() == [10.0, 30.5]


def test_other_devices_keep_their_clocks() -> None:
    problem = cores_problem()
    timeline = cores_timeline(problem, **TIMES)
    found = as_modelled(timeline, problem.graph, plain_host(2, 100.0))
    assert found.op_start_s.tolist() == timeline.op_start_s.tolist()
    assert found.transfer_start_s.tolist() == timeline.transfer_start_s.tolist()


@pytest.mark.parametrize(("missing", "error"), [(0.0, 0.1), (0.7, 0.2)])
def test_ops_beside_a_busy_device_tell_the_co_run_slowdown(missing: float, error: float) -> None:
    """Of two cores that share a memory, also where only a sample of ops was traced."""
    scales = scales_of(replace(paired_host(2), corun_slowdown=((0.0, 0.1), (0.1, 0.0))), 200)
    wide = Scales(scales.problem, replace(WIDE, corun_deviation=1.0), None, TRACED)
    x, generator = np.zeros(len(wide)), np.random.default_rng(6)
    x[wide.corun_at] = math.log(2.5)
    true = wide.apply(x)
    steps = [
        replace(step, op_end_s=np.where(generator.random(len(step.op_end_s)) < missing, step.op_start_s, step.op_end_s))
        for step in timelines_of(true, varied_plans(wide.problem, generator, 8))
    ]
    known = fitted(wide, steps, EXACT)
    learned, runs = known.apply(known.mean), ~wide.problem.graph.is_source
    assert learned.host.corun_slowdown[0][1] == pytest.approx(0.25, rel=error)
    assert abs(np.log(learned.costs.op_time_s[runs] / true.costs.op_time_s[runs]).mean()) < 0.03


def test_a_line_says_how_much_longer_moved_inputs_make_ops_of_a_signature() -> None:
    """10 % of all ops by the prior, twice that of the first signature, which both deviations make uncertain."""
    scales = scales_of(paired_host(3))
    place = next(k for k, item in enumerate(scales.items) if item.kind == "moved signature")
    mean, deviation = np.zeros(len(scales)), np.full(len(scales), 1e-3)
    mean[place], deviation[[place, scales.moved_at]] = math.log(2.0), (0.03, 0.04)
    (line,) = describe(Posterior(scales, mean, np.diag(deviation)))
    low, high = (100 * 0.2 * math.exp(side * 1.96 * 0.05) for side in (-1, 1))
    assert line == (
        f"{scales.items[place].name} whose largest input comes from another device takes 20 % longer "
        f"({low:.0f} to {high:.0f} %)"
    )
