"""`Evaluator`: simulated or run, every measurement says what it is of; and which ratios are believed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from fake_measurer import chain_problem
from torch import nn

from rlplace.graphs import capture
from rlplace.measure import Host, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import BELOW, OFF, REMEMBERED, Evaluator, Plausibility
from rlplace.measure.measurement import Measurement, MeasurementKey, placement_fingerprint
from rlplace.measure.problem import Plan, Timeline, single_device_plan

ONCE = RaceProtocol(warmup=0, min_rounds=1, max_rounds=1)


def test_on_a_simulated_host_plans_are_retimed_under_a_key_of_their_own() -> None:
    problem = chain_problem(4)
    simulator = Simulator(problem)
    evaluator = Evaluator(problem, simulator)
    plans = [simulator.plan(np.array(devices, dtype=np.int32)) for devices in ([0, 0, 0, 0], [0, 1, 1, 0])]
    first, second = evaluator.measure_plans(plans, ONCE)
    assert not evaluator.is_measured
    assert first.step_time_s == pytest.approx(4.0)
    assert (first.key.graph, first.key.host) == (problem.graph.fingerprint, problem.host.fingerprint)
    assert first.key.protocol == "simulated"
    assert first.key.plan != second.key.plan
    assert evaluator.measure_plans(plans[:1], ONCE)[0].key == first.key
    assert evaluator.timeline(plans[0]).source == "simulated"
    evaluator.close()


def test_a_plans_fingerprint_is_of_its_order_too() -> None:
    problem = chain_problem(2)
    plan = Simulator(problem).plan(np.array([0, 1], dtype=np.int32))
    same = dataclasses.replace(plan)
    turned = dataclasses.replace(plan, sequence=plan.sequence[::-1].copy())
    assert plan.fingerprint == same.fingerprint
    assert plan.fingerprint != turned.fingerprint


@pytest.mark.slow
def test_on_this_machine_plans_run_beside_the_reference_and_other_timers_have_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlplace.measure.evaluator.BELOW", float("inf"))  # on a busy machine no ratio is impossible
    graph = capture(nn.Linear(8, 4), torch.randn(3, 8), lambda y: y.sum(), "sgd")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    simulator = Simulator(problem)
    placement = np.zeros(graph.num_ops, dtype=np.int32)
    evaluator = Evaluator(problem, simulator, placement)
    try:
        plan = simulator.plan(placement)
        measured, other = evaluator.measure_plans([plan], ONCE, others=[lambda: 0.25])
        assert evaluator.is_measured
        assert measured.ok
        assert measured.reference_s > 0
        assert measured.key.plan == plan.fingerprint
        assert "max_rounds=1" in measured.key.protocol
        assert (other.step_time_s, other.key) == (0.25, None)
        assert len(evaluator.trace(plan, num_steps=2, warmup=0)) == 2
    finally:
        evaluator.close()


@pytest.mark.parametrize(
    ("measurement", "ratio"),
    [
        (Measurement("ok", 3.0, reference_s=2.0), 1.5),
        (Measurement("ok", 3.0), 3.0),
        (Measurement("oom", float("inf"), reference_s=2.0), float("inf")),
        (Measurement("error", float("nan")), float("inf")),
    ],
)
def test_ratios_are_to_the_reference(measurement: Measurement, ratio: float) -> None:
    assert measurement.ratio == ratio


class FakeRunner:
    """On a machine whose reference takes `reference_s`, a plan twice that for each op on the second device.

    Attributes:
        races: fingerprints of the plans of every race.
    """

    reference_s = 1.0

    def __init__(self, problem: Problem, planner: Simulator, *, reference: Any, seed: int, isolated: Any) -> None:
        self.has_reference = reference is not None
        self.races: list[list[str]] = []

    def measure_plans(self, plans: Sequence[Plan], **words: Any) -> list[Measurement]:
        self.races.append([plan.fingerprint for plan in plans])
        reference_s = self.reference_s if self.has_reference else 0.0
        times_s = [self.reference_s * (1 + 2.0 * int(plan.devices.sum())) for plan in plans]
        others = [Measurement("ok", timer(), reference_s=reference_s) for timer in words["others"]]
        timeline = Simulator(chain_problem(3)).timeline(single_device_plan(chain_problem(3).graph, 0))
        ran = [Measurement("ok", s, (s, s, s), reference_s=reference_s, timeline=timeline) for s in times_s]
        return ran + others

    def trace(self, plan: Plan, **words: Any) -> list[Timeline]:
        simulator = Simulator(chain_problem(3))
        return [simulator.timeline(simulator.plan(plan.devices))]


class Memory:
    """A `MeasurementLog` in a dictionary.

    Attributes:
        kept: what it was told.
        wholes: whether each was whole.
        traced: plans whose steps were traced.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[MeasurementKey, str], Measurement] = {}
        self.wholes: list[bool] = []
        self.traced: list[str] = []

    def recall(self, key: MeasurementKey, reference: str, plan: Plan, problem: Problem) -> Measurement | None:
        return self.kept.get((key, reference))

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        assert outcome.key.plan == plan.fingerprint
        self.kept[outcome.key, reference] = outcome
        self.wholes.append(is_whole)

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        self.traced.append(plan.fingerprint)


NONE, REFERENCE = (np.array(devices, dtype=np.int32) for devices in ([1, 1, 1], [0, 0, 0]))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr("rlplace.measure.evaluator.make_runner", FakeRunner)
    return Memory()


def fake_evaluator(log: Memory, *, has_reference: bool = True) -> Evaluator:
    problem = dataclasses.replace(chain_problem(3), host=core_host())
    return Evaluator(problem, Simulator(problem), REFERENCE if has_reference else None, log=log)


def races_of(evaluator: Evaluator) -> list[list[str]]:
    assert isinstance(evaluator._runner, FakeRunner)
    return evaluator._runner.races


def test_what_was_run_before_answers_as_a_ratio_to_todays_reference(
    log: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fake_evaluator(log)
    plans = [first.simulator.plan(np.array(row, dtype=np.int32)) for row in ([0, 0, 1], [0, 1, 1])]
    (before,) = first.measure_plans(plans[:1], ONCE, is_recalled=True)
    assert before.step_time_s == 3.0
    assert races_of(first) == [[plans[0].fingerprint]]
    monkeypatch.setattr(FakeRunner, "reference_s", 2.0)  # the machine is half as fast today
    second = fake_evaluator(log)
    recalled, fresh = second.measure_plans(plans, ONCE, is_recalled=True)
    assert races_of(second) == [[plans[1].fingerprint]]
    assert (recalled.step_time_s, recalled.reference_s, recalled.ratio) == (6.0, 2.0, before.ratio)
    assert before.timeline is not None  # all of it is half as fast, too
    assert (recalled.timeline.step_s, before.timeline.step_s) == (6.0, 3.0)
    assert recalled.timeline.op_start_s.tolist() == [0.0, 2.0, 4.0]
    assert recalled.samples_s == (6.0, 6.0, 6.0)
    assert (fresh.step_time_s, fresh.ratio) == (10.0, 5.0)
    assert recalled.key == before.key
    assert (first.num_recalled, second.num_recalled) == (0, 1)


def test_where_all_is_known_the_reference_alone_is_run_once(log: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fake_evaluator(log)
    plan = first.simulator.plan(NONE)
    first.measure_plans([plan], ONCE)
    monkeypatch.setattr(FakeRunner, "reference_s", 3.0)
    second = fake_evaluator(log)
    for _ in range(2):
        (recalled,) = second.measure_plans([plan], ONCE, is_recalled=True)
        assert (recalled.ratio, recalled.step_time_s) == (7.0, 21.0)
    assert races_of(second) == [[second.simulator.plan(REFERENCE).fingerprint]]


def test_what_is_not_to_be_recalled_or_has_no_reference_is_run_and_kept(log: Memory) -> None:
    for has_reference, is_recalled in ((True, False), (False, True)):
        evaluator = fake_evaluator(log, has_reference=has_reference)
        plan = evaluator.simulator.plan(NONE)
        for _ in range(2):
            evaluator.measure_plans([plan], ONCE, is_recalled=is_recalled)
        assert len(races_of(evaluator)) == 2
    assert {reference for _, reference in log.kept} == {placement_fingerprint(REFERENCE), ""}
    (key,) = {key for key, _ in log.kept}
    assert "torch" in key.versions


def test_a_failure_is_recalled_as_it_was(log: Memory) -> None:
    evaluator = fake_evaluator(log)
    plan = evaluator.simulator.plan(NONE)
    (outcome,) = evaluator.measure_plans([plan], ONCE)
    assert outcome.key is not None
    failed = Measurement("timeout", float("inf"), why="for ever", key=outcome.key)
    log.kept[outcome.key, placement_fingerprint(REFERENCE)] = failed
    assert evaluator.measure_plans([plan], ONCE, is_recalled=True) == [failed]
    assert len(races_of(evaluator)) == 1


def test_what_was_cut_short_by_the_clock_is_kept_as_such(log: Memory) -> None:
    evaluator = fake_evaluator(log)
    plan = evaluator.simulator.plan(NONE)
    for deadline_s, least in ((float("inf"), 9), (0.0, 9), (0.0, 3)):
        protocol = RaceProtocol(warmup=0, min_rounds=least, max_rounds=9)
        evaluator.measure_plans([plan], protocol, deadline_s=deadline_s)
    assert log.wholes == [True, False, True]


def test_others_are_timed_beside_what_is_recalled_and_traces_are_kept(log: Memory) -> None:
    evaluator = fake_evaluator(log)
    plan = evaluator.simulator.plan(NONE)
    evaluator.measure_plans([plan], ONCE)
    recalled, other = evaluator.measure_plans([plan], ONCE, others=[lambda: 0.25], is_recalled=True)
    assert (recalled.ratio, other.step_time_s, other.key) == (7.0, 0.25, None)
    assert races_of(evaluator)[1:] == [[]]
    evaluator.trace(plan)
    assert log.traced == [plan.fingerprint]


class ScriptedRunner(FakeRunner):
    """Says of every race what `script` says: step time, reference and rounds of each plan."""

    script: list[list[tuple[float, float, int]]]

    def measure_plans(self, plans: Sequence[Plan], **words: Any) -> list[Measurement]:
        told = self.script[len(self.races)]
        self.races.append([plan.fingerprint for plan in plans])
        assert len(told) == len(plans)
        return [Measurement("ok", s, (s,) * rounds, reference_s=reference_s) for s, reference_s, rounds in told]


def scripted(log: Memory, script: list[list[tuple[float, float, int]]]) -> tuple[Evaluator, list[Plan]]:
    """An evaluator whose races go by the script, and two plans."""
    evaluator = fake_evaluator(log)
    evaluator._runner = ScriptedRunner(evaluator.problem, evaluator.simulator, reference=REFERENCE, seed=0, isolated=0)
    evaluator._runner.script = script
    return evaluator, [evaluator.simulator.plan(np.array(row, dtype=np.int32)) for row in ([0, 0, 1], [0, 1, 1])]


def ratios_kept(log: Memory) -> list[float]:
    return sorted(outcome.ratio for outcome in log.kept.values())


def test_an_impossible_ratio_is_measured_again_and_only_the_second_one_is_kept(log: Memory) -> None:
    """Two cores take at least half of one core's time; dropped after a round with a disturbed reference: 0.067."""
    evaluator, plans = scripted(log, [[(0.9, 1.0, 5), (1.6, 24.0, 1)], [(1.7, 1.0, 5)]])
    outcomes = evaluator.measure_plans(plans, ONCE, is_recalled=True)
    assert [outcome.ratio for outcome in outcomes] == [0.9, 1.7]
    assert races_of(evaluator) == [[plan.fingerprint for plan in plans], [plans[1].fingerprint]]
    assert (evaluator.num_repeated, ratios_kept(log)) == (1, [0.9, 1.7])
    assert all(outcome.key is not None and outcome.key.plan for outcome in outcomes)


def test_what_stays_in_doubt_is_told_with_care_and_never_kept(log: Memory) -> None:
    script = [[(0.9, 1.0, 5)], [(1.6, 9.0, 1)], [(1.5, 4.0, 5)]]
    evaluator, plans = scripted(log, script)
    evaluator.measure_plans(plans[:1], ONCE)
    (outcome,) = evaluator.measure_plans(plans[1:], ONCE)
    # 0.18 and 0.375 disagree: the slower one, beside the reference as it was before, which took 1 s
    assert outcome.ratio == 1.5
    assert ratios_kept(log) == [0.9]


def test_without_time_nothing_is_measured_again(log: Memory) -> None:
    evaluator, plans = scripted(log, [[(0.9, 1.0, 5), (1.6, 24.0, 1)]])
    outcomes = evaluator.measure_plans(plans, ONCE, deadline_s=0.0)
    assert [outcome.ratio for outcome in outcomes] == [0.9, 1.6]
    assert ratios_kept(log) == [0.9]


def test_where_nobody_is_dropped_all_stay_in_one_race_but_doubts_are_not_kept(log: Memory) -> None:
    whole = RaceProtocol(warmup=0, min_rounds=5, max_rounds=5, hopeless=float("inf"))
    evaluator, plans = scripted(log, [[(0.9, 1.0, 5), (0.05, 1.0, 5)]])
    outcomes = evaluator.measure_plans(plans, whole)
    assert [outcome.ratio for outcome in outcomes] == [0.9, 0.05]
    assert len(races_of(evaluator)) == 1
    assert ratios_kept(log) == [0.9]


def test_an_impossible_ratio_of_another_day_is_not_recalled(log: Memory) -> None:
    evaluator, plans = scripted(log, [[(0.9, 1.0, 5)], [(0.8, 1.0, 5)]])
    (outcome,) = evaluator.measure_plans(plans[:1], ONCE)
    assert outcome.key is not None
    stored = Measurement("ok", 0.067, (0.067,), reference_s=1.0, key=outcome.key)
    log.kept[outcome.key, placement_fingerprint(REFERENCE)] = stored
    (again,) = evaluator.measure_plans(plans[:1], ONCE, is_recalled=True)
    assert (again.ratio, evaluator.num_recalled) == (0.8, 0)


def timed(step_s: float, reference_s: float, rounds: int = 5) -> Measurement:
    return Measurement("ok", step_s, (step_s,) * rounds, reference_s=reference_s)


def test_the_least_ratio_is_that_of_work_shared_by_all_devices() -> None:
    """Six seconds of work: alone they take six, on three devices at least two."""
    problem = chain_problem(6, 3)
    known = Plausibility.of(problem, Simulator(problem), np.zeros(6, dtype=np.int32))
    assert known.least_ratio == pytest.approx(2.0 / 6.0 / BELOW)
    assert Plausibility.of(problem, Simulator(problem), None).least_ratio == 0.0


def test_what_cannot_be_true_is_not_believed_whatever_the_reference() -> None:
    known = Plausibility(0.2)
    assert not known.is_possible(timed(0.067, 1.0))
    assert not known.is_believed(timed(0.067, 1.0))
    assert known.is_believed(timed(0.2, 1.0))
    assert known.is_believed(timed(0.067, 0.0)), "beside no reference there is no ratio"
    assert known.is_believed(Measurement("oom", math.inf, reference_s=1.0))


def test_a_reference_far_from_the_usual_one_is_not_believed_either_way() -> None:
    known = Plausibility()
    assert known.is_believed(timed(0.5, 15.0)), "nothing is usual yet"
    for reference_s in (1.0, 1.2, 0.9):
        known.note([timed(0.5, reference_s)])
    assert known.usual_s == 1.0
    believed = [known.is_believed(timed(0.5, s)) for s in (15.0, 1.01 * OFF, OFF, 1.0 / OFF, 0.99 / OFF)]
    assert believed == [False, False, True, True, False]


def test_of_a_race_the_reference_of_the_most_rounds_is_usual() -> None:
    """Who was dropped after the first round has the reference of that round alone, which was disturbed."""
    known, dropped, leader = Plausibility(), timed(1.6, 15.0, 1), timed(1.0, 1.0, 5)
    known.note([dropped, leader, Measurement("error", math.inf)])
    assert known.usual_s == 1.0
    assert [known.is_believed(one) for one in (dropped, leader)] == [False, True]


def test_what_is_usual_follows_a_machine_that_stays_slower() -> None:
    known = Plausibility()
    for reference_s in [1.0] * REMEMBERED + [3.0] * (REMEMBERED // 2 + 1):
        known.note([timed(1.0, reference_s)])
    assert known.usual_s == 3.0
    assert math.isnan(Plausibility().usual_s)


def test_a_second_measurement_counts_that_is_believed_or_comes_again() -> None:
    again = timed(0.6, 1.0)
    assert Plausibility(0.2).settle(timed(0.067, 1.0), again) == (again, True)
    failed = Measurement("timeout", math.inf, why="for ever")
    assert Plausibility(0.2).settle(timed(0.067, 1.0), failed) == (failed, True)
    first, again = timed(0.10, 1.0), timed(0.24, 2.0)
    assert Plausibility(0.2).settle(first, again) == (again, True)


def test_of_two_that_disagree_the_slower_stays_unconfirmed_and_impossible_ones_are_an_error() -> None:
    known = Plausibility(0.2)
    known.note([timed(1.0, 1.0)])
    first, again = timed(1.5, 5.0), timed(1.5, 3.0)  # ratios 0.3 and 0.5; beside the usual reference 1.5
    outcome, is_confirmed = known.settle(first, again)
    assert (outcome.ratio, outcome.step_time_s, is_confirmed) == (1.5, 1.5, False)
    outcome, is_confirmed = Plausibility(0.2).settle(timed(0.067, 1.0), timed(0.1, 1.0))
    assert (outcome.status, outcome.step_time_s, outcome.ratio, is_confirmed) == ("error", math.inf, math.inf, False)
    assert "0.1 of the reference's step time" in outcome.why
    assert "less than 0.2" in outcome.why


def test_a_reference_that_was_too_fast_makes_nothing_faster() -> None:
    known = Plausibility()
    known.note([timed(1.0, 1.0)])
    assert known.careful(timed(1.0, 0.1)).ratio == pytest.approx(10.0)
