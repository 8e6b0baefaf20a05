"""Chooses the list of weights that small budgets begin with, on development problems that no benchmark uses.

python scripts/choose_start_weights.py    # prints `FIRST_WEIGHTS` of rlplace/search/improve/start_weights.py

Reduced training steps of six models on random hosts of 2 to 8 devices. Weights are drawn, those that do best together
are varied, and of all over every grouping, one after the other is taken with which the best of those taken so far is
best in the geometric mean. About five minutes on one core; the same list every time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Problem, resolve_host
from rlplace.measure.hosts.wiring import Wiring, lay_routes
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.greedy_starts import GROUPINGS, Schedulers
from rlplace.workloads import build, parse_workload

WORKLOADS = (
    "t5@paper,layers=4",
    "vit@paper,layers=8",
    "whisper@paper",
    "llama@paper,layers=4",
    "resnet50@paper",
    "evoformer@paper,blocks=2",
    "t5@paper,layers=2,batch=32",
    "vit@paper,layers=4,batch=256",
    "whisper@paper,layers=3,batch=2",
    "llama@paper,layers=8,width=1024,heads=16,kv_heads=16,mlp=2752,batch=4,tokens=512",
    "resnet50@paper,batch=128",
    "evoformer@paper,blocks=1,residues=128",
)
KINDS = ("2xK80", "4xV100-pcie", "4xA100-nvlink", "4xRTX3090-pcie", "8xH100-nvswitch", "RTX4090+RTX3060")
"""Presets whose first device is a kind that hosts are made of."""
WIRES = {"pcie3": (11.4e9, 14e-6), "pcie4": (22e9, 12e-6), "nvlink": (90e9, 2e-6), "nvswitch": (270e9, 2e-6)}
"""Bytes per second and latency in seconds between the devices of a node, as presets have them."""


SEEDS = range(72)
"""Of the hosts; those from 72 to 99 are kept to judge the list on."""
DRAWN, BASES, VARIED, LISTED = 300, 24, 200, 24
"""Weights that are drawn, those of them that are varied, their variations, and the length of the list."""
RANGES = np.array([2.5, 2.5, 4.0, 6.0, 5.0, 1.0, 4.0, 3.0, 1.0])
"""What weights are drawn from, uniformly, before they are spread by a log-normal factor."""
WORST = 3.0
"""Ratio to the best from which on placements are equally bad, those that do not fit among them."""


@cache
def graph_of(workload: str) -> OpGraph:
    """The captured training step, never allocated."""
    with FakeTensorMode():
        work = build(parse_workload(workload), default_size="paper")
    return capture(work.model, work.inputs, work.loss_fn, work.optimizer)


def random_host(seed: int) -> Host:
    """Two to eight devices of one kind, or of two; on one wire, or on two nodes that InfiniBand joins."""
    draw = np.random.default_rng(seed)
    count = int(draw.choice([2, 3, 4, 6, 8]))
    hosts = [resolve_host(str(name)) for name in draw.choice(KINDS, 2, replace=False)]
    first = count if draw.random() < 0.7 else int(draw.integers(1, count))
    kinds = [hosts[0].devices[0]] * first + [hosts[1].devices[0]] * (count - first)
    nodes = 2 if count >= 4 and draw.random() < 0.25 else 1
    names = [f"n{d * nodes // count}:{d}" for d in range(count)]
    wire = str(draw.choice(list(WIRES)))
    wirings = [Wiring(f"{wire}-{node}", *WIRES[wire], ports=(f"n{node}:*",)) for node in range(nodes)] + [
        Wiring("ib", 22e9, 10e-6, ports=("*",))
    ] * (nodes - 1)
    links, routes = lay_routes(wirings, names, "random host")
    devices = [replace(kind, name=name, dispatcher=name[:2]) for kind, name in zip(kinds, names, strict=True)]
    return replace(hosts[0], name=f"random-{seed}", devices=tuple(devices), links=links, routes=routes, sources={})


def problem_of(seed: int, turn: int = 0) -> Problem:
    """A development problem: the host of a seed with one of the workloads, another in each of 12 turns."""
    return Problem.estimate(graph_of(WORKLOADS[(seed + 5 * turn) % len(WORKLOADS)]), random_host(seed))


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
