"""What is learned of a host before a search, what it gained, and which of the two is used."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fake_measurer import chain_problem
from host_models import on_cores
from random_problems import plain_host, random_problem
from scipy.stats import spearmanr

from rlplace.errors import RunnerError
from rlplace.measure import Simulator
from rlplace.measure.host_model import Posterior, Prior, Scales
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.race import RaceProtocol
from rlplace.measure.truth import TrueTimer
from rlplace.session import calibrate as calibration
from rlplace.session.calibrate import (
    Calibration,
    Known,
    calibrate_on,
    calibrated,
    draw_spread,
    plans_of,
    step_times,
)

WIDE = Prior(op_type=0.5, device=0.3, bandwidth=0.6)


def known(problem: Problem, true: Problem, count: int = 9) -> Known:
    simulator = Simulator(problem, threads=1)
    plans = plans_of(problem, simulator, problem.draw_groups(np.random.default_rng(0), count))
    true_s = [Simulator(true, threads=1).retime(plan).step_time_s for plan in plans]
    return Known(problem, plans, [Measurement("ok", step_s, (step_s,)) for step_s in true_s])


def test_the_lines_say_what_is_used_and_what_was_learned() -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    scales = Scales(problem, WIDE)
    mean = np.zeros(len(scales))
    place = next(k for k, item in enumerate(scales.items) if item.kind == "device")
    mean[place] = np.log(1.5)
    posterior = Posterior(scales, mean, np.diag(np.full(len(scales), 0.01)))
    kept = Calibration(problem, posterior, True, 0.12, 0.034, 8)
    first, *rest = kept.say()
    assert first == (
        "calibrated on 8 placements: mean error on those that a fit has not seen "
        "12.0% before, 3.4% after: the fit is used"
    )
    assert rest == [f"{scales.items[place].name} is 50 % slower than given (47 to 53 %)"]
    worse = dataclasses.replace(kept, is_kept=False, error_before=0.041, error_after=0.434)
    assert worse.say()[0].endswith("4.1% before, 43.4% after: the fit is worse, so the simulator stays as profiled")


def test_a_slower_host_is_learned_and_used() -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    true = Scales(problem, WIDE)
    x = np.zeros(len(true))
    x[[k for k, item in enumerate(true.items) if item.kind == "device"]] = 0.4
    found = calibrate_on(known(problem, true.apply(x)), WIDE)
    assert found.is_kept
    assert found.error_after < 0.5 * found.error_before
    assert found.num_measured == 9


def test_what_is_right_already_stays_as_it_is() -> None:
    """All errors are 0, before and after: the prior has nothing to give way to."""
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    exact = dataclasses.replace(WIDE, overhead_s=0.0)
    found = calibrate_on(known(problem, problem), exact)
    assert found.error_before == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(found.posterior.mean, 0.0, atol=1e-6)


def test_step_times_are_the_medians() -> None:
    outcomes = [Measurement("ok", 2.0, (1.0, 2.0, 3.0)), Measurement("ok", 4.0, (4.0,))]
    assert step_times(outcomes).tolist() == [2.0, 4.0]


def traced(problem: Problem, true: Problem, count: int) -> Known:
    plans = list(known(problem, true, count).plans)
    return Known(problem, plans, TrueTimer(true, 5, is_traced=True).measure_plans(plans))


def test_a_slower_host_is_learned_from_a_few_traced_steps() -> None:
    """Each plan is predicted by a fit to the other three."""
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    scales = Scales(problem, WIDE)
    x = np.zeros(len(scales))
    x[[k for k, item in enumerate(scales.items) if item.kind == "device"]] = 0.4
    found = calibrate_on(traced(problem, scales.apply(x), 4), WIDE)
    assert found.is_kept
    assert found.error_after < 0.3 * found.error_before
    assert found.posterior.scales.is_traced
    alone = calibrate_on(traced(problem, problem, 1), WIDE)
    assert alone.error_before == alone.error_after


def test_a_plan_that_contradicts_the_others_shows_in_the_error_of_fits_that_have_not_seen_it() -> None:
    """Step times of four plans are as profiled, and that of the last one is ten times as long."""
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    told = traced(problem, problem, 4)
    outcomes = [
        *told.outcomes[:3],
        dataclasses.replace(told.outcomes[3], step_time_s=told.outcomes[3].step_time_s * 10),
    ]
    found = calibrate_on(Known(problem, told.plans, outcomes), WIDE)
    assert found.error_before >= np.log(10.0) / 4 - 0.1
    assert found.error_after >= np.log(10.0) / 4 - 0.1


def test_placements_whose_steps_show_most_come_first() -> None:
    """Of a chain of six ops of one signature: pairs of an op and a device, and of devices that send to each other."""
    problem, generator = chain_problem(6), np.random.default_rng(0)
    drawn = problem.draw_groups(np.random.default_rng(0), calibration.DRAWN)

    def shown(devices: np.ndarray) -> set[object]:
        return {*devices.tolist(), *zip(devices[:-1].tolist(), devices[1:].tolist(), strict=True)}

    found = draw_spread(problem, Simulator(problem), generator, 2)
    assert len(shown(found[0])) == max(len(shown(row)) for row in drawn)
    assert len(shown(found[0])) == 6  # both devices, and all four pairs of them
    assert len(found) == 2
    assert len(draw_spread(problem, Simulator(problem), generator, 99)) == calibration.DRAWN


class _Failing:
    """Measures every plan but the first ones."""

    def __init__(self, num_failing: int, rounds: int = 5) -> None:
        self.num_failing, self.rounds = num_failing, rounds

    def measure_plans(self, plans: list[Plan], protocol: RaceProtocol, deadline_s: float) -> list[Measurement]:
        self.protocol, self.plans = protocol, plans
        failed, ran = Measurement("timeout", float("inf"), why="a step did not end"), (1.0,) * self.rounds
        self.deadline_s = deadline_s
        return [failed if k < self.num_failing else Measurement("ok", 1.0, ran) for k in range(len(plans))]

    def close(self) -> None: ...


def test_placements_that_fail_are_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    said: list[str] = []
    monkeypatch.setattr(calibration, "Evaluator", lambda *_, **__: _Failing(2))
    _, found = calibrated(problem, 9, seed=0, say=said.append)
    assert (len(found.plans), len(found.outcomes)) == (7, 7)
    assert said.count("a placement could not be measured (timeout): a step did not end") == 2


def test_traced_placements_are_fewer_and_two_are_chosen_for_what_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    fake = _Failing(2, 3)
    monkeypatch.setattr(calibration, "Evaluator", lambda *_, **__: fake)
    _, found = calibrated(problem, 4, seed=0, say=lambda _: None, is_traced=True)
    assert (len(fake.plans), len(found.plans)) == (4, 2)
    assert (fake.protocol.num_traced, fake.protocol.min_rounds, fake.protocol.max_rounds) == (1, 3, 3)
    surveys = draw_spread(problem, Simulator(problem), np.random.default_rng(0), 2)
    for plan, row in zip(fake.plans, problem.grouping.expand(surveys), strict=False):
        assert plan.devices.tolist() == row.tolist()
    before = found
    fake.plans = []
    calibrated(problem, 4, seed=0, say=lambda _: None, is_traced=True, before=before)
    assert fake.plans == []  # nothing is measured again


def test_too_few_that_ran_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    monkeypatch.setattr(calibration, "Evaluator", lambda *_, **__: _Failing(4))
    with pytest.raises(RunnerError, match="5 of 9 placements could be measured, 6 are needed"):
        calibrated(problem, 9, seed=0, say=lambda _: None)


def test_on_a_slow_machine_it_is_cut_short_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3, 1e6))
    monkeypatch.setattr(calibration.time, "monotonic", lambda: 100.0)
    for rounds, most_s, words in ((2, 7.0, 1), (5, 7.0, 0)):
        said: list[str] = []
        fake = _Failing(0, rounds)
        monkeypatch.setattr(calibration, "Evaluator", lambda *_, fake=fake, **__: fake)
        calibrated(problem, 9, seed=0, say=said.append, most_s=most_s)
        assert fake.deadline_s == 107.0
        assert said.count("the machine is slow: calibration was cut short, after 2 of 5 rounds") == words


def test_a_machine_that_is_disturbed_as_a_whole_is_told_by_its_level_and_not_by_its_launches() -> None:
    """Steps take 2.2 times as long as their ops and transfers, give or take a tenth: no factor explains that, and the
    fit ranks other plans as the truth does."""
    problem = on_cores(random_problem(np.random.default_rng(3), 30, plain_host(2, 1e6)))
    told, noise = traced(problem, problem, 6), np.random.default_rng(0)
    outcomes = [
        dataclasses.replace(one, step_time_s=one.step_time_s * 2.2 * noise.lognormal(0.0, 0.1)) for one in told.outcomes
    ]
    prior = dataclasses.replace(WIDE, dispatch_s=float(problem.costs.op_time_s.mean()) / 20, dispatch=1.0)
    scales = calibrate_on(Known(problem, told.plans, outcomes), prior).posterior.scales
    assert scales.level == pytest.approx(2.2, rel=0.2)
    unseen = known(problem, problem, 40)
    found = Simulator(calibrate_on(Known(problem, told.plans, outcomes), prior).posterior.problem, threads=1)
    guessed = [found.retime(plan).step_time_s for plan in unseen.plans]
    assert spearmanr(guessed, step_times(unseen.outcomes)).statistic > 0.9
