"""What other workloads taught about a host is where the next one starts: by hand, and on a host that is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans

from rlplace.measure.host_model import (
    HostKnowledge,
    HostModel,
    LearnedHost,
    Posterior,
    Prior,
    Scales,
    knowledge_of,
)
from rlplace.measure.host_model.carried import CARRIED
from rlplace.measure.host_model.knowledge import Kind, KnownFactor
from rlplace.measure.host_model.learned_host import LearnedFactor

PRIOR = Prior(op_type=0.5, device=0.2, bandwidth=1.0, latency=0.0, overhead_s=0.1)


def learned(*factors: LearnedFactor) -> LearnedHost:
    return LearnedHost("two", "0", "estimated", PRIOR, factors, ())


def seen(
    log: float, noise: float, *, kind: Kind = "bandwidth", mean: float = 0.0, median: float = 0.0
) -> LearnedFactor:
    """The posterior of a factor with deviation 1 around `mean` beforehand, seen once as `log` with `noise`."""
    variance = 1.0 / (1.0 + 1.0 / noise**2)
    return LearnedFactor(kind, "x", variance * (mean + log / noise**2), math.sqrt(variance), 1.0, median, mean)


def test_one_run_is_carried_with_what_differs_between_workloads() -> None:
    knowledge = knowledge_of([learned(seen(2.0, 0.1))], "given")
    assert knowledge is not None
    known = knowledge.factors["bandwidth", "x"]
    assert known.mean == pytest.approx(2.0)
    assert known.variance == pytest.approx(0.1**2 + 2 * CARRIED**2)
    mean, deviation = knowledge.prior_of("bandwidth", "x", 1.0, 0.0)
    share = 1.0 / (1.0 + known.variance)
    assert mean == pytest.approx(2.0 * share)
    assert deviation == pytest.approx(math.sqrt(known.variance * share))
    assert knowledge.prior_of("bandwidth", "y", 1.0, 0.0) == (0.0, 1.0)


def test_what_a_run_was_told_beforehand_does_not_count_again() -> None:
    alone = knowledge_of([learned(seen(2.0, 0.1))], "estimated")
    taught = knowledge_of([learned(seen(2.0, 0.1, mean=1.5))], "estimated")
    assert alone is not None
    assert taught is not None
    assert taught.factors["bandwidth", "x"].mean == pytest.approx(alone.factors["bandwidth", "x"].mean)
    assert taught.factors["bandwidth", "x"].variance == pytest.approx(alone.factors["bandwidth", "x"].variance)


def test_runs_are_weighed_by_how_sure_they_are() -> None:
    knowledge = knowledge_of([learned(seen(1.0, 1e-6)), learned(seen(3.0, CARRIED))], "estimated")
    assert knowledge is not None
    assert knowledge.num_runs == 2
    assert knowledge.factors["bandwidth", "x"].mean == pytest.approx((2 * 1.0 + 3.0) / 3)


def test_a_factor_on_a_figure_of_the_prior_is_carried_as_that_figure() -> None:
    knowledge = knowledge_of([learned(seen(math.log(2.0), 1e-6, kind="overhead", median=5e-6))], "estimated")
    assert knowledge is not None
    mean, _ = knowledge.prior_of("overhead", "x", 1e3, 1e-5)
    assert math.exp(mean) * 1e-5 == pytest.approx(1e-5)
    assert knowledge.prior_of("overhead", "x", 1.0, 0.0) == (0.0, 1.0)


def test_what_hardly_anything_was_learned_of_and_costs_of_another_kind_tell_nothing() -> None:
    assert knowledge_of([learned(seen(2.0, 4.0))], "estimated") is None
    assert knowledge_of([learned(seen(2.0, 0.1))], "profiled") is None
    assert knowledge_of([], "estimated") is None


def test_knowledge_is_the_prior_of_the_model_and_is_kept_with_what_it_learned() -> None:
    problem = learnable_problem(paired_host(2))
    known = HostKnowledge({("bandwidth", "d0>d1"): KnownFactor(1.0, 0.01), ("device", "d9"): KnownFactor(1.0, 0.01)})
    scales = Scales(problem, PRIOR, known)
    place = int(scales.bandwidth_at[0])
    prior = Posterior.prior(scales)
    assert prior.mean[place] == pytest.approx(1.0 / 1.01)
    assert np.count_nonzero(prior.mean) == 1
    assert prior.problem.host.links[0].bandwidth_bytes_per_s == pytest.approx(
        problem.host.links[0].bandwidth_bytes_per_s * math.exp(1.0 / 1.01)
    )
    plans = varied_plans(problem, np.random.default_rng(0), 3)
    model = HostModel(scales)
    assert model.fit().mean.tolist() == prior.mean.tolist()
    model.add(plans, step_times(prior.problem, plans))
    assert model.fit().loss == pytest.approx(0.0, abs=1e-6)
    (kept,) = (factor for factor in LearnedHost.of(model.fit()).factors if factor.name == "d0>d1")
    assert (kept.prior_mean, kept.prior_deviation) == (scales.mean[place], scales.deviation[place])


def test_a_second_workload_predicts_better_with_what_the_first_one_taught() -> None:
    generator = np.random.default_rng(1)
    first = learnable_problem(paired_host(3), seed=1)
    second = replace(learnable_problem(paired_host(3), num_ops=30, seed=2))
    hidden = Scales(first, PRIOR)
    x = hidden.deviation * generator.standard_normal(len(hidden))
    plans = varied_plans(first, generator, 30)
    model = HostModel(hidden)
    model.add(plans, step_times(hidden.apply(x), plans))
    knowledge = knowledge_of([LearnedHost.of(model.fit())], second.costs.source)
    assert knowledge is not None
    assert [item.name for item in Scales(second, PRIOR).items] == [item.name for item in hidden.items]
    unseen = varied_plans(second, generator, 20)
    true_s = step_times(Scales(second, PRIOR).apply(x), unseen)

    def error(scales: Scales) -> float:
        return float(np.mean(np.abs(np.log(step_times(Posterior.prior(scales).problem, unseen) / true_s))))

    assert error(Scales(second, PRIOR, knowledge)) < 0.5 * error(Scales(second, PRIOR))
