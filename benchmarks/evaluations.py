"""How many placements a search scores in a second on training steps: python benchmarks/evaluations.py.

Annealing from the best known placement of each problem of `core-dev`, on one core, with and without the cutoff that
lets it give up a placement which it cannot accept; in turn, CPU time, the median of three. Both find the same.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from best_known import decode, known
from numpy.typing import NDArray
from record import as_markdown, record, save
from suites import SUITES, key_of, problem_of

from rlplace.measure import Problem, Simulator
from rlplace.search import Budget, Task
from rlplace.search.improve.anneal import anneal_finer

EVALUATIONS = 3000


class WithoutCutoff:
    """The simulator as a search would see it that simulates every placement to its end."""

    def __init__(self, simulator: Simulator) -> None:
        self.problem = simulator.problem
        self._simulator = simulator

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        return self._simulator.step_times(placements)


def seconds(problem: Problem, timer: Simulator | WithoutCutoff, start: NDArray[np.int32]) -> tuple[float, float]:
    """CPU seconds of an annealing run, and what it found."""
    task = Task(problem, timer, Budget(evaluations=EVALUATIONS), seed=1)
    step_s = float(task.score(start)[0])
    begin = time.process_time()
    anneal_finer(task, start, step_s, until=1.0)
    return time.process_time() - begin, task.best_s


def measure(workload: str, host: str) -> dict[str, Any]:
    """One row: microseconds an evaluation."""
    problem, key = problem_of(workload, host), key_of(workload, host)
    simulator = Simulator(problem, threads=1)
    timers, start = (simulator, WithoutCutoff(simulator)), decode(known()[key]["devices"])
    seconds(problem, simulator, start)
    runs = [[seconds(problem, timer, start) for timer in timers] for _ in range(3)]
    assert len({found for run in runs for _, found in run}) == 1, "a cutoff changed what was found"
    with_s, without_s = (statistics.median(run[way][0] for run in runs) / EVALUATIONS for way in range(2))
    size = problem.graph.num_ops + problem.graph.num_edges
    return {
        "problem": key,
        "ops": problem.graph.num_ops,
        "edges": problem.graph.num_edges,
        "us_with_cutoff": with_s * 1e6,
        "us_without": without_s * 1e6,
        "ns_per_op_edge_without": without_s / size * 1e9,
        "over_without": with_s / without_s,
        "per_second": 1 / with_s,
    }


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The table."""
    return (
        f"# Placements scored in a second\n{as_markdown(facts)}"
        "\nAnnealing near the best known placement, one core, CPU time: proposing a move and simulating it, with\n"
        "planning, launches and memory. With a cutoff a placement is given up once it can no longer be accepted.\n\n"
        "| problem | ops | edges | us each | ns per (op + edge) | us each, with cutoff | over without | per second |\n"
        "|---|---|---|---|---|---|---|---|\n"
    ) + "".join(
        (
            *(
                f"| {row['problem']} | {row['ops']:,} | {row['edges']:,} | {row['us_without']:.0f} | "
                f"{row['ns_per_op_edge_without']:.0f} | {row['us_with_cutoff']:.0f} | {row['over_without']:.2f} | "
                f"{row['per_second']:,.0f} |\n"
                for row in rows
            ),
            "\nGeometric mean of the time over that without a cutoff: "
            f"{np.exp(np.mean([np.log(row['over_without']) for row in rows])):.2f}.\n",
        )
    )


def main() -> None:
    facts = record()
    rows = [measure(workload, host) for workload, host in SUITES["core-dev"]]
    save("evaluations", {"schema": 1, **facts, "rows": rows}, markdown(rows, facts), indent=1)


if __name__ == "__main__":
    main()
