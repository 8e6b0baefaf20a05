"""The final table: rows, shared measurements, the best."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_hosts import core_host
from fake_measurer import RacingRunner
from search_problems import chain_problem

from rlplace.measure import evaluator as evaluator_module
from rlplace.measure.costs.costs import Costs
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.race import RaceProtocol
from rlplace.search.task import BestSoFar, Failure
from rlplace.session.session_records import MethodResult, Race
from rlplace.training.config import TrainConfig
from rlplace.training.outputs import (
    Table,
    fill_table,
    measure_table,
    num_rows,
    place_on_gang,
    place_quickly,
    place_without_gangs,
)
from rlplace.training.phases import judge_table


def plan(*devices: int) -> Plan:
    none = np.zeros(0)
    return Plan(np.array(devices), none, none, np.arange(len(devices)))


def searched(placed: Plan, num_scored: int, num_measured: int, **fields: Any) -> MethodResult:
    return MethodResult(placed, num_scored, num_measured, is_searched=True, **fields)


def test_the_row_of_a_traced_method_says_what_tracing_took() -> None:
    """A warm-up and two steps of 3 s are timed, then two steps of 3 s are traced; another plan took 4 s."""
    simulator = Simulator(chain_problem(3, 1))
    placed = simulator.plan(np.zeros(3, dtype=np.int32))
    timeline = replace(simulator.timeline(placed), op_end_s=np.array([1.0, 2.0, 3.0]))
    traced = Measurement("ok", 3.0, (3.0, 3.0), timeline=timeline)
    races = (
        Race((placed, placed), (traced, Measurement("ok", 2.0, (2.0,)))),
        Race((placed,), (Measurement("oom", np.inf),)),
    )
    entries = {"learned": MethodResult(placed, races=races), "portfolio": MethodResult(placed)}
    table = fill_table(entries, None, "no values", lambda plans, _: [Measurement("ok", 1.0, (1.0,)) for _ in plans])
    assert table.row("learned")["why"] == "traced steps took 6.00 s, 32% of measuring"  # 6 of 9 + 4 + 6
    assert "why" not in table.row("portfolio")


def test_equal_placements_share_one_measurement_and_the_best_is_a_placement() -> None:
    asked: list[int] = []

    def measure(plans: list[Plan], others: list[object]) -> list[Measurement]:
        asked.append(len(plans))
        times = [2.0, 1.0] + [0.5] * len(others)
        return [Measurement("ok", t, (t - 0.1, t, t, t + 0.1)) for t in times]

    entries = {
        "single": MethodResult(plan(0, 0), 1),
        "eft": MethodResult(plan(0, 1), 1),
        "learned": searched(plan(0, 1), 12, 6, history=(BestSoFar(9, 6, 0.5, 1.25),)),
        "random": MethodResult(why="no time"),
    }
    table = fill_table(entries, lambda: 0.5, "", measure)
    assert asked == [2]
    assert table.row("eft")["step_time_s"] == table.row("learned")["step_time_s"] == 1.0
    assert table.row("learned")["measured"] == 6
    assert table.row("learned")["placements"] == 12
    assert table.row("learned")["history"] == [[9, 6, 0.5, 1.25]]
    assert table.row("eft")["history"] == table.row("eager")["history"] == []
    assert table.row("random")["status"] == "skipped"
    assert table.row("random")["why"] == "no time"
    assert (table.leader, table.best) == (
        "eft",
        "single",
    )  # of equals the first leads; a race of its own may confirm it
    assert table.row("eager")["placement"] is False
    assert table.row("single")["spread_s"] == pytest.approx(0.025)
    assert json.loads(json.dumps(table.rows))[1]["step_time_s"] == table.row(table.leader)["step_time_s"] == 1.0


def judged(
    monkeypatch: pytest.MonkeyPatch,
    steps_s: dict[str, float],
    fresh_s: dict[str, float],
    eager_s: tuple[float, float] | None = (9.0, 9.0),
    idle: float = 1.0,
) -> Table:
    """The table of placements by method, and its verdict where their steps take other times in the second race."""
    problem = chain_problem(3, 2)
    problem = replace(problem, host=core_host(2))
    simulator = Simulator(problem)
    rows = {method: np.array([k & 1, k >> 1 & 1, k >> 2 & 1], dtype=np.int32) for k, method in enumerate(steps_s)}
    plans = {method: simulator.plan(row) for method, row in rows.items()}
    runner = RacingRunner({plans[method].fingerprint: step_s for method, step_s in fresh_s.items()}, eager_s)
    monkeypatch.setattr(evaluator_module, "make_runner", lambda *_, **__: runner)
    monkeypatch.setattr(evaluator_module, "idle_share", lambda: idle)

    def measure(plans: list[Plan], others: list[object]) -> list[Measurement]:
        times_s = [*steps_s.values(), *(eager_s or ())[: len(others)]]
        return [Measurement("ok", each_s, (each_s,) * 9) for each_s in times_s]

    eager = None if eager_s is None else EagerRecipe()
    table = fill_table({method: MethodResult(each) for method, each in plans.items()}, eager, "-", measure, eager)
    found = judge_table(problem, Evaluator(problem, simulator), table, TrainConfig(), lambda _: None)
    assert found.verdict is not None
    return found


def test_the_leader_is_the_best_where_a_race_that_did_not_choose_it_confirms_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = judged(monkeypatch, {"single": 3.0, "learned": 1.0}, {"single": 3.0, "learned": 2.0})
    assert table.best == "learned"
    assert table.verdict is not None
    assert table.verdict.is_worth_it
    assert table.summary.startswith("placed 2.00 s, eager 9.00 s, one device 3.00 s: faster than all of these")


def test_a_lead_that_is_not_there_again_names_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    table = judged(monkeypatch, {"single": 3.0, "learned": 1.0}, {"single": 3.0, "learned": 3.0})
    assert table.best == "single"
    assert table.verdict is not None
    assert (table.verdict.step_s, table.verdict.outcome) == (3.0, "faster")  # than eager
    assert table.summary.startswith("one device 3.00 s, eager 9.00 s")


@pytest.mark.parametrize(
    ("eager_s", "name", "outcome"),
    [
        ((1.0, 9.0), "eager", "slower"),
        ((9.0, 1.5), "eager on one thread", "slower"),
        ((2.0, 9.0), "eager", "no clear difference"),
    ],
)
def test_plain_pytorch_is_the_quicker_of_both_and_has_to_be_beaten(
    eager_s: tuple[float, float], name: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_s = {"single": 3.0, "learned": 2.0}
    table = judged(monkeypatch, {"single": 3.0, "learned": 1.0}, fresh_s, eager_s)
    assert table.best == "learned"  # of placements it is the best, though it is not worth it
    assert table.verdict is not None
    assert (table.verdict.beside[0].name, table.verdict.outcome) == (name, outcome)
    assert "not worth it" in table.summary


def test_a_busy_machine_leaves_the_verdict_open_and_names_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {"single": 3.0, "learned": 1.0}
    table = judged(monkeypatch, times_s, times_s, idle=0.5)
    assert table.best == "learned"
    assert table.verdict is not None
    assert table.verdict.outcome == "not known"
    assert "other work took 50 %" in table.summary


def test_a_gang_has_to_be_beaten_too_and_without_eager_one_device_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_s = {"single": 3.0, "gang": 2.0, "learned": 1.0}
    assert judged(monkeypatch, steps_s, steps_s | {"learned": 2.0}, None).best == "gang"
    assert judged(monkeypatch, steps_s, steps_s, None).best == "learned"
    alone = judged(monkeypatch, {"single": 3.0}, {"single": 3.0}, None)
    assert alone.verdict is not None
    assert alone.verdict.outcome == "not known"


def test_simulated_steps_are_compared_exactly() -> None:
    problem = chain_problem(3, 2)
    simulator = Simulator(problem)
    evaluator = Evaluator(problem, simulator)
    single, apart = (simulator.plan(np.array(row, dtype=np.int32)) for row in ([0, 0, 0], [0, 1, 0]))
    entries = {"single": MethodResult(single), "learned": MethodResult(apart)}
    table = measure_table(problem, evaluator, entries, TrainConfig(), lambda _: None)
    table = judge_table(problem, evaluator, table, TrainConfig(), lambda _: None)
    assert table.best == "single"
    assert table.verdict is not None
    assert table.verdict.rounds == 0


@pytest.mark.parametrize(
    ("left_s", "rounds", "raced"),
    [(float("inf"), 25, 7), (0.0, 1, 3), (9e3, 25, 7)],
)
def test_with_little_time_fewer_rows_are_raced_for_fewer_rounds(left_s: float, rounds: int, raced: int) -> None:
    problem = chain_problem(2, 7)
    seconds = Costs(np.full(problem.costs.op_time_s.shape, 5.0), "profiled")
    asked: list[tuple[int, int]] = []

    class Measured:
        is_measured = True

        def measure_plans(self, plans: list[Plan], protocol: RaceProtocol, **_: object) -> list[Measurement]:
            asked.append((len(plans), protocol.max_rounds))
            return [Measurement("ok", 1.0 + k, (1.0 + k,) * protocol.max_rounds) for k in range(len(plans))]

    names = ("blocks", "single", "expert", "eft", "heft")
    entries = {name: MethodResult(plan(k, k)) for k, name in enumerate(names)}
    entries |= {"learned": searched(plan(5, 6), 9, 4), "portfolio": searched(plan(6, 5), 9, 4)}
    evaluator: Any = Measured()
    table = measure_table(
        replace(problem, costs=seconds), evaluator, entries, TrainConfig(), lambda _: None, left_s, 5.0
    )
    assert asked == [(raced, rounds)]
    timed = {row["method"] for row in table.rows if row["status"] == "ok"}
    assert {"single", "learned", "portfolio"} <= timed
    assert len(timed) == raced
    assert [row["method"] for row in table.rows] == [*names, "learned", "portfolio", "eager"]


def test_without_eager_its_row_says_why() -> None:
    table = fill_table(
        {"single": MethodResult(plan(0))},
        None,
        "simulated host",
        lambda plans, others: [Measurement("ok", 1.0, (1.0,)) for _ in plans],
    )
    assert table.row("eager")["status"] == "skipped"
    assert table.row("eager")["why"] == "simulated host"


def test_a_failed_row_keeps_its_cause_and_cannot_win() -> None:
    outcomes = [Measurement("error", float("inf"), why="boom"), Measurement("ok", 3.0, (3.0,))]
    table = fill_table(
        {"a": MethodResult(plan(0)), "b": MethodResult(plan(1))}, None, "-", lambda plans, others: outcomes
    )
    assert table.row("a")["step_time_s"] is None
    assert table.row("a")["why"] == "boom"
    assert table.best == "b"


def test_a_method_that_raised_is_an_error_or_its_best_until_then() -> None:
    failed = Failure("KeyError: 'd:9' (mine.py, line 3)", "Traceback ...")
    entries = {
        "nothing": MethodResult(failure=failed),
        "early": MethodResult(plan(0), 5, failure=failed),
        "single": MethodResult(plan(1)),
    }
    outcomes = [Measurement("ok", 1.0, (1.0,)), Measurement("ok", 3.0, (3.0,))]
    table = fill_table(entries, None, "-", lambda plans, others: outcomes)
    assert (table.row("nothing")["status"], table.row("nothing")["why"]) == ("error", failed.why)
    assert table.row("nothing")["traceback"] == table.row("early")["traceback"] == failed.traceback
    assert (table.row("early")["status"], table.row("early")["step_time_s"]) == ("ok", 1.0)
    assert table.row("early")["why"] == f"its best until it raised {failed.why}"
    assert "traceback" not in table.row("single")
    assert table.leader == "early"


def test_the_leader_has_the_shortest_steps_and_one_outlier_does_not_count() -> None:
    samples = {"single": (2.0,) * 9, "gang": (1.5,) * 9, "learned": (1.4,) * 8 + (90.0,), "eft": (1.45,) * 9}
    outcomes = [Measurement("ok", float(np.median(each)), each) for each in samples.values()]
    entries = {method: MethodResult(plan(k)) for k, method in enumerate(samples)}
    table = fill_table(entries, None, "-", lambda plans, others: outcomes)
    assert (table.leader, table.best) == ("learned", "gang")  # the race that chose it says nothing of its lead


def test_a_gang_that_simulates_worse_has_a_row_of_its_own() -> None:
    problem = problem_with_gang()
    simulator = Simulator(problem)
    assert place_quickly(problem, simulator, "single").plan.devices.tolist() == [0, 0, 0]  # type: ignore[union-attr]
    (row,) = place_on_gang(problem, simulator).values()
    assert row.plan is not None
    assert row.plan.devices.tolist() == [2, 2, 2]
    assert place_on_gang(chain_problem(3, 2), Simulator(chain_problem(3, 2))) == {}
    gang, plain = (num_rows(("learned",), each.host) for each in (problem, chain_problem(3, 2)))
    assert gang == plain + 2


def test_single_cores_are_searched_beside_a_gang_and_are_the_best_where_they_measure_so() -> None:
    problem = problem_with_gang(gang_s=0.5)
    simulator = Simulator(problem)
    entries = {"portfolio": place_quickly(problem, simulator, "portfolio")}
    entries |= place_on_gang(problem, simulator) | place_without_gangs(problem, simulator, seed=0)
    assert entries["portfolio"].plan.devices.tolist() == [2, 2, 2]  # type: ignore[union-attr]

    def measure(plans: list[Plan], _: object) -> list[Measurement]:
        times_s = [3.0 if 2 in each.devices else 2.0 for each in plans]
        return [Measurement("ok", step_s, (step_s,) * 9) for step_s in times_s]

    table = fill_table(entries, None, "-", measure)
    assert table.leader == "no-gang"
    assert set(table.plans["no-gang"].devices.tolist()) <= {0, 1}


def test_without_a_gang_or_with_an_op_that_has_to_be_on_it_nothing_more_is_searched() -> None:
    problem, plain = problem_with_gang(), replace(chain_problem(3, 2), host=core_host(2))
    pinned, kept = np.ones((3, 3), dtype=bool), np.ones((3, 3), dtype=bool)
    pinned[1], kept[1] = (False, False, True), (False, True, True)
    assert place_without_gangs(plain, Simulator(plain), seed=0) == {}
    tied, free = (replace(problem, allowed=allowed) for allowed in (pinned, kept))
    assert place_without_gangs(tied, Simulator(tied), seed=0) == {}
    (row,) = place_without_gangs(free, Simulator(free), seed=0).values()
    assert row.plan is not None
    assert row.plan.devices[1] == 1  # what was not allowed is not allowed now


def problem_with_gang(gang_s: float = 2.0) -> Problem:
    """Three ops of 1 s on each of two cores, and, as it seems, of so long on their gang."""
    plain = chain_problem(3, 2)
    costs = Costs(np.tile([1.0, 1.0, gang_s], (plain.graph.num_ops, 1)), "profiled")
    return Problem(plain.graph, core_host(2, has_gang=True), costs, plain.grouping)
