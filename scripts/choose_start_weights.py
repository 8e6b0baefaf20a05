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
from pretrain import WORST, draw, vary
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


def problem_of(seed: int, turn: int) -> Problem:
    """A development problem: the host of a seed with one of the workloads, another in each of 16 turns."""
    workload = WORKLOADS[(seed + 5 * turn) % len(WORKLOADS)]
    graph = unrolled_graph_of(workload) if workload in UNROLLED else learn_dev.graph_of(workload)
    return Problem.estimate(graph, learn_dev.random_host(seed))


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
