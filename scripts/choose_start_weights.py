"""Chooses the list of weights that small budgets begin with, on development problems that no benchmark uses.

python scripts/choose_start_weights.py    # prints `FIRST_WEIGHTS` of rlplace/search/improve/starting_points.py

Reduced training steps of six workloads, and of two networks unrolled over steps, on random hosts of 2 to 8 devices.
Weights are drawn, those that do best together are varied, and of all over every grouping, one after the other is taken
with which the best of those taken so far is best in the geometric mean. About five minutes on one core; the same list
every time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from unrolled_networks import UNROLLED, unrolled_graph_of

from rlplace.measure import Problem, Simulator
from rlplace.search.improve.starting_points import GROUPINGS, Schedulers

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import learn_dev

WORKLOADS = (*learn_dev.WORKLOADS, *UNROLLED)

SEEDS = range(72)
"""Of the hosts; those from 72 to 99 are kept to judge the list on."""
DRAWN, BASES, VARIED, LISTED = 300, 24, 200, 16
"""Weights that are drawn, those of them that are varied, their variations, and the length of the list."""
RANGES = np.array([2.5, 2.5, 4.0, 6.0, 5.0, 1.0, 4.0, 3.0, 1.0])
"""What weights are drawn from, uniformly, before they are spread by a log-normal factor."""
WORST = 3.0
"""Ratio to the best from which on placements are equally bad, those that do not fit among them."""


def problem_of(seed: int, turn: int) -> Problem:
    """A development problem: the host of a seed with one of the workloads, another in each of 16 turns."""
    workload = WORKLOADS[(seed + 5 * turn) % len(WORKLOADS)]
    graph = unrolled_graph_of(workload) if workload in UNROLLED else learn_dev.graph_of(workload)
    return Problem.estimate(graph, learn_dev.random_host(seed))


def draw(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """(count, 9) weights; a quarter of them are 0, some of `module` and half of `order` are negative."""
    weights = generator.random((count, 9)) * RANGES * np.exp(generator.normal(0.0, 0.7, (count, 9)))
    weights[:, 7] *= np.where(generator.random(count) < 0.3, -0.3, 1.0)
    weights[:, 8] *= np.where(generator.random(count) < 0.5, -1.0, 1.0)
    weights[generator.random(weights.shape) < 0.25] = 0.0
    return weights.round(2)


def vary(generator: np.random.Generator, bases: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """(count, 9) weights around those of `bases`, more than half of each varied; `memory` stays at 0 or more."""
    parents = bases[generator.integers(len(bases), size=count)]
    scale = 0.4 * np.maximum(np.abs(parents), 0.3) * (generator.random(parents.shape) < 0.6)
    weights = parents + generator.normal(size=parents.shape) * scale
    weights[:, 5] = np.maximum(weights[:, 5], 0.0)
    return weights.round(2)


def log_ratios(weights: NDArray[np.float64], turns: Sequence[int]) -> NDArray[np.float64]:
    """(P, W * 7) log of step times over the best of the problem's row, of weights over every grouping."""
    rows = []
    for turn in turns:
        for seed in SEEDS:
            problem = problem_of(seed, turn)
            simulator, schedulers = Simulator(problem, threads=1), Schedulers(problem)
            times = [
                simulator.step_times(schedulers[name].grouping.expand(schedulers[name].place(weights)))
                for name in GROUPINGS
            ]
            rows.append(np.stack(times, axis=1).reshape(-1))
        print(f"turn {turn} of the workloads is done", file=sys.stderr, flush=True)
    table = np.array(rows)
    return np.log(np.minimum(table / table.min(axis=1, keepdims=True), WORST))


def choose(table: NDArray[np.float64], count: int) -> list[int]:
    """Columns of `table`, one after the other the one with which the mean of the rows' least is least."""
    least, chosen = np.full(len(table), np.log(WORST)), []
    for _ in range(count):
        chosen.append(int(np.minimum(least[:, None], table).mean(axis=0).argmin()))
        least = np.minimum(least, table[:, chosen[-1]])
        print(f"{len(chosen)}: {np.exp(least.mean()):.4f}", file=sys.stderr)
    return chosen


generator = np.random.default_rng(0)
weights = draw(generator, DRAWN)
columns = choose(log_ratios(weights, [0]), BASES)
bases = weights[list(dict.fromkeys(column // len(GROUPINGS) for column in columns))]
weights = np.concatenate([bases, vary(generator, bases, VARIED)])
print("FIRST_WEIGHTS = (")
for column in choose(log_ratios(weights, [1, 2]), LISTED):
    row = ", ".join(f"{weight:g}" for weight in weights[column // len(GROUPINGS)] + 0.0)
    print(f'    ("{GROUPINGS[column % len(GROUPINGS)]}", ({row})),')
print(")")
