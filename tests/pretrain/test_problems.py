"""`ProblemSource` and `random_host`: a problem is a function of a seed, a stage and a number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micrographs import fork_join

from rlplace.graphs.formats import save_graph
from rlplace.policy.options import PretrainConfig
from rlplace.pretrain.pretraining import CAPTURED, DEVICE_COUNTS, ProblemSource, random_host
from rlplace.workloads import parse_workload

SYNTHETIC = PretrainConfig(captured=False)
CORE = {"rnnlm", "nmt", "inception_v3", "bert", "gpt2", "mixtral", "clip", "dlrm"}


def test_hosts_are_drawn_by_the_generator_alone() -> None:
    hosts = [random_host(np.random.default_rng(seed)) for seed in range(40)]
    assert {host.num_devices for host in hosts} == set(DEVICE_COUNTS)
    assert any(len({device.kind for device in host.devices}) == 2 for host in hosts)
    assert hosts[3] == random_host(np.random.default_rng(3))
    assert all(host.is_simulated for host in hosts)


def test_a_problem_depends_on_its_seed_stage_and_number_alone() -> None:
    source = ProblemSource(SYNTHETIC)
    first, again = source.problem(0, 1), ProblemSource(SYNTHETIC).problem(0, 1)
    assert first.graph.fingerprint == again.graph.fingerprint
    assert first.host == again.host
    others = [
        source.problem(0, 2),
        source.problem(1, 1),
        ProblemSource(PretrainConfig(seed=1, captured=False)).problem(0, 1),
    ]
    assert len({problem.graph.fingerprint for problem in (first, *others)}) == 4


def test_some_devices_have_little_memory() -> None:
    source = ProblemSource(SYNTHETIC)
    full = []
    for number in range(12):
        problem = source.problem(0, number)
        graph = problem.graph
        kept = (graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes + graph.output_bytes).sum()
        full.append(kept / sum(device.memory_bytes - device.context_bytes for device in problem.host.devices))
    assert max(full) > 0.25
    assert min(full) < 0.2


@pytest.mark.filterwarnings("ignore:.*costs nothing:RuntimeWarning")
def test_graph_files_are_trained_on_too(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(fork_join(2, 2), path)
    source = ProblemSource(PretrainConfig(captured=False, synthetic=0.0, graphs=(path,)))
    assert source.problem(0, 0).graph.fingerprint == fork_join(2, 2).fingerprint


def test_nothing_of_the_suite_that_is_judged_on_is_trained_on() -> None:
    assert not {parse_workload(workload).name for workload, _ in CAPTURED} & CORE
