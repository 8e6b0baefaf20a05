"""What fits make of odd measurements: failed ones, few, ones beyond memory, and figures that are none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans

from rlplace.errors import InvalidValue
from rlplace.measure.host_model import FitConfig, HostModel, Posterior, Prior, Scales
from rlplace.measure.problem import Plan

SCALES = Scales(learnable_problem(paired_host(2), 12), Prior(overhead_s=0.1))


def measured(count: int = 9, slower: float = 1.5) -> tuple[list[Plan], np.ndarray]:
    """Plans, and their times on a host that is slower by one factor."""
    plans = varied_plans(SCALES.problem, np.random.default_rng(0), count)
    return plans, slower * step_times(SCALES.problem, plans)


def is_prior(posterior: Posterior) -> bool:
    return not posterior.mean.any() and np.array_equal(posterior.deviation, SCALES.deviation)


def test_nothing_measured_is_the_prior() -> None:
    model = HostModel(SCALES)
    assert is_prior(model.fit())
    assert model.num_measured == 0
    assert model.held_out_errors() == (0.0, 0.0)


def test_what_failed_teaches_nothing() -> None:
    plans, times_s = measured()
    model, alone = HostModel(SCALES), HostModel(SCALES)
    model.add(plans[:3], [math.inf] * 3)
    assert model.num_measured == 0
    assert is_prior(model.fit())
    model.add([*plans, plans[0]], [*times_s, math.inf])
    alone.add(plans, times_s)
    assert model.num_measured == 9
    np.testing.assert_array_equal(model.fit().mean, alone.fit().mean)


def test_plans_that_are_simulated_beyond_memory_teach_nothing() -> None:
    """They ran: the model of memory is wrong, not the times of the others."""
    plans, times_s = measured(12)
    host = SCALES.problem.host
    devices = (host.devices[0], replace(host.devices[1], memory_bytes=1))
    tight = Scales(replace(SCALES.problem, host=replace(host, devices=devices)), SCALES.prior)
    fits = [plan for plan in plans if not plan.devices.any()]
    assert not fits
    plans = [
        *plans,
        replace(
            plans[0],
            devices=np.zeros(12, dtype=np.int32),
            transfer_tensor=np.zeros(0, np.int32),
            transfer_destination=np.zeros(0, np.int32),
            sequence=np.arange(12, dtype=np.int32),
        ),
    ]
    model = HostModel(tight)
    model.add(plans[:12], times_s)
    assert not model.fit().mean.any()
    model.add(plans[12:], [1.5 * step_times(SCALES.problem, plans[12:])[0]])
    assert model.fit().mean.any()
    assert np.isfinite(model.held_out_errors()).all()


def test_a_fit_that_has_not_seen_a_plan_predicts_it_better_than_the_prior() -> None:
    plans, times_s = measured(30)
    model = HostModel(SCALES)
    model.add(plans, times_s)
    of_prior, of_fits = model.held_out_errors()
    nominal = SCALES.apply(np.zeros(len(SCALES)))
    assert of_prior == pytest.approx(np.abs(np.log(step_times(nominal, plans) / times_s)).mean())
    assert 0 < of_fits < 0.2 * of_prior


def test_fewer_plans_than_folds_are_not_held_out() -> None:
    model = HostModel(SCALES)
    model.add(*measured(2))
    assert model.held_out_errors(folds=3) == (0.0, 0.0)
    assert model.held_out_errors(folds=2) != (0.0, 0.0)


def test_noise_weighs_measurements() -> None:
    plans, times_s = measured(1)
    shares = []
    for noise in (0.001, 10.0):
        model = HostModel(SCALES, FitConfig(misfit=0.0, far=0.0))
        model.add(plans, times_s, [noise])
        shares.append(
            np.log(step_times(model.fit().problem, plans) / step_times(SCALES.apply(0 * SCALES.deviation), plans))
        )
    assert shares[0] == pytest.approx(np.log(times_s / step_times(SCALES.apply(0 * SCALES.deviation), plans)), abs=1e-3)
    assert abs(shares[1][0]) < 0.01


def test_far_plans_weigh_less_than_those_near_the_fastest() -> None:
    """One plan twice: it cannot take both, and is believed where it was fast."""
    plans, times_s = measured(1)
    model = HostModel(SCALES)
    model.add([plans[0], plans[0]], [times_s[0], 2 * times_s[0]])
    found = step_times(model.fit().problem, plans)[0]
    assert abs(math.log(found / times_s[0])) < 0.2 * math.log(2)


@pytest.mark.parametrize("noise", [0.0, 0.03, 1.0])
def test_a_plan_is_expected_to_take_what_a_fit_says_corrected_as_far_as_noise_allows(noise: float) -> None:
    """The fit is that of nothing: of what it misses, the mean square but for the noise is no noise."""
    plans, _ = measured(4)
    said_s, missed = step_times(SCALES.problem, plans), np.array([0.02, 0.04, 0.02, 0.04])
    times_s = said_s.min() * np.exp(missed)
    known = Posterior.prior(SCALES)
    fitted_s = step_times(known.problem, plans)
    model = HostModel(SCALES)
    model.add(plans, times_s, [noise] * 4)
    found = model.expected_s(known)
    away = np.log(times_s / fitted_s)
    share = {0.0: 1.0, 0.03: 1 - 0.03**2 / np.mean(away**2), 1.0: 0.0}[noise]
    assert [found[plan.fingerprint] for plan in plans] == pytest.approx((fitted_s * np.exp(share * away)).tolist())


def test_of_a_plan_that_was_measured_again_the_mean_is_expected() -> None:
    plans, times_s = measured(2)
    model = HostModel(SCALES)
    model.add([*plans, plans[0]], [*times_s, 1.21 * times_s[0]], [0.0] * 3)
    found = model.expected_s(Posterior.prior(SCALES))
    assert found[plans[0].fingerprint] == pytest.approx(1.1 * times_s[0])
    assert found[plans[1].fingerprint] == pytest.approx(times_s[1])
    assert HostModel(SCALES).expected_s(Posterior.prior(SCALES)) == {}


def test_what_is_said_to_be_exact_does_not_divide_by_nothing() -> None:
    plans, times_s = measured(3)
    model = HostModel(SCALES, FitConfig(noise=0.0, misfit=0.0, far=0.0, sharpness=1e9))
    model.add(plans, times_s)
    np.testing.assert_allclose(step_times(model.fit().problem, plans), times_s, rtol=1e-6)


@pytest.mark.parametrize("times_s", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_times_are_positive_and_one_for_each_plan(times_s: list[float]) -> None:
    model = HostModel(SCALES)
    with pytest.raises(InvalidValue, match="step_times_s"):
        model.add(measured(2)[0], times_s)
    assert model.num_measured == 0


@pytest.mark.parametrize("noise", [[0.1], [0.1, -0.1], [0.1, math.nan], [0.1, math.inf]])
def test_noise_is_one_number_for_each_plan(noise: list[float]) -> None:
    with pytest.raises(InvalidValue, match="noise"):
        HostModel(SCALES).add(*measured(2), noise)


def test_a_plan_of_another_problem_changes_nothing() -> None:
    plans, times_s = measured()
    model = HostModel(SCALES)
    model.add(plans, times_s)
    before = model.fit().mean
    other = varied_plans(learnable_problem(paired_host(2), 13), np.random.default_rng(0), 1)
    with pytest.raises(InvalidValue):
        model.add(other, [1.0])
    assert model.num_measured == 9
    np.testing.assert_allclose(model.fit().mean, before, atol=0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise", -0.1),
        ("misfit", math.nan),
        ("far", math.inf),
        ("tolerance", -1.0),
        ("max_rounds", 0),
        ("max_iterations", 0),
        ("paths", 0),
        ("restarts", -1),
        ("sharpness", 0.0),
        ("sharpness", math.nan),
    ],
)
def test_a_configuration_is_checked(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        FitConfig(**{name: value})  # type: ignore[arg-type]
