"""Two Ray workers beside one, and beside one that is stalled: python benchmarks/cluster.py, some three minutes.

Workers are nodes of a Ray cluster that is started here, of one core each. A task simulates random placements of one
problem with one simulator thread. Rates are of the time in which all workers were at work. The results are
`results/cluster.json` and `results/cluster.md`; the machine should have two idle cores.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from record import as_markdown, record, save, table
from suites import key_of, problem_of

from rlplace.cluster import Cluster
from rlplace.measure import Problem, Simulator
from rlplace.measure.timing.race import idle_share
from rlplace.say import say

PROBLEM = ("bert", "4xA100-nvlink")
BATCH = 1000
"""Placements of a task."""
ALONE_S, RATE_S, STALL_S, IDLE_S = 10.0, 25.0, 60.0, 2.0
"""For how long rates are taken in this process and on workers, one of them is stopped, and the machine is looked at."""
ENDLESS = 10**6
"""More tasks than can be done."""


@dataclass(frozen=True)
class Done:
    """A task: where it ran, and when, by the clock of this machine."""

    node: str
    pid: int
    begin_s: float
    end_s: float


def simulate(problem: Problem, seed: int) -> Done:
    """Simulates the placements of a task in this process."""
    begin_s = time.monotonic()
    placements = problem.grouping.expand(problem.draw_groups(np.random.default_rng(seed), BATCH))
    Simulator(problem, threads=1).step_times(placements)
    return Done("", os.getpid(), begin_s, time.monotonic())


def simulate_there(problem: Problem, seed: int) -> Done:
    """The same on a worker."""
    import ray

    return replace(simulate(problem, seed), node=ray.get_runtime_context().get_node_id())


def rate(done: Sequence[Done], begin_s: float, end_s: float) -> float:
    """Placements per second in a time; a task counts by the share of it that lies within."""
    shares = (max(min(one.end_s, end_s) - max(one.begin_s, begin_s), 0.0) / (one.end_s - one.begin_s) for one in done)
    return BATCH * sum(shares) / (end_s - begin_s)


def alone(problem: Problem) -> float:
    """Placements per second in this process."""
    simulate(problem, 0)  # compiles
    done = [simulate(problem, 1)]
    while done[-1].end_s - done[0].begin_s < ALONE_S:
        done.append(simulate(problem, len(done) + 1))
    return rate(done, done[0].begin_s, done[-1].end_s)


@contextmanager
def nodes(count: int) -> Iterator[Cluster]:
    """A Ray cluster of so many nodes of one core on this machine."""
    from ray.cluster_utils import Cluster as Nodes

    started = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            started.add_node(num_cpus=1)
        with Cluster.connect(started.address, say=say) as cluster:
            yield cluster
    finally:
        started.shutdown()


def begin_of_all(done: Sequence[Done], count: int) -> float:
    """When the last of `count` nodes had ended its first task; infinite before."""
    first: dict[str, float] = {}
    for one in done:
        first.setdefault(one.node, one.end_s)
    return max(first.values()) if len(first) == count else math.inf


def workers(cluster: Cluster, problem: Problem, count: int) -> float:
    """Placements per second of `count` workers, from when all were at work."""
    done: list[Done] = []
    last: dict[str, float] = {}
    for _, one in cluster.map(partial(simulate_there, problem), range(ENDLESS)):
        done.append(one)
        last[one.node] = one.end_s
        begin_s = begin_of_all(done, count)
        if min(last.values()) - begin_s > RATE_S:  # nothing that runs began within the time
            break
    return rate(done, begin_s, begin_s + RATE_S)


def stalled(cluster: Cluster, problem: Problem) -> tuple[float, float]:
    """Placements per second of one of two workers before the other is stopped, and while it is.

    Raises:
        RuntimeError: the other one did something all the same.
    """
    done: list[Done] = []
    victims: set[int] = set()
    here, stop_s, go_s = "", math.inf, math.inf
    try:
        for _, one in cluster.map(partial(simulate_there, problem), range(ENDLESS)):
            done.append(one)
            if stop_s == math.inf and one.end_s - begin_of_all(done, 2) > RATE_S:
                here, stop_s = one.node, time.monotonic()
                victims = {other.pid for other in done if other.node != here}
                send(victims, signal.SIGSTOP)
            elif one.end_s - stop_s > STALL_S:
                go_s = one.end_s
                break
    finally:
        send(victims, signal.SIGCONT)
    if any(one.node != here and one.end_s > stop_s for one in done):
        raise RuntimeError("the worker that was stopped did something all the same")
    mine = [one for one in done if one.node == here]
    return rate(mine, stop_s - RATE_S, stop_s), rate(mine, stop_s, go_s)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to processes, those that have ended aside."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def measure() -> list[dict[str, Any]]:
    """A row each: this process, one worker, two, one beside another that is stalled."""
    problem, rows = problem_of(*PROBLEM), []

    def row(what: str, idle: float, per_second: float, of: float | None) -> None:
        ratio = None if of is None else per_second / of
        rows.append({"what": what, "per_second": per_second, "ratio": ratio, "idle_before": idle})
        say(f"{what}: {per_second:,.0f} placements/s, idle before: {idle:.0%}")

    row("this process, without Ray", idle_share(IDLE_S), alone(problem), None)
    with nodes(1) as cluster:
        idle = idle_share(IDLE_S)
        one = workers(cluster, problem, 1)
        row("one worker", idle, one, None)
    with nodes(2) as cluster:
        row("two workers", idle_share(IDLE_S), workers(cluster, problem, 2), one)
        idle = idle_share(IDLE_S)
        before, during = stalled(cluster, problem)
        row("one of two, both at work", idle, before, None)
        row(f"the same one, the other stopped for {STALL_S:.0f} s", idle, during, before)
    return rows


def markdown(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The table."""
    cells = [
        (
            *(row["what"], f"{row['per_second']:,.0f}"),
            *("" if row["ratio"] is None else f"{row['ratio']:.2f}", f"{row['idle_before']:.0%}"),
        )
        for row in rows
    ]
    return (
        f"# Simulated placements a second on one and two Ray workers\n{as_markdown(facts)}"
        f"\nRandom placements of `{key_of(*PROBLEM)}`, {BATCH:,} a task; a worker has one core and one simulator\n"
        "thread, both are nodes of a Ray cluster on one machine. The ratio of two workers is to one; that of a worker\n"
        "beside one that is stopped (SIGSTOP) is to its own rate before. Idle is the share of the machine's processor\n"
        "time that was free before.\n\n"
    ) + table(("what", "placements a second", "ratio", "idle before"), *cells)


def main() -> None:
    facts = record("ray")
    rows = measure()
    save("cluster", {"schema": 1, **facts, "rows": rows}, markdown(rows, facts), indent=1)


if __name__ == "__main__":
    main()
