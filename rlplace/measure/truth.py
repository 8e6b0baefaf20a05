"""A hidden truth: a problem whose costs and links are off by drawn factors, and a timer that measures on it.

The problem that methods know is the *nominal* one. They submit plans; the true step time of a plan is its simulated one
on the *true* problem, and they are told that with noise.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, check_known
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.records import Seed, record

NOISE = 0.01
"""Standard deviation of the logarithm of a measured step time."""


@dataclass(frozen=True)
class Spread:
    """How far a kind of truth is from the nominal problem."""

    target_sigma: float
    """Log standard deviation of a factor for each pair of an op's target and a kind of device."""
    bandwidth_range: float
    """Largest factor on a link's bandwidth, and its inverse the least; uniform in the logarithm."""
    device_sigma: float
    """Log standard deviation of a factor for each device."""
    overhead_s: tuple[float, float]
    """Least and most seconds that every op takes longer; uniform."""
    signature_sigma: float | None = None
    """Log standard deviation of a factor for each pair of an op's signature and a kind of device."""
    latency_range: float | None = None
    """Largest factor on a link's latency, and its inverse the least; uniform in the logarithm."""


KINDS: Mapping[str, Spread] = {
    "moderate": Spread(0.3, 2.0, 0.0, (1e-6, 8e-6)),
    "hard": Spread(0.6, 3.0, 0.15, (1e-6, 20e-6)),
    "misfit": Spread(0.6, 3.0, 0.15, (1e-6, 20e-6), signature_sigma=0.25, latency_range=3.0),
}
"""In a misfit, op times and latencies differ in ways that no factor per op type, link or device describes."""


@record(frozen=True)
class Truth:
    """The kind and the seed that a true problem is drawn from.

    Raises:
        UnknownName: no such kind.
        InvalidValue: a seed out of range.
    """

    kind: str
    """A name of `KINDS`."""
    seed: Seed
    """Of the draws, and of the noise of measurements."""

    def __post_init__(self) -> None:
        check_known("kind of truth", self.kind, KINDS)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.kind}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Truth:
        """The truth that `KIND:SEED` names.

        Raises:
            UnknownName: no such kind.
            InvalidValue: no seed, or one out of range.

        >>> Truth.parse("hard:3")
        Truth(kind='hard', seed=3)
        """
        kind, _, seed = text.partition(":")
        check_known("kind of truth", kind, KINDS)
        if not re.fullmatch(r"-?[0-9]{1,10}", seed):
            raise InvalidValue("truth", text, f"a kind, a colon and a whole number, such as {kind}:0", where="compare")
        return cls(kind, int(seed))


def check_no_gangs(host: Host) -> None:
    """Nothing, if the host has none.

    Raises:
        InvalidValue: it has gangs.
    """
    if gangs := [device.name for device in host.devices if device.members]:
        raise InvalidValue(
            "devices",
            gangs,
            "none that are gangs",
            where="truth",
            hint="An op's time on a gang is none of a device's own.",
        )


def true_problem(problem: Problem, truth: Truth) -> Problem:
    """The problem as it really is: other op times, bandwidths and, in a misfit, latencies; all else is the same.

    One generator draws one array for each figure, in the order of `true_problems`. Sources take no time and keep none.

    Args:
        problem: the nominal one.
        truth: kind and seed.

    Raises:
        InvalidValue: the host has gangs, whose op times are no device's own.
    """
    return true_problems([problem], truth)[0]


def true_problems(problems: Sequence[Problem], truth: Truth) -> list[Problem]:
    """Several workloads on one host, as it really is: their common figures are off by the same factors.

    Args:
        problems: the nominal ones, at least one, all on the same host.
        truth: kind and seed; with other problems beside it, it gives a problem other factors.

    Raises:
        InvalidValue: the host has gangs, or the problems are not on one host.
    """
    host = problems[0].host
    check_no_gangs(host)
    for problem in problems:
        if problem.host != host:
            raise InvalidValue("host", problem.host.name, f"{host.name}, as of the first problem", where="truth")
    spread = KINDS[truth.kind]
    generator = np.random.Generator(np.random.PCG64(truth.seed))
    kinds, runs = [device.kind for device in host.devices], [~problem.graph.is_source for problem in problems]
    targets = _factors(generator, [problem.graph.targets for problem in problems], kinds, runs, spread.target_sigma)
    bandwidth = _of_links(generator, spread.bandwidth_range, host)
    devices = generator.lognormal(0.0, spread.device_sigma, len(kinds))
    overhead_s = generator.uniform(*spread.overhead_s)
    signatures = [np.ones_like(factors) for factors in targets]
    if spread.signature_sigma is not None:
        words = [problem.graph.signatures for problem in problems]
        signatures = _factors(generator, words, kinds, runs, spread.signature_sigma)
    latency = {} if spread.latency_range is None else _of_links(generator, spread.latency_range, host)
    links = tuple(
        dataclasses.replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth[link.name],
            latency_s=link.latency_s * latency.get(link.name, 1.0),
        )
        for link in host.links
    )
    costs, true_host = [problem.costs for problem in problems], dataclasses.replace(host, links=links)
    times_s = (
        np.where(is_run[:, None], each.op_time_s * of_targets * devices * of_signatures + overhead_s, each.op_time_s)
        for each, is_run, of_targets, of_signatures in zip(costs, runs, targets, signatures, strict=True)
    )
    true_costs = [dataclasses.replace(each, op_time_s=time_s) for each, time_s in zip(costs, times_s, strict=True)]
    pairs = zip(problems, true_costs, strict=True)
    return [dataclasses.replace(problem, host=true_host, costs=costs) for problem, costs in pairs]


class TrueTimer:
    """Measures plans on a true problem: the simulator's word for exactly this plan, times noise drawn for each.

    Every measurement has its number and its own draw, also one that does not fit into memory or repeats a plan.

    Attributes:
        num_measured: measurements so far.

    Args:
        problem: the true one.
        seed: of the noise.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self.num_measured = 0
        self._simulator = Simulator(problem, threads=1)
        self._seed = seed

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """One `Measurement` for each plan, of a single sample; `oom` where it does not fit into memory.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        return [self._noisy(self._simulator.retime(plan)) for plan in plans]

    def truth(self, plan: Plan) -> Measurement:
        """The plan without noise, for the judge alone; it is no measurement that counts.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        return self._simulator.retime(plan)

    def _noisy(self, outcome: Measurement) -> Measurement:
        generator = np.random.Generator(np.random.PCG64([self._seed, self.num_measured]))
        self.num_measured += 1
        if not outcome.ok:
            return outcome
        step_time_s = outcome.step_time_s * float(generator.lognormal(0.0, NOISE))
        return dataclasses.replace(outcome, step_time_s=step_time_s, samples_s=(step_time_s,))


def _factors(
    generator: np.random.Generator,
    words: Sequence[Sequence[str]],
    kinds: Sequence[str],
    runs: Sequence[NDArray[np.bool_]],
    sigma: float,
) -> list[NDArray[np.float64]]:
    """For each graph (N, D) a factor for each pair of a word of an op and a kind of device; 1 for sources.

    Drawn in the order of the pairs of all graphs.

    Args:
        generator: of the draws.
        words: of each graph's ops, (N,).
        kinds: of devices, (D,).
        runs: of each graph (N,) False for sources.
        sigma: log standard deviation of the factors.
    """
    every = zip(words, runs, strict=True)
    run = {word for of_ops, is_run in every for word, is_one in zip(of_ops, is_run, strict=True) if is_one}
    pairs = sorted({(word, kind) for word in run for kind in kinds})
    drawn = dict(zip(pairs, generator.lognormal(0.0, sigma, len(pairs)).tolist(), strict=True))
    return [np.array([[drawn.get((word, kind), 1.0) for kind in kinds] for word in of_ops]) for of_ops in words]


def _of_links(generator: np.random.Generator, largest: float, host: Host) -> dict[str, float]:
    """A factor from 1 / `largest` to `largest` for each link by name, drawn in the order of names."""
    names = sorted(link.name for link in host.links)
    drawn = np.exp(generator.uniform(-np.log(largest), np.log(largest), len(names)))
    return dict(zip(names, drawn.tolist(), strict=True))
