"""How many groups the sequential env places in a second, observations included: python benchmarks/sequential_env.py.

A training step of `nmt` on eight devices in 256 groups; 64 episodes in step, random devices. CPU time of one thread,
the median of five times ten episodes each. Observed is every decision: features of every device, and masks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from record import as_markdown, record, save

from rlplace.env import DECISION_FEATURES, SequentialBatch, SequentialEnv, SequentialVecEnv
from rlplace.graphs import Grouping
from rlplace.measure import Problem, Simulator, resolve_host
from rlplace.measure.simulate.compiled_problem import list_order
from rlplace.session.prepare import Steps
from rlplace.workloads import parse_workload

WORKLOAD, HOST = "nmt@paper,steps=34", "8xV100-dgx1"
NUM_GROUPS, MOST_OPS, NUM_EPISODES = 256, 20, 64
ROUNDS, EPISODES = 5, 10


def problem() -> Problem:
    """The training step with its default groups."""
    host = resolve_host(HOST)
    return Problem.estimate(Steps(parse_workload(WORKLOAD), host, 0).graph(1), host, num_groups=NUM_GROUPS)


def in_even_groups(of: Problem) -> Problem:
    """The problem in groups of as many ops each, neighbours in its order of ops; what should live together may not."""
    num_ops = of.graph.num_ops
    op_group = np.empty(num_ops, dtype=np.int32)
    op_group[list_order(of)] = np.arange(num_ops) * NUM_GROUPS // num_ops
    graph = replace(of.graph, colocation=np.full(num_ops, -1, dtype=np.int32))
    return replace(of, graph=graph, grouping=Grouping(op_group))


def seconds(episode: Callable[[], None]) -> float:
    """CPU seconds of an episode; the median of rounds."""
    episode()
    rounds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(EPISODES):
            episode()
        rounds.append((time.process_time() - begin) / EPISODES)
    return statistics.median(rounds)


def batch_episode(batch: SequentialBatch, devices: np.ndarray) -> None:
    batch.reset()
    for row in devices:
        batch.observe()
        batch.step(row)


def env_episode(env: SequentialEnv | SequentialVecEnv, devices: np.ndarray) -> None:
    if isinstance(env, SequentialEnv):  # the others begin anew by themselves
        env.reset()
    for device in devices:
        env.action_masks()
        env.step(device)


def row_of(name: str, of: Problem, num_episodes: int, episode: Callable[[], None]) -> dict[str, Any]:
    took_s = seconds(episode)
    decisions = num_episodes * of.grouping.num_groups
    return {
        "what": name,
        "groups": of.grouping.num_groups,
        "most_ops": int(np.bincount(of.grouping.op_group).max()),
        "episodes": num_episodes,
        "us_each": took_s / decisions * 1e6,
        "per_second": decisions / took_s,
    }


def measure() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What it was measured on, and a row for each way to step."""
    of = problem()
    even = in_even_groups(of)
    generator = np.random.default_rng(0)
    rows = []
    for on in (even, of):
        num_groups, simulator = on.grouping.num_groups, Simulator(on, threads=1)
        devices = generator.integers(0, on.host.num_devices, (num_groups, NUM_EPISODES))
        batch = SequentialBatch(on, NUM_EPISODES)
        vec = SequentialVecEnv(simulator, NUM_EPISODES, deterministic=False)  # no step time is looked up
        single = SequentialEnv(simulator, deterministic=False)
        vec.reset()
        rows += [
            row_of("SequentialBatch", on, NUM_EPISODES, partial(batch_episode, batch, devices)),
            row_of("SequentialVecEnv", on, NUM_EPISODES, partial(env_episode, vec, devices)),
            row_of("SequentialEnv", on, 1, partial(env_episode, single, devices[:, 0])),
        ]
    facts = {
        "problem": f"{WORKLOAD}/{HOST}",
        "ops": of.graph.num_ops,
        "edges": of.graph.num_edges,
        "devices": of.host.num_devices,
        "features": len(DECISION_FEATURES),
    }
    return facts, rows


def markdown(on: dict[str, Any], rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The table."""
    return (
        "# Groups placed in a second by the sequential env\n"
        f"{as_markdown(facts)}"
        f"\n{on['problem']}: {on['ops']:,} ops, {on['edges']:,} edges, {on['devices']} devices; CPU time of one\n"
        f"thread. Every decision is observed: {on['features']} features of every device, and a mask.\n"
        "`SequentialBatch` is arrays alone; the others are what Stable-Baselines3 and Gymnasium step, with rewards\n"
        "and the simulator's step times (random placements, each simulated). First groups of 20 neighbours in the\n"
        "order of ops, then the groups that the problem has by default.\n\n"
        "| what | groups | ops a group, at most | episodes in step | us a decision | decisions a second |\n"
        "|---|---|---|---|---|---|\n"
    ) + "".join(
        f"| `{row['what']}` | {row['groups']} | {row['most_ops']} | {row['episodes']} | {row['us_each']:.2f} | "
        f"{row['per_second']:,.0f} |\n"
        for row in rows
    )


def main() -> None:
    facts = record()
    on, rows = measure()
    assert rows[0]["most_ops"] <= MOST_OPS
    save("sequential_env", {"schema": 1, **facts, **on, "rows": rows}, markdown(on, rows, facts), indent=1)


if __name__ == "__main__":
    main()
