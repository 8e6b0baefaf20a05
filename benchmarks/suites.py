"""The suites of problems: eight training steps on five simulated hosts to judge on, others to develop on.

python benchmarks/suites.py keeps the captured steps in `captured/`, from where they are read from then on: for many
processes, or for a machine with another torch, which may capture other ops. Delete the folder to capture anew.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import learn_dev
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graphs import OpGraph, load_graph, save_graph
from rlplace.measure import Problem, resolve_host
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build, parse_workload

WORKLOADS = {
    "rnnlm": "rnnlm@paper",
    "nmt": "nmt@paper,steps=20",
    "inception_v3": "inception_v3@paper",
    "bert": "bert@paper",
    "gpt2": "gpt2@paper",
    "mixtral": "mixtral@paper,layers=4,width=1024,mlp=3584,heads=16,batch=4,tokens=512",
    "clip": "clip@paper",
    "dlrm": "dlrm@paper",
}
"""At their papers' sizes, but for 20 steps of `nmt` instead of 50, and a `mixtral` that fits into a GPU's memory."""
HOSTS = ("2xK80", "4xV100-pcie", "4xA100-nvlink", "RTX4090+RTX3060", "2x8xA100-ib")

CORE = tuple((workload, host) for workload in WORKLOADS for host in HOSTS)
CORE_DEV = (
    ("rnnlm", "2xK80"), ("gpt2", "2xK80"), ("nmt", "4xV100-pcie"), ("inception_v3", "4xV100-pcie"),
    ("bert", "4xA100-nvlink"), ("mixtral", "4xA100-nvlink"), ("clip", "RTX4090+RTX3060"), ("dlrm", "RTX4090+RTX3060"),
    ("inception_v3", "2x8xA100-ib"), ("rnnlm", "2x8xA100-ib"),
)  # fmt: skip
"""Ten of them, two a host, every workload at least once: small enough to try an idea on."""
LEARN_DEV = tuple((learn_dev.workload_of(seed), f"random-{seed}") for seed in learn_dev.SEEDS)
"""What learners are developed on: none of its workloads and hosts is one of the others'."""
KEPT = Path(__file__).with_name("captured")
SUITES = {"core": CORE, "core-dev": CORE_DEV, "learn-dev": LEARN_DEV}


@cache
def graph_of(workload: str) -> OpGraph:
    """The captured training step of a workload of the suite; captured once, never allocated."""
    if (kept := KEPT / f"{workload}.json").exists():
        return load_graph(kept)
    print(f"capturing {WORKLOADS[workload]}", file=sys.stderr, flush=True)
    with FakeTensorMode():
        return capture_workload(build(parse_workload(WORKLOADS[workload]), default_size="paper"))


def problem_of(workload: str, host: str) -> Problem:
    """A problem of a suite, with estimated costs and the default grouping."""
    if (workload, host) in LEARN_DEV:
        return learn_dev.problem_of(LEARN_DEV.index((workload, host)))
    return Problem.estimate(graph_of(workload), resolve_host(host))


def key_of(workload: str, host: str) -> str:
    """The problem's name in tables and in `best_known.json`."""
    return f"{workload}/{host}"


def main() -> None:
    KEPT.mkdir(exist_ok=True)
    for workload in WORKLOADS:
        save_graph(graph_of(workload), KEPT / f"{workload}.json")


if __name__ == "__main__":
    main()
