"""The normal distribution of factors: its precision by hand, and what is drawn from it."""

from __future__ import annotations

import numpy as np
from host_models import learnable_problem, paired_host

from rlplace.measure.host_model import Posterior, Prior, Scales

SCALES = Scales(learnable_problem(paired_host(2), 8), Prior(op_type=0.5, device=0.1, overhead_s=0.1, latency=0.0))


def test_the_prior_is_what_the_scales_say() -> None:
    prior = Posterior.prior(SCALES)
    np.testing.assert_array_equal(prior.root @ prior.root.T, np.diag(SCALES.deviation**2))
    np.testing.assert_array_equal(prior.deviation, SCALES.deviation)
    assert not prior.mean.any()
    assert prior.loss == 0.0


def test_measurements_add_to_the_precision() -> None:
    """A residual that changes by 3 for a deviation of one factor, and by 4 for one of another: 1 + 5^2 along (3, 4)."""
    slopes = np.zeros((1, len(SCALES)))
    slopes[0, [0, 4]] = 3.0, 4.0
    mean = np.arange(len(SCALES)) / 10
    posterior = Posterior.of(SCALES, mean, slopes, 2.5)
    expected = np.eye(len(SCALES))
    expected[np.ix_([0, 4], [0, 4])] -= np.array([[9.0, 12.0], [12.0, 16.0]]) / 26  # Sherman-Morrison
    expected *= np.outer(SCALES.deviation, SCALES.deviation)
    np.testing.assert_allclose(posterior.root @ posterior.root.T, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(posterior.deviation**2, np.diag(expected), rtol=1e-12)
    assert posterior.mean is mean
    assert posterior.loss == 2.5


def test_draws_have_the_mean_and_the_covariance() -> None:
    generator = np.random.default_rng(0)
    slopes = generator.normal(size=(3, len(SCALES)))
    mean = 0.1 * generator.normal(size=len(SCALES))
    posterior = Posterior.of(SCALES, mean, slopes)
    bandwidths = [place for place, item in enumerate(SCALES.items) if item.kind == "bandwidth"]
    given = np.array([link.bandwidth_bytes_per_s for link in SCALES.problem.host.links])
    logs = []
    for _ in range(4000):
        drawn = posterior.draw(generator)
        logs.append(np.log([link.bandwidth_bytes_per_s for link in drawn.host.links] / given))
    covariance = (posterior.root @ posterior.root.T)[np.ix_(bandwidths, bandwidths)]
    np.testing.assert_allclose(np.mean(logs, axis=0), mean[bandwidths], atol=4 * SCALES.prior.bandwidth / 4000**0.5)
    np.testing.assert_allclose(np.cov(np.array(logs).T), covariance, atol=0.1 * SCALES.prior.bandwidth**2)


def test_the_problem_is_that_of_the_mean_and_draws_repeat() -> None:
    posterior = Posterior.of(SCALES, np.full(len(SCALES), 0.2), np.zeros((0, len(SCALES))))
    expected = SCALES.apply(np.full(len(SCALES), 0.2))
    np.testing.assert_array_equal(posterior.problem.costs.op_time_s, expected.costs.op_time_s)
    assert posterior.problem.host == expected.host
    one, other = (posterior.draw(np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(one.costs.op_time_s, other.costs.op_time_s)
    assert one.host == other.host != expected.host
