"""Comparing: budgets, rows, bounds, and what a missing extra leads to."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from core_hosts import core_host
from micrographs import op_graph
from search_problems import barred, fork_problem

from rlplace.cluster import Cluster
from rlplace.compare.comparison import Comparison, Row
from rlplace.compare.equal_budgets import CompareConfig, compare
from rlplace.errors import InvalidValue, MissingExtra, RunnerError, UnknownName
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.search.methods import METHODS, Method
from rlplace.search.task import Task

CHEAP = ("single", "round-robin", "blocks", "random")


def two_devices(memory_bytes: int = 1000) -> Host:
    devices = tuple(Device(f"d:{k}", "d", "simulated", memory_bytes) for k in range(2))
    links = (Link("up", 1e3), Link("down", 1e3))
    return Host("two", devices, links, (Route("d:0", "d:1", ("up",)), Route("d:1", "d:0", ("down",))))


def two_chains(memory_bytes: int = 1000) -> Problem:
    """Two independent chains of two ops of 1 s each: 4 s on one device, 2 s on two, and no less."""
    graph = op_graph([[], [0], [], [2]], 1)
    return Problem(
        graph, two_devices(memory_bytes), Costs(np.ones((4, 2)), "estimated"), Grouping(np.array([0, 0, 1, 1]))
    )


def test_rows_stand_beside_the_bound() -> None:
    comparison = compare(two_chains(), CompareConfig(CHEAP, evaluations=64), workload="chains")
    by_name = {row.method: row for row in comparison.rows}
    assert (comparison.lower_bound_s, by_name["single"].value_s, by_name["round-robin"].value_s) == (2.0, 4.0, 2.0)
    assert comparison.gap(by_name["single"]) == pytest.approx(1.0)
    assert comparison.gap(by_name["round-robin"]) == pytest.approx(0.0)
    assert comparison.best is not None
    assert comparison.best.value_s == 2.0
    assert by_name["random"].evaluations == 64
    assert by_name["single"].evaluations == 2
    assert by_name["round-robin"].peak_bytes == (2, 2)


def test_rows_and_json_say_how_the_best_came_about() -> None:
    comparison = compare(two_chains(), CompareConfig(("single", "random", "op-order"), evaluations=64, seeds=2))
    for row, told in zip(comparison.rows[:3], comparison.to_dict()["rows"], strict=False):
        assert told["history"] == [[best.evaluations, 0, best.seconds, best.best_s] for best in row.history]
        assert row.history[-1].best_s == row.value_s
        assert row.history[-1].evaluations <= row.evaluations
        assert 0 < row.history[0].seconds <= row.history[-1].seconds <= row.plan_s
        times = [best.best_s for best in row.history]
        assert times == sorted(set(times), reverse=True)
    assert comparison.rows[3].method == "op-order"
    assert comparison.to_dict()["rows"][3]["history"] == []


def test_the_json_has_the_keys_that_are_promised() -> None:
    told = compare(two_chains(), CompareConfig(("single",)), workload="chains").to_dict()
    assert told["schema"] == 1
    assert told["lower_bound_s"] == 2.0
    assert told["lower_bound_ms"] is None
    (row,) = told["rows"]
    assert {"method", "seed", "step_time_s", "gap_to_bound", "evaluations", "plan_s", "peak_bytes", "status"} <= set(
        row
    )
    assert (row["value_ms"], row["step_time_s"], row["status"]) == (None, 4.0, "ok")


def test_published_objectives_are_values_in_ms() -> None:
    rows = (Row("dp", 0, "ok", 0.25), Row("milp", 0, "timeout", why="no answer"))
    told = Comparison("w.json", "own", "max-load", rows, 0.2, "work", {}).to_dict()
    assert (told["lower_bound_s"], told["lower_bound_ms"]) == (None, 200.0)
    assert (told["rows"][0]["value_ms"], told["rows"][0]["step_time_s"]) == (250.0, None)
    assert told["rows"][0]["gap_to_bound"] == pytest.approx(0.25)
    assert (told["rows"][1]["value_ms"], told["rows"][1]["gap_to_bound"]) == (None, None)


def test_every_seed_of_a_method_that_draws_and_one_of_the_others() -> None:
    config = CompareConfig(CHEAP, evaluations=8, seeds=3)
    assert config.runs == (
        ("single", 0),
        ("round-robin", 0),
        ("blocks", 0),
        ("random", 0),
        ("random", 1),
        ("random", 2),
    )


def test_the_same_seed_finds_the_same() -> None:
    config = CompareConfig(("random",), evaluations=5, seeds=2)
    first, second = (compare(two_chains(), config) for _ in range(2))
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.value_s == other.value_s
        assert np.array_equal(one.devices, other.devices)


def test_seconds_are_shared_and_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)  # time passes only in the searches
    takes_s = iter([0.5, 3.0, 4.6, 0.0])

    def note(task: Task) -> None:
        given.append(task.budget.seconds)
        task.score(np.zeros(task.problem.graph.num_ops, dtype=np.int32))
        clock.now_s += next(takes_s)

    monkeypatch.setattr("rlplace.compare.equal_budgets.time", clock)
    monkeypatch.setattr("rlplace.search.rules.baselines.solve_random", note)
    compare(two_chains(), CompareConfig(("random",), seconds=8.0, seeds=4))
    # those who take less than their share leave the rest to the others, and the last has next to nothing, not nothing
    assert given == pytest.approx([8 / 4, 7.5 / 3, 4.5 / 2, 0.05])


class TwoWorkers:
    """A cluster that runs everything here, the last item first."""

    num_workers = 2
    is_closed = False

    def map(self, function: Callable[[Any], Row], items: Sequence[Any]) -> Iterator[tuple[int, Row]]:
        for index in reversed(range(len(items))):
            yield index, function(items[index])

    def close(self) -> None:
        self.is_closed = True


def test_on_a_cluster_searches_share_what_quick_methods_left_by_those_that_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)

    def single(task: Task) -> None:
        clock.now_s += 2.0

    monkeypatch.setattr("rlplace.compare.equal_budgets.time", clock)
    monkeypatch.setattr("rlplace.search.rules.baselines.solve_single", single)
    monkeypatch.setattr("rlplace.search.rules.baselines.solve_random", lambda task: given.append(task.budget.seconds))
    config = CompareConfig(("single", "random"), seconds=8.0, seeds=3)
    comparison = compare(two_chains(), config, cluster=cast(Cluster, TwoWorkers()))
    assert given == [6.0 / 2] * 3  # three on two workers are two rounds
    assert [(row.method, row.seed) for row in comparison.rows] == [("single", 0), *(("random", k) for k in range(3))]


def test_rows_of_a_cluster_stand_in_their_order_and_are_told_as_they_come() -> None:
    config, told = CompareConfig((*CHEAP, "op-order"), evaluations=8, seeds=2), list[str]()
    spread = compare(
        two_chains(), config, cluster=cast(Cluster, TwoWorkers()), on_row=lambda row: told.append(row.method)
    )
    local = compare(two_chains(), config)
    assert [(row.method, row.seed, row.value_s) for row in spread.rows] == [
        (row.method, row.seed, row.value_s) for row in local.rows
    ]
    assert told == ["random", "random", "blocks", "round-robin", "single", "op-order"]


def test_a_method_that_scored_nothing_was_too_slow_and_is_not_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.search.rules.baselines.solve_random", lambda task: time.sleep(task.budget.seconds))
    single, random = compare(two_chains(), CompareConfig(("single", "random"), seconds=0.2)).rows
    assert (single.status, random.status, random.value_s) == ("ok", "timeout", math.inf)
    assert "time was up" in random.why


def test_a_method_that_tried_nothing_is_not_said_to_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.search.rules.baselines.solve_random", lambda task: None)
    _, random = compare(two_chains(), CompareConfig(("single", "random"), evaluations=10)).rows
    assert (random.status, random.why) == ("skipped", "it tried no placement")


def test_one_device_is_skipped_where_pins_leave_none() -> None:
    pinned = barred(fork_problem(0), {0: (0,), 3: (1,)})
    (single,) = compare(pinned, CompareConfig(("single",), evaluations=400)).rows
    assert (single.status, single.evaluations) == ("skipped", 0)
    assert "pins" in single.why


def test_methods_for_micro_batches_say_why_there_are_none() -> None:
    (refused,) = compare(two_chains(), CompareConfig(("hybrid",), evaluations=10)).rows
    assert (refused.status, "--micro-batches K" in refused.why) == ("skipped", True)
    (row,) = compare(two_chains(), CompareConfig(("hybrid",), evaluations=10, chosen=("micro_batches", "shards"))).rows
    assert (row.status, row.why) == ("skipped", "auto chose the whole batch")
    for chosen, words in ((("micro_batches",), "`--split`"), (("micro_batches", "shards"), "auto chose whole ops")):
        (row,) = compare(two_chains(), CompareConfig(("tensor-parallel",), evaluations=10, chosen=chosen)).rows
        assert (row.status, words in row.why) == ("skipped", True)


def test_a_missing_extra_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(task: Task) -> None:
        raise MissingExtra("ortools", "exact")

    monkeypatch.setattr("rlplace.search.rules.baselines.solve_blocks", lacking)
    comparison = compare(two_chains(), CompareConfig(("single", "blocks")))
    single, blocks = comparison.rows
    assert (single.status, blocks.status) == ("ok", "skipped")
    assert "rlplace[exact]" in blocks.why


def test_what_does_not_fit_is_no_winner() -> None:
    comparison = compare(two_chains(memory_bytes=1), CompareConfig(("single", "round-robin"), evaluations=4))
    assert [row.status for row in comparison.rows] == ["oom", "oom"]
    assert comparison.best is None
    assert all(row.value_s == math.inf for row in comparison.rows)


@pytest.mark.slow
def test_throughput_is_the_busiest_device() -> None:
    comparison = compare(two_chains(), CompareConfig(("single", "round-robin"), objective="throughput"))
    assert [row.value_s for row in comparison.rows] == [4.0, 2.0]
    assert (comparison.lower_bound_s, comparison.lower_bound) == (2.0, "total work")


def test_a_pinned_group_stays_where_it_may_be() -> None:
    free = two_chains()
    allowed = np.ones((4, 2), dtype=np.bool_)
    allowed[:2, 0] = False
    problem = Problem(free.graph, free.host, free.costs, free.grouping, allowed)
    comparison = compare(problem, CompareConfig(CHEAP, evaluations=32))
    for row in comparison.rows:
        assert row.ok
        assert row.devices is not None
        assert row.devices[:2].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ("anneall",)}, "anneall"),
        ({"methods": "learned"}, "methods is 'learned', expected a list"),
        ({"evaluations": 0}, "evaluations"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": math.inf}, "finite"),
        ({"seeds": 0}, "seeds"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32 - 1, "seeds": 2}, "at most 1 from seed 4294967295 on"),
        ({"methods": ("learned",), "measured": 0}, "measured"),
        ({"methods": ("anneal",), "measured": 4}, "none without learned"),
        ({"methods": ("learned",), "measured": 4, "objective": "throughput"}, "latency beside measured"),
    ],
)
def test_mistakes_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises((UnknownName, InvalidValue), match=words):
        CompareConfig(**options)  # type: ignore[arg-type]


def test_a_published_objective_needs_a_published_file() -> None:
    with pytest.raises(InvalidValue, match="max-load"):
        compare(two_chains(), CompareConfig(("single",), objective="max-load"))


def test_all_means_every_method_that_is_registered() -> None:
    assert CompareConfig(("all",)).names == tuple(METHODS)
    assert all(isinstance(method, Method) for method in METHODS.values())


def two_layers(*, is_one_group: bool = False) -> Problem:
    """Two layers on two cores of this machine."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    graph = capture(model, torch.ones(2, 4), lambda output: output.sum(), "sgd")
    costs = Costs(np.full((graph.num_ops, 2), 1e-5), "profiled")
    if is_one_group:
        return Problem(graph, core_host(2), costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))
    return Problem.grouped(graph, core_host(2), costs)


def test_a_real_host_measures_every_placement_once() -> None:
    problem = two_layers(is_one_group=True)
    other = Row("sleep", 0, "ok", is_placement=False)
    workers = TwoWorkers()
    is_closed: list[bool] = []

    def sleeping() -> float:
        is_closed.append(workers.is_closed)
        return 1.25

    comparison = compare(
        problem,
        CompareConfig(("single", "round-robin")),
        others=[(other, sleeping)],
        cluster=cast(Cluster, workers),
    )
    single, dealt, sleep = comparison.rows
    assert all(is_closed)  # nothing of the cluster runs beside the race
    assert comparison.is_measured
    assert single.simulated_s == dealt.simulated_s
    assert single.value_s == dealt.value_s > 0  # the same placement: one lane
    assert (sleep.value_s, sleep.is_placement) == (1.25, False)
    assert comparison.best is not None
    assert comparison.best.method == "single"


def test_learned_measures_what_it_may_and_runs_in_the_same_race(monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[tuple[int, int]] = []
    real = HostRunner.measure_plans

    def count(self: HostRunner, plans: Sequence[Plan], **options: Any) -> list[Measurement]:
        races.append((len(plans), options["protocol"].num_traced))
        return real(self, plans, **options)

    monkeypatch.setattr(HostRunner, "measure_plans", count)
    problem = two_layers()
    config = CompareConfig(("single", "learned"), evaluations=60, isolated=False, measured=3, is_traced=False)
    single, learned = compare(problem, config).rows
    assert (learned.status, learned.measured, learned.why) == ("ok", 3, "measured 3 plans")
    assert learned.simulated_s is not None
    assert learned.value_s > 0
    assert races[0] == (3, 0)  # what is not plausible, on a disturbed machine, is measured again before the last race
    assert races[-1] == (len({row.plan.fingerprint for row in (single, learned) if row.plan is not None}), 0)
    races.clear()
    _, learned = compare(problem, dataclasses.replace(config, is_traced=True)).rows
    assert learned.measured == 3
    assert learned.why.startswith("measured 3 plans; traced steps took ")
    assert races[0] == (1, 1)  # the plan whose timeline shows most
    assert races[-1][1] == 0
    (skipped,) = compare(problem, CompareConfig(("learned",), evaluations=60)).rows
    assert (skipped.status, "--measured N" in skipped.why) == ("skipped", True)
    (skipped,) = compare(two_chains(), CompareConfig(("learned",), evaluations=60)).rows
    assert (skipped.status, "a host of this machine" in skipped.why) == ("skipped", True)


def test_what_nobody_can_measure_is_refused() -> None:
    config = CompareConfig(("learned",), evaluations=60, measured=3)
    with pytest.raises(InvalidValue, match="measured is 3, expected none on two, which is simulated"):
        compare(two_chains(), config)
    with pytest.raises(InvalidValue, match="measured is 3, expected none beside a cluster"):
        compare(two_layers(), config, cluster=cast(Cluster, TwoWorkers()))


def test_a_seed_is_that_of_every_method() -> None:
    config = CompareConfig(("single", "random"), evaluations=1)
    one, other, again = (compare(fork_problem(0), dataclasses.replace(config, seed=seed)) for seed in (3, 4, 3))
    assert [row.seed for row in one.rows] == [3, 3]
    assert [row.value_s for row in one.rows] == [row.value_s for row in again.rows]
    assert one.rows[0].value_s == other.rows[0].value_s
    assert one.rows[1].value_s != other.rows[1].value_s
    both = compare(fork_problem(0), dataclasses.replace(config, seed=3, seeds=2))
    assert [(row.method, row.seed) for row in both.rows] == [("single", 3), ("random", 3), ("random", 4)]
    assert [row.value_s for row in both.rows[1:]] == [one.rows[1].value_s, other.rows[1].value_s]


def test_the_winner_gets_a_better_op_order() -> None:
    comparison = compare(two_chains(), CompareConfig(("single", "round-robin", "op-order"), evaluations=50))
    ordered = comparison.rows[-1]
    assert (ordered.method, ordered.status, ordered.value_s) == ("op-order", "ok", 2.0)
    assert "round-robin" in ordered.why
    assert ordered.plan is not None


def test_a_solver_that_fails_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(task: Task) -> None:
        raise RunnerError("the program gmap failed")

    monkeypatch.setattr("rlplace.search.rules.baselines.solve_blocks", failing)
    single, blocks = compare(two_chains(), CompareConfig(("single", "blocks"))).rows
    assert (single.status, blocks.status, blocks.why) == ("ok", "error", "the program gmap failed")


def test_a_method_that_raises_is_one_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(task: Task) -> None:
        task.score(np.zeros(4, dtype=np.int32))
        raise ZeroDivisionError("no device is left")

    monkeypatch.setattr("rlplace.search.rules.baselines.solve_blocks", failing)
    comparison = compare(two_chains(), CompareConfig(("single", "blocks", "random"), evaluations=4))
    single, blocks, random = comparison.rows
    assert (single.status, blocks.status, random.status) == ("ok", "error", "ok")
    assert blocks.why.startswith("ZeroDivisionError: no device is left (test_equal_budgets.py, line ")
    told = comparison.to_dict()["rows"]
    assert "in failing" in told[1]["traceback"]
    assert "traceback" not in told[0]


def test_a_method_that_does_not_fit_the_problem_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(task: Task) -> None:
        raise InvalidValue("groups", 4, "at least 5")

    monkeypatch.setattr("rlplace.search.rules.baselines.solve_blocks", refusing)
    with pytest.raises(InvalidValue, match="at least 5"):
        compare(two_chains(), CompareConfig(("single", "blocks")))


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(task: Task) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlplace.search.rules.baselines.solve_random", interrupted)
    comparison = compare(two_chains(), CompareConfig(("single", "random"), evaluations=4))
    assert [row.method for row in comparison.rows] == ["single"]
    assert comparison.to_dict()["interrupted"] is True
    with pytest.raises(KeyboardInterrupt):  # nothing to keep
        compare(two_chains(), CompareConfig(("random",), evaluations=4))
