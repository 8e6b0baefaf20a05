"""`propose`: placements of a problem that nothing was tried on yet, the best guess first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.env.schedule_batch import ListSchedules, Pair
from rlplace.measure.problem import Problem
from rlplace.policy.schedule.network import ScheduleNetwork, problem_summary

POOL_WORK = 2_000_000
"""Devices of ops that are looked at to rank components by the schedules that they lead to ..."""
LEAST_POOL = 8
"""... but so many schedules are made in any case."""
VARIATION, LEAST_WEIGHT = 0.4, 0.3
"""Standard deviation of a weight that is varied, as a share of it, or of this where it is smaller."""
_TRIES = 8


@dataclass(frozen=True, eq=False)
class Proposals:
    """Guesses, the best first; no two are the same placement.

    Attributes:
        pairs: the grouping and weights of each.
        devices: (k, N) int32.
        log_times: (k,) float64, expected log step time.
    """

    pairs: tuple[Pair, ...]
    devices: NDArray[np.int32]
    log_times: NDArray[np.float64]


def propose(
    problem: Problem,
    network: ScheduleNetwork,
    count: int,
    *,
    schedules: ListSchedules | None = None,
    is_ranked: bool = True,
    seed: int = 0,
) -> Proposals:
    """Up to `count` placements; fewer where even varied weights lead to no others.

    The gate says which components suit the problem; of those, as many as time allows are scheduled, and the ranker says
    what the simulator would make of the schedules. The first guess is the best by it, each further one is the one
    that adds most to the best of all, given which components failed together in training. Then weights are varied.
    Nothing is simulated.

    Args:
        problem: what is placed.
        network: guesses.
        count: most placements.
        schedules: of the problem, where they are laid out already.
        is_ranked: False leaves the ranker out: the gate alone decides.
        seed: of varied weights.
    """
    schedules = schedules or ListSchedules(problem)
    summary = torch.from_numpy(problem_summary(problem))
    with torch.no_grad():
        expected = network.component_scores(summary).double().numpy()
    components, scenarios = network.components, network.scenarios.double().numpy()
    places = choose(expected, scenarios, max(count, pool_size(problem)) if is_ranked else count)
    pairs = [components.pair(place) for place in places]
    devices = schedules.place(pairs)
    numbered = {row.tobytes(): place for place, row in reversed(list(enumerate(devices)))}
    first = sorted(numbered.values())  # of equal placements the first
    pairs, devices, places = [pairs[row] for row in first], devices[first], [places[row] for row in first]
    if is_ranked:
        expected = rank(network, summary, schedules, devices)
        order = choose(expected, scenarios[:, places], count)
        pairs, devices, expected = [pairs[row] for row in order], devices[order], expected[order]
    else:
        expected = expected[places]
    found = Proposals(tuple(pairs[:count]), devices[:count], expected[:count])
    if len(found.pairs) == count:
        return found
    return _varied(found, network, summary, schedules, count, np.random.default_rng(seed))


def pool_size(problem: Problem) -> int:
    """Components that are scheduled for a first guess: fewer where graphs are large, so that it takes no longer."""
    return max(LEAST_POOL, POOL_WORK // max(problem.graph.num_ops * problem.host.num_devices, 1))


def rank(
    network: ScheduleNetwork, summary: torch.Tensor, schedules: ListSchedules, devices: NDArray[np.int32]
) -> NDArray[np.float64]:
    """(B,) float64 expected log step times of placements (B, N)."""
    estimates = torch.from_numpy(schedules.estimate(devices))
    with torch.no_grad():
        return np.asarray(network.log_times(estimates, summary.expand(len(devices), -1)).double().numpy())


def choose(expected: NDArray[np.float64], scenarios: NDArray[np.float64], count: int) -> list[int]:
    """Places of up to `count` guesses, each the one with which the best of those chosen is expected to be least.

    The first is the least of `expected`. Over S scenarios a guess takes what is expected and what it was off by
    there; without scenarios guesses come by what is expected alone. Ties go by it, then by index.

    Args:
        expected: (M,) log step times.
        scenarios: (S, M) by how much they were missed.
        count: most guesses.
    """
    order = np.argsort(expected, kind="stable")
    if not len(scenarios):
        return [int(place) for place in order[:count]]
    times = expected[order] + scenarios[:, order]
    chosen, least, is_left = [0], times[:, 0].copy(), np.ones(len(order), dtype=np.bool_)
    is_left[0] = False
    while len(chosen) < min(count, len(order)):
        value = np.where(is_left, np.minimum(least[:, None], times).mean(axis=0), np.inf)
        chosen.append(int(value.argmin()))
        is_left[chosen[-1]] = False
        least = np.minimum(least, times[:, chosen[-1]])
    return [int(order[place]) for place in chosen]


def vary(pairs: tuple[Pair, ...], generator: np.random.Generator) -> list[Pair]:
    """Each pair with about half of its weights varied, over its own grouping."""
    made: list[Pair] = []
    for name, weights in pairs:
        base = np.array(weights)
        scale = VARIATION * np.maximum(np.abs(base), LEAST_WEIGHT) * (generator.random(len(base)) < 0.5)
        made.append((name, tuple((base + generator.normal(size=len(base)) * scale).tolist())))
    return made


def _varied(
    found: Proposals,
    network: ScheduleNetwork,
    summary: torch.Tensor,
    schedules: ListSchedules,
    count: int,
    generator: np.random.Generator,
) -> Proposals:
    """`found`, then placements of varied weights, the best guesses of each round first."""
    pairs, rows, log_times = list(found.pairs), list(found.devices), found.log_times.tolist()
    seen = {row.tobytes() for row in rows}
    for _ in range(_TRIES):
        fresh: list[tuple[Pair, NDArray[np.int32]]] = []
        varied = vary(found.pairs, generator)
        for pair, row in zip(varied, schedules.place(varied), strict=True):
            if row.tobytes() not in seen:
                seen.add(row.tobytes())
                fresh.append((pair, row))
        if not fresh:
            continue
        expected = rank(network, summary, schedules, np.stack([row for _, row in fresh]))
        for place in np.argsort(expected, kind="stable")[: count - len(pairs)].tolist():
            pairs.append(fresh[place][0])
            rows.append(fresh[place][1])
            log_times.append(float(expected[place]))
        if len(pairs) == count:
            break
    return Proposals(tuple(pairs), np.stack(rows), np.array(log_times))
