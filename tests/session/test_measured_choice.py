"""On this machine a batch is cut under `auto` only if that was measured faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from core_hosts import core_host

import rlplace
from rlplace.errors import RunnerError
from rlplace.measure import Costs, Host, Measurement, Plan, Problem
from rlplace.measure.timing.race import Timer
from rlplace.search.parallel import choose_micro_batches
from rlplace.session import prepare as measured_choice
from rlplace.session.prepare import chosen_problem, is_cut_faster
from rlplace.session.setup import CutOptions


@cache
def problem_of(count: int, split: rlplace.SplitPlan | None = None) -> Problem:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    loss_fn = torch.nn.functional.cross_entropy
    graph = rlplace.capture(model, x, loss_fn, "sgd", targets=y, micro_batches=count, split=split)
    return Problem.profile(graph, Host.detect("cores"))


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True])
def test_both_are_run_and_the_faster_one_is_said(isolated: bool) -> None:
    cut, lines = problem_of(2), list[str]()
    devices = np.zeros(cut.graph.num_ops, dtype=np.int32)
    faster = is_cut_faster(cut, devices, problem_of(1), seed=0, say=lines.append, isolated=isolated)
    assert isinstance(faster, bool)
    (line,) = lines
    assert "in 2 micro-batches" in line
    assert "with the whole batch" in line


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_race_decides_while_nobody_else_measures(
    is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choosing(problems: object, **options: object) -> choose_micro_batches.Chosen:
        assert isinstance(problems, dict)
        made = {count: make() for count, make in problems.items() if count in (1, 2)}
        return choose_micro_batches.Chosen(2, "rank", made[2], 5, np.zeros(made[2].graph.num_ops, dtype=np.int32), 1.0)

    monkeypatch.setattr(choose_micro_batches, "choose", choosing)

    def raced(*_: object, **__: object) -> bool:
        locks.extend((tmp_path / "rlplace").glob("measuring-*.lock"))
        return is_faster

    locks: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_choice, "is_cut_faster", raced)
    prepared = chosen_problem(CutOptions("auto"), Host.detect("cores"), problem_of, seed=0)
    problem, spent = prepared.problem, prepared.evaluations
    assert problem.graph.num_micro_batches == (2 if is_faster else 1)
    assert (prepared.start is not None) == is_faster  # it is a placement of the problem that was chosen
    assert spent == 5
    assert len(locks) == 1
    assert not locks[0].exists()


def test_a_number_that_is_asked_for_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> bool:
        raise AssertionError("raced")

    monkeypatch.setattr(measured_choice, "is_cut_faster", never)
    problem = chosen_problem(CutOptions(2), Host.detect("cores"), problem_of, seed=0, evaluations=10).problem
    assert problem.graph.num_micro_batches == 2


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_split_for_a_number_that_is_asked_for_is_raced_with_the_step_without(
    is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dataclasses.replace(problem_of(2), op_order="tilt")
    split, devices = problem_of(2), np.zeros(problem_of(2).graph.num_ops, dtype=np.int32)
    plan = rlplace.SplitPlan(("mlp",))
    chosen = choose_micro_batches.Chosen(2, "rank", split, 5, devices, 1.0, plan, plain)
    monkeypatch.setattr(choose_micro_batches, "choose", lambda *_, **__: chosen)
    raced: list[object] = []

    def race(cut: Problem, devices: object, whole: Problem, **_: object) -> bool:
        raced.extend((cut, whole))
        return is_faster

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_choice, "is_cut_faster", race)
    prepared = chosen_problem(CutOptions(2, split="auto"), Host.detect("cores"), problem_of, seed=0)
    assert raced == [split, plain]
    assert prepared.problem is (split if is_faster else plain)


@pytest.mark.parametrize(("gang_s", "is_faster"), [(0.5, False), (2.0, True)])
def test_the_step_is_cut_only_if_it_is_faster_than_the_whole_one_on_a_gang_too(
    gang_s: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search and a core take 2 s, the cut step 1 s; the simulator takes the gang for the slowest."""
    whole = with_gang(problem_of(1), gang_s=9.0)
    race_as(monkeypatch, lambda _: 1.0, lambda plan: gang_s if (plan.devices == GANG).all() else 2.0)
    cut = problem_of(2)
    devices = np.zeros(cut.graph.num_ops, dtype=np.int32)
    assert is_cut_faster(cut, devices, whole, seed=0, say=lambda _: None) == is_faster


@pytest.mark.parametrize(("core_s", "is_faster"), [(1.0, True), (2.0, False)])
def test_both_steps_are_searched_without_the_gang_too(
    core_s: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, all ends on the gang. Measured, that takes 3 s for the cut step; the whole one on cores 1.5 s."""
    cut, whole = with_gang(problem_of(2), gang_s=1e-9), with_gang(problem_of(1), gang_s=1e-9)
    devices = np.full(cut.graph.num_ops, GANG, dtype=np.int32)
    ran = race_as(
        monkeypatch,
        lambda plan: core_s if (plan.devices != GANG).all() else 3.0,
        lambda plan: 1.5 if (plan.devices != GANG).all() else 3.0,
    )
    assert is_cut_faster(cut, devices, whole, seed=0, say=lambda _: None) == is_faster
    assert [bool((plan.devices == GANG).any()) for plan in ran] == [True, False, True, False, False, True]


def test_nothing_more_is_raced_without_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut step; the whole one as searched, and on one device."""
    cut = problem_of(2)
    ran = race_as(monkeypatch, lambda _: 1.0, lambda _: 2.0)
    assert is_cut_faster(cut, np.zeros(cut.graph.num_ops, dtype=np.int32), problem_of(1), seed=0, say=lambda _: None)
    assert len(ran) == 3


@pytest.mark.parametrize("is_failing", [True, False])
def test_what_was_raced_is_said(is_failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_s(_: Plan) -> float:
        if is_failing:
            raise RunnerError("it ended")
        return 1.0

    race_as(monkeypatch, cut_s, lambda _: 2.0)
    for cut, said, unsaid in (
        (problem_of(2), "2 micro-batches", "shards"),
        (problem_of(1, rlplace.SplitPlan(("mlp",))), "2 shards", "micro-batches"),
    ):
        lines, devices = list[str](), np.zeros(cut.graph.num_ops, dtype=np.int32)
        assert is_cut_faster(cut, devices, problem_of(1), seed=0, say=lines.append) != is_failing
        (line,) = lines
        assert said in line
        assert unsaid not in line


GANG = 2


def with_gang(problem: Problem, gang_s: float) -> Problem:
    """The problem on two cores and their gang: 1 s for each op on a core, and `gang_s` on the gang, as it seems."""
    costs = Costs(np.tile([1.0, 1.0, gang_s], (problem.graph.num_ops, 1)), "profiled")
    return Problem(problem.graph, core_host(2, has_gang=True), costs, problem.grouping)


def race_as(
    monkeypatch: pytest.MonkeyPatch, cut_s: Callable[[Plan], float], whole_s: Callable[[Plan], float]
) -> list[Plan]:
    """Lets steps take so long; the plans that are raced, those of the cut step first."""
    ran: list[Plan] = []

    class Runner:
        def timer(self, plan: Plan) -> Timer:
            ran.append(plan)
            return lambda: whole_s(plan)

        def measure_plans(self, plans: list[Plan], *, others: list[Timer], **_: object) -> list[Measurement]:
            ran[:0] = plans
            times_s = (*(cut_s(plan) for plan in plans), *(other() for other in others))
            return [Measurement("ok", seconds, (seconds,) * 15) for seconds in times_s]

        def close(self) -> None:
            pass

    monkeypatch.setattr(measured_choice, "make_runner", lambda *_, **__: Runner())
    return ran
