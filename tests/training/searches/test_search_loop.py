"""`search_and_measure` on a fake host and a fake clock: what is measured, when it ends, and what is handed back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fake_measurer import chain_problem
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import RaceProtocol
from rlplace.report.console import Progress, make_progress
from rlplace.search.methods import METHODS, Method, register_method
from rlplace.search.task import BestSoFar, Task
from rlplace.session.session_records import MethodResult
from rlplace.training.agent import Agent
from rlplace.training.searches.racing_host import FINAL, ROUND, LoopBudget
from rlplace.training.searches.search_all import search_and_measure
from rlplace.training.tracking import NoTracker

PROBLEM = chain_problem(4)


class FakeHost:
    """An `Evaluator` whose truth is the number of ops that are not where `wanted` has them; a race takes 2 s."""

    def __init__(self, wanted: list[int], *, fails: bool = False, problem: Problem = PROBLEM) -> None:
        self.problem, self.simulator = problem, Simulator(problem, threads=1)
        self.wanted, self.fails, self.now_s = np.array(wanted), fails, 0.0
        self.races: list[tuple[RaceProtocol, list[list[int]]]] = []

    def clock(self) -> float:
        return self.now_s

    def measure_plans(
        self, plans: Sequence[Plan], protocol: RaceProtocol, *, deadline_s: float = np.inf, is_recalled: bool = False
    ) -> list[Measurement]:
        assert is_recalled == (repr(protocol) == repr(ROUND))  # what is decided at last is measured afresh
        self.races.append((protocol, [plan.devices.tolist() for plan in plans]))
        self.now_s += 2.0
        if self.fails:
            return [Measurement("error", float("inf"), why="no") for _ in plans]
        drift = 1.0 + len(self.races)  # a machine that slows down: only ratios to the reference mean anything
        times = [drift * (1.0 + float((plan.devices != self.wanted).sum())) for plan in plans]
        return [Measurement("ok", step_s, (step_s,), reference_s=drift * 5.0) for step_s in times]


def score_listed(task: Task, placements: NDArray[np.int32]) -> None:
    task.score(placements)


def measure_one_by_one(task: Task, placements: NDArray[np.int32]) -> None:
    task.score(placements)
    for row in placements:
        task.measure(row)


def raise_after_two(task: Task, placements: NDArray[np.int32]) -> None:
    task.score(placements)
    task.measure(placements[:2])
    raise KeyError("d:9")


def measure_traced(task: Task, placements: NDArray[np.int32], is_traced: bool) -> None:
    measure_one_by_one(task, placements)


def count_by_itself(task: Task, placements: NDArray[np.int32]) -> None:
    for row in placements:
        task.count(7)
        task.measure(row)


def name_the_third(task: Task, placements: NDArray[np.int32]) -> Agent:
    """An agent that takes a plan for the best that is not among those with the least measured times."""
    measure_one_by_one(task, placements)
    agent = Agent(task.problem, seed=0)
    agent.learn([Simulator(task.problem).plan(placements[2])], [Measurement("ok", 1.0)])
    return agent


@pytest.fixture(autouse=True)
def _methods() -> object:
    made = {"listed": score_listed, "asked": measure_one_by_one, "counted": count_by_itself, "raising": raise_after_two}
    made |= {"traced": measure_traced, "named": name_the_third}
    for name, solve in made.items():
        register_method(Method(name, solve, "search", "a test"))
    yield
    for name in made:
        METHODS.unregister(name)


def run(
    host: FakeHost,
    placements: list[list[int]],
    budget: LoopBudget,
    *,
    method: str = "listed",
    tracker: NoTracker | None = None,
    own: dict[str, object] | None = None,
    **options: object,
) -> MethodResult:
    return search_and_measure(
        method,
        host,  # type: ignore[arg-type]
        budget,
        seed=0,
        progress=make_progress(is_quiet=True),
        tracker=tracker or NoTracker(),
        options={"placements": np.array(placements, dtype=np.int32), **(own or {})},
        clock=host.clock,
        **options,  # type: ignore[arg-type]
    )


LISTED = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 1]]


def test_the_host_decides_among_what_the_simulator_liked() -> None:
    host = FakeHost(wanted=[0, 0, 1, 1])
    found = run(host, LISTED, LoopBudget(100.0, 0.5, measurements=len(LISTED)))
    assert found.plan is not None
    assert found.plan.devices.tolist() == [0, 0, 1, 1]
    assert (found.num_scored, found.num_measured) == (7, 7)
    sizes = [len(plans) for protocol, plans in host.races if protocol == ROUND]
    assert sizes == [6, 1]
    protocol, finalists = host.races[-1]
    assert protocol == FINAL
    assert len(finalists) == 4
    assert [0, 0, 1, 1] in finalists


def test_the_answer_of_an_agent_is_in_the_last_race_whatever_its_own_race_said() -> None:
    host = FakeHost(wanted=[1, 1, 1, 1])
    asked = [*[[1, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 1, 1]], [1, 1, 1, 1]]
    found = run(host, asked, LoopBudget(100.0, 0.5, measurements=len(asked)), method="named")
    protocol, finalists = host.races[-1]
    assert protocol == FINAL
    assert finalists[0] == [0, 0, 0, 0]
    assert len(finalists) == 4
    assert found.plan is not None
    assert found.plan.devices.tolist() == [1, 1, 1, 1]  # the race decides


def test_a_large_budget_measures_more_than_the_usual_number_of_candidates() -> None:
    generator = np.random.default_rng(0)
    problem = chain_problem(12)
    host = FakeHost([0] * 12, problem=problem)
    rows = np.unique(generator.integers(0, 2, (500, 12)), axis=0)[:200]
    assert run(host, rows.tolist(), LoopBudget(1000.0, 0.5, measurements=150)).num_measured == 150


def test_only_a_traced_method_asks_for_traced_steps_and_not_in_its_last_race() -> None:
    for method, own, count in (
        ("asked", {}, 0),
        ("traced", {"is_traced": True}, 1),
        ("traced", {"is_traced": False}, 0),
    ):
        host = FakeHost(wanted=[0, 0, 1, 1])
        run(host, LISTED, LoopBudget(100.0, 0.5, measurements=len(LISTED)), method=method, own=own)
        assert {protocol.num_traced for protocol, _ in host.races[:-1]} == {count}
        assert host.races[-1][0] is FINAL


def test_only_as_many_are_measured_as_the_budget_says() -> None:
    host = FakeHost(wanted=[1, 1, 1, 1])
    assert run(host, LISTED, LoopBudget(100.0, 0.5, measurements=2)).num_measured == 2


def test_time_ends_the_measuring_but_for_the_first_batch() -> None:
    host = FakeHost(wanted=[0, 0, 1, 1])
    host.now_s = 0.0
    found = run(host, LISTED, LoopBudget(1.0, 0.5, measurements=len(LISTED)))
    assert (found.num_measured, len(host.races)) == (6, 1)  # no time for a second batch, nor for a last race
    assert found.plan is not None


def test_new_best_plans_are_told_with_their_step_time_at_the_reference_of_now() -> None:
    host, told = FakeHost(wanted=[0, 0, 1, 1]), []
    run(
        host,
        LISTED,
        LoopBudget(100.0, 0.5, measurements=7),
        on_best=lambda plan, step_s, ratio: told.append((plan.devices.tolist(), step_s, ratio)),
    )
    devices, step_s, ratio = told[0]
    assert devices == [0, 0, 1, 1]
    assert (step_s, ratio) == pytest.approx((2.0, 0.2))  # a fifth of the reference's 10 s in that race
    assert told[-1] == (devices, pytest.approx(4.0), pytest.approx(0.2))  # of 20 s in the last one, which decides


class Notes(NoTracker):
    """Keeps what is told of the best so far."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[float], float]] = []

    def log_best_so_far(self, method: str, best: BestSoFar, single_s: float) -> None:
        self.told.append((method, best.to_list(), single_s))


def test_history_is_of_measured_ratios_at_one_step_time_of_the_reference() -> None:
    host, notes = FakeHost(wanted=[0, 0, 0, 1]), Notes()
    asked = [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 1]]  # 4/5, 1 and 1/5 of the reference, in a race each
    found = run(host, asked, LoopBudget(100.0, 0.5, measurements=3), method="asked", tracker=notes)
    # the machine slows down: the reference takes 10, 15 and 20 s in these races, and 25 s in the last one
    history = [best.to_list() for best in found.history]
    assert history == [[3, 1, 2.0, pytest.approx(20.0)], [3, 3, 6.0, pytest.approx(5.0)]]
    assert (found.num_measured, found.seconds, found.single_s) == (3, 8.0, 25.0)
    # the tracker is told after every race, at the reference of that race
    assert [told[1][1:] for told in notes.told] == [
        [1, 2.0, pytest.approx(8.0)],
        [2, 4.0, pytest.approx(12.0)],
        [3, 6.0, pytest.approx(4.0)],
        [6, 8.0, pytest.approx(5.0)],
    ]
    assert [told[2] for told in notes.told] == [10.0, 15.0, 20.0, 25.0]
    assert {told[0] for told in notes.told} == {"asked"}


def test_every_plan_that_ran_is_kept_simulated_and_measured_without_the_drift() -> None:
    host = FakeHost([1, 1, 1, 1])
    found = run(host, LISTED, LoopBudget(100.0, 0.5, measurements=3))
    ran = [devices for _, race in host.races for devices in race]
    assert len(found.tried) == len(ran)
    for (simulated_s, measured_s), devices in zip(found.tried, ran, strict=True):
        plan = host.simulator.plan(np.array(devices, dtype=np.int32))
        assert simulated_s == host.simulator.retime(plan).step_time_s
        wrong = sum(device != 1 for device in devices)
        assert measured_s == pytest.approx((1.0 + wrong) / 5.0 * found.single_s)


def test_placements_that_a_method_counted_by_itself_are_in_its_history() -> None:
    found = run(
        FakeHost([0, 0, 0, 1]), LISTED[:2] + LISTED[4:5], LoopBudget(100.0, 0.5, measurements=3), method="counted"
    )
    assert [best.evaluations for best in found.history] == [7, 21]
    assert found.num_scored == 21


def test_the_best_ratio_shown_never_goes_up_while_the_machine_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []

    class Watching(Progress):
        def update(self, *, best_s: float, single_s: float, **others: object) -> None:
            shown.append(best_s / single_s)

    monkeypatch.setattr(f"{__name__}.make_progress", lambda is_quiet: Watching(is_quiet=is_quiet))
    run(FakeHost([0, 0, 0, 1]), [LISTED[4], *LISTED[:3]], LoopBudget(100.0, 0.5, measurements=4), method="asked")
    ratios = [ratio for ratio in shown if np.isfinite(ratio)]
    assert len(ratios) > 4
    assert ratios == pytest.approx([0.2] * len(ratios))


def test_where_everything_fails_there_is_no_plan() -> None:
    notes = Notes()
    budget = LoopBudget(100.0, 0.5, measurements=3)
    found = run(FakeHost([0, 0, 0, 0], fails=True), LISTED, budget, tracker=notes)
    assert (found.plan, found.history, notes.told) == (None, (), [])


def test_what_a_method_that_raised_had_found_is_measured_on() -> None:
    host = FakeHost(wanted=[0, 0, 1, 1])
    found = run(host, LISTED, LoopBudget(100.0, 0.5, measurements=len(LISTED)), method="raising")
    assert found.failure is not None
    assert found.failure.why.startswith("KeyError: 'd:9' (test_search_loop.py, line ")
    assert (found.num_scored, found.num_measured) == (7, 7)
    assert found.plan is not None
    assert found.plan.devices.tolist() == [0, 0, 1, 1]


def test_what_measuring_raises_is_no_fault_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: FakeHost, *arguments: object, **options: object) -> list[Measurement]:
        raise RunnerError("the reference placement failed")

    monkeypatch.setattr(FakeHost, "measure_plans", lost)
    with pytest.raises(RunnerError, match="the reference"):
        run(FakeHost([0] * 4), LISTED, LoopBudget(100.0, 0.5, measurements=4), method="raising")


class FakeJournal:
    """Keeps every state that it is told; raises at one of them."""

    is_due = False

    def __init__(self, fatal: int = -1) -> None:
        self.states: list[MethodResult] = []
        self._fatal = fatal

    def keep(self, state: MethodResult) -> None:
        self.states.append(state)
        if len(self.states) == self._fatal:
            raise KeyboardInterrupt


def test_an_interrupted_search_goes_on_from_what_was_measured() -> None:
    budget = LoopBudget(100.0, 0.5, measurements=len(LISTED))
    straight = run(FakeHost([0, 0, 1, 1]), LISTED, budget)
    host, journal = FakeHost([0, 0, 1, 1]), FakeJournal(fatal=2)  # after the search, then after a race
    with pytest.raises(KeyboardInterrupt):
        run(host, LISTED, budget, keeper=journal)
    state = journal.states[-1]
    assert (state.is_searched, state.is_done, state.num_measured, state.seconds) == (True, False, 6, 2.0)
    again, rest = FakeHost([0, 0, 1, 1]), FakeJournal()
    found = run(again, LISTED, budget, before=state, keeper=rest)
    ran = [devices for protocol, race in again.races if protocol == ROUND for devices in race]
    (first,) = [race for protocol, race in host.races]
    assert len(ran) == 1
    assert ran[0] not in first
    assert found.plan is not None
    assert straight.plan is not None
    assert found.plan.devices.tolist() == straight.plan.devices.tolist()
    assert (found.num_scored, found.num_measured) == (straight.num_scored, straight.num_measured)
    assert [best.measurements for best in found.history] == [best.measurements for best in straight.history]
    assert found.seconds == straight.seconds
    assert rest.states[-1].is_done
    assert rest.states[-1].plan is found.plan
    assert [race.is_final for race in rest.states[-1].races] == [False, False, True]


def test_what_a_method_asked_for_before_it_was_interrupted_is_told_to_it_again() -> None:
    host, journal = FakeHost([0, 0, 1, 1]), FakeJournal(fatal=3)
    budget = LoopBudget(1000.0, 0.5, measurements=5)
    with pytest.raises(KeyboardInterrupt):
        run(host, LISTED, budget, method="asked", keeper=journal)
    state = journal.states[-1]
    assert not state.is_searched
    assert state.num_measured == 3
    told: list[int] = []

    def look(task: Task, placements: NDArray[np.int32]) -> None:
        told.extend(len(plans) for plans, _ in task.raced)
        assert (task.evaluations, task.measurements, task.measurements_left) == (7, 3, 2)
        assert task.best_devices is not None

    register_method(Method("look", look, "search", "a test"))
    try:
        run(FakeHost([0, 0, 1, 1]), LISTED, budget, method="look", before=state, keeper=FakeJournal())
    finally:
        METHODS.unregister("look")
    assert told == [1, 1, 1]
