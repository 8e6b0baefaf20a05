"""Problems to develop learners on, that no benchmark uses: reduced training steps of six models on random hosts."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Problem, resolve_host
from rlplace.measure.hosts.host_file import Wiring, lay_routes
from rlplace.workloads import build, parse_workload

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
from pretrain import CAPTURED, KINDS, WIRES

WORKLOADS = tuple(workload for workload, count in CAPTURED if count == 1)
SEEDS = range(100)
"""Of the hosts of the suite `learn-dev`."""


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


def workload_of(seed: int, turn: int = 0) -> str:
    """The workload on the host of a seed: another in each of 12 turns."""
    return WORKLOADS[(seed + 5 * turn) % len(WORKLOADS)]


def problem_of(seed: int, turn: int = 0) -> Problem:
    """A development problem: the host of a seed with one of the workloads, another in each of 12 turns."""
    return Problem.estimate(graph_of(workload_of(seed, turn)), random_host(seed))
