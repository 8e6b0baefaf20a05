"""What was learned, in words: a line of each kind, and none where nothing was."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem, paired_host

from rlplace.measure.host_model import Posterior, Prior, Scales, describe

PRIOR = Prior(dispatch_s=4e-6, dispatch=0.5, corun_deviation=0.5, corun=0.05)


def pooled_scales() -> Scales:
    """Two devices that share a memory, and a dispatcher: every kind of factor."""
    problem = learnable_problem(paired_host(2), 8)
    devices = tuple(replace(device, memory_pool="ram") for device in problem.host.devices)
    return Scales(replace(problem, host=replace(problem.host, devices=devices)), PRIOR)


SCALES = pooled_scales()


def learned(factors: dict[tuple[str, str], float], deviation: float = 0.01) -> Posterior:
    """A posterior with these means, that sure of them; the others are as in the prior."""
    mean, deviations = np.zeros(len(SCALES)), np.array(SCALES.deviation)
    for place, item in enumerate(SCALES.items):
        if (item.kind, item.name) in factors:
            mean[place], deviations[place] = math.log(factors[item.kind, item.name]), deviation
    assert np.count_nonzero(mean) == len(factors)
    return Posterior(SCALES, mean, np.diag(deviations))


@pytest.mark.parametrize(
    ("kind", "name", "factor", "line"),
    [
        ("device", "d1", 1.04, "d1 is 4 % slower than given (2 to 6 %)"),
        ("device", "d1", 0.9, "d1 is 10 % faster than given (8 to 12 %)"),
        ("op type", "aten.mm on any", 1.6, "aten.mm on any takes 1.6 times as long as given (1.6 to 1.6)"),
        ("op type", "aten.mm on any", 20.4, "aten.mm on any takes 20 times as long as given (20 to 21)"),
        ("bandwidth", "d0>d1", 0.7, "d0>d1 has 0.7 of the bandwidth given (0.69 to 0.71)"),
        ("latency", "d1>d0", 2.0, "d1>d0 has 2 times the latency given (2 to 2)"),
        ("overhead", "every op", 2.0, "an op takes 10.0 us longer than given (9.8 to 10.2 us)"),
        ("dispatch", "every launch", 0.5, "a launch takes 2.0 us (2.0 to 2.0 us)"),
        (
            "co-run",
            "devices that share memory",
            2.0,
            "a busy device slows another that shares its memory by 10 % (10 to 10 %)",
        ),
    ],
)
def test_a_line_of_each_kind(kind: str, name: str, factor: float, line: str) -> None:
    assert describe(learned({(kind, name): factor})) == [line]


def test_nothing_learned_is_not_worth_a_line() -> None:
    assert describe(Posterior.prior(SCALES)) == []
    assert describe(learned({("device", "d1"): 1.04}, 0.03)) == []


def test_the_surest_comes_first_and_not_too_many_come() -> None:
    posterior = learned({("device", "d0"): 1.05, ("device", "d1"): 0.8, ("bandwidth", "d0>d1"): 2.0})
    names = [line.split()[0] for line in describe(posterior)]
    assert names == ["d0>d1", "d1", "d0"]
    assert describe(posterior, most=1) == describe(posterior)[:1]
    assert describe(posterior, most=0) == []
