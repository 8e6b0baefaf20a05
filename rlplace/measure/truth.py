"""A hidden truth: a problem whose costs and links are off by drawn factors, and a timer that measures on it.

The problem that methods know is the *nominal* one. They submit plans; the true step time of a plan is its simulated one
on the *true* problem, and they are told that with noise. A traced measurement also says when every op and transfer of
another, disturbed step of the plan began and ended.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, check_known, refuse_if
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.compiled_problem import main_producers
from rlplace.measure.simulate.simulator import Simulator
from rlplace.records import Seed, record

NOISE = 0.01
"""Standard deviation of the logarithm of a measured step time."""
OP_NOISE, COMMON_NOISE, BIAS, LINK_NOISE = 0.05, 0.03, 0.05, 0.10
"""Standard deviations of the logarithms of factors on durations in a traced step: of each op, of all ops of a step, of
each pair of a signature and a device in all traces, and of each transfer."""
OUTLIERS, OUTLIER_FACTOR = 0.01, (3.0, 10.0)
"""Share of the ops of a traced step that a disturbance makes longer, and least and most times as long."""
TRACE_OVERHEAD_S, CLOCK_OFFSET_S = (0.0, 3e-6), (-50e-6, 50e-6)
"""Least and most seconds that tracing adds to every op, and by which a device's clock is off."""


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
    corun_most: float = 0.0
    """Most share by which a busy device slows another one of the same memory; uniform, from 0."""
    moved_most: float = 1.0
    """Most times as long as an op takes where its largest input was made on another device; uniform, from 1, for each
    signature."""


KINDS: Mapping[str, Spread] = {
    "moderate": Spread(0.3, 2.0, 0.0, (1e-6, 8e-6)),
    "hard": Spread(0.6, 3.0, 0.15, (1e-6, 20e-6)),
    "misfit": Spread(0.6, 3.0, 0.15, (1e-6, 20e-6), signature_sigma=0.25, latency_range=3.0),
    "in-place": Spread(0.6, 3.0, 0.15, (1e-6, 20e-6), corun_most=0.3, moved_most=1.3),
}
"""In a misfit, op times and latencies differ in ways that no factor per op type, link or device describes;
`in-place`, they also depend on the ops beside an op and on the device that made its input."""


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
        refuse_if(
            not re.fullmatch(r"-?[0-9]{1,10}", seed),
            "truth",
            text,
            f"a kind, a colon and a whole number, such as {kind}:0",
            where="compare",
        )
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
    """The problem as it really is: other op times, bandwidths, and figures of its kind; all else is the same.

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
        refuse_if(
            problem.host != host, "host", problem.host.name, f"{host.name}, as of the first problem", where="truth"
        )
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
    true_host, found = dataclasses.replace(host, links=links), []
    if spread.corun_most and host.shares_memory.any():
        corun = np.where(host.shares_memory, generator.uniform(0.0, spread.corun_most), 0.0)
        true_host = dataclasses.replace(true_host, corun_slowdown=tuple(map(tuple, corun.tolist())))
    moved: Mapping[str, float] = {}
    if spread.moved_most > 1.0:
        every = sorted(_words([problem.graph.signatures for problem in problems], runs))
        moved = dict(zip(every, generator.uniform(1.0, spread.moved_most, len(every)).tolist(), strict=True))
    for problem, is_run, of_targets, of_signatures in zip(problems, runs, targets, signatures, strict=True):
        given_s = problem.costs.op_time_s
        op_time_s = np.where(is_run[:, None], given_s * of_targets * devices * of_signatures + overhead_s, given_s)
        costs = dataclasses.replace(problem.costs, op_time_s=op_time_s)
        if moved:
            factor = np.array([moved.get(word, 1.0) for word in problem.graph.signatures])
            costs = dataclasses.replace(costs, moved_factor=np.where(is_run, factor, 1.0))
        found.append(dataclasses.replace(problem, host=true_host, costs=costs))
    return found


class TrueTimer:
    """Measures plans on a true problem: the simulator's word for exactly this plan, times noise drawn for each.

    Every measurement has its number and its own draw, also one that does not fit into memory or repeats a plan. A trace
    is of another step than the step time: one with durations that are off by draws of its own and by some that are the
    same in all traces (`OP_NOISE` and the figures beside it), which tracing makes longer, on clocks that are off.

    Attributes:
        num_measured: measurements so far.

    Args:
        problem: the true one.
        seed: of the noise.
        is_traced: whether measurements have timelines.
    """

    def __init__(self, problem: Problem, seed: int, *, is_traced: bool = False) -> None:
        self.num_measured = 0
        self._problem, self._simulator = problem, Simulator(problem, threads=1)
        self._seed, self._is_traced = seed, is_traced
        if not is_traced:
            return
        generator, graph, host = self._generator(0, 2), problem.graph, problem.host
        self._largest = main_producers(graph)
        self._bias = _factors(generator, [graph.signatures], host.device_index, [~graph.is_source], BIAS)[0]
        self._added_s = generator.uniform(*TRACE_OVERHEAD_S)
        self._offset_s = generator.uniform(*CLOCK_OFFSET_S, host.num_devices)

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """One `Measurement` for each plan, of a single sample; `oom` where it does not fit into memory.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        return [self._noisy(plan, self._simulator.retime(plan)) for plan in plans]

    def truth(self, plan: Plan) -> Measurement:
        """The plan without noise, for the judge alone; it is no measurement that counts.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        return self._simulator.retime(plan)

    def _noisy(self, plan: Plan, outcome: Measurement) -> Measurement:
        number = self.num_measured
        self.num_measured += 1
        if not outcome.ok:
            return outcome
        step_time_s = outcome.step_time_s * float(self._generator(number).lognormal(0.0, NOISE))
        timeline = self._trace(plan, self._generator(number, 1)) if self._is_traced else None
        return dataclasses.replace(outcome, step_time_s=step_time_s, samples_s=(step_time_s,), timeline=timeline)

    def _trace(self, plan: Plan, generator: np.random.Generator) -> Timeline:
        """Starts and ends of a step of its own."""
        problem, devices, count = self._problem, plan.devices, self._problem.graph.num_ops
        ops = np.arange(count)
        moved = problem.costs.moved_factor
        seconds = problem.costs.op_time_s[ops, devices]
        if moved is not None:
            seconds = seconds * np.where(devices[self._largest] != devices, moved, 1.0)
        factor = generator.lognormal(0.0, OP_NOISE, count) * generator.lognormal(0.0, COMMON_NOISE)
        is_outlier, longer = generator.random(count) < OUTLIERS, generator.uniform(*OUTLIER_FACTOR, count)
        factor = factor * np.where(is_outlier, longer, 1.0) * self._bias[ops, devices]
        op_time_s = np.zeros_like(problem.costs.op_time_s)
        op_time_s[ops, devices] = np.where(problem.graph.is_source, 0.0, seconds * factor + self._added_s)
        disturbed = dataclasses.replace(problem, costs=Costs(op_time_s, problem.costs.source))
        sent = generator.lognormal(0.0, LINK_NOISE, plan.num_transfers)
        step, offset_s = Simulator(disturbed, threads=1).timeline(plan, sent), self._offset_s
        return dataclasses.replace(
            step,
            op_start_s=step.op_start_s + offset_s[devices],
            op_end_s=step.op_end_s + offset_s[devices],
            transfer_start_s=step.transfer_start_s + offset_s[step.transfer_destination],
            transfer_end_s=step.transfer_end_s + offset_s[step.transfer_destination],
            memory_time_s=step.memory_time_s[:0],
            memory_device=step.memory_device[:0],
            memory_bytes=step.memory_bytes[:0],
            source="measured",
        )

    def _generator(self, *words: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed, *words]))


def _words(words: Sequence[Sequence[str]], runs: Sequence[NDArray[np.bool_]]) -> set[str]:
    """The words of the ops of all graphs but of sources."""
    every = zip(words, runs, strict=True)
    return {word for of_ops, is_run in every for word, is_one in zip(of_ops, is_run, strict=True) if is_one}


def _factors(
    generator: np.random.Generator,
    words: Sequence[Sequence[str]],
    kinds: Collection[str],
    runs: Sequence[NDArray[np.bool_]],
    sigma: float,
) -> list[NDArray[np.float64]]:
    """For each graph (N, D) a factor for each pair of a word of an op and a kind of device; 1 for sources.

    Drawn in the order of the pairs of all graphs.
    """
    pairs = sorted({(word, kind) for word in _words(words, runs) for kind in kinds})
    drawn = dict(zip(pairs, generator.lognormal(0.0, sigma, len(pairs)).tolist(), strict=True))
    return [np.array([[drawn.get((word, kind), 1.0) for kind in kinds] for word in of_ops]) for of_ops in words]


def _of_links(generator: np.random.Generator, largest: float, host: Host) -> dict[str, float]:
    """A factor from 1 / `largest` to `largest` for each link by name, drawn in the order of names."""
    names = sorted(link.name for link in host.links)
    drawn = np.exp(generator.uniform(-np.log(largest), np.log(largest), len(names)))
    return dict(zip(names, drawn.tolist(), strict=True))
