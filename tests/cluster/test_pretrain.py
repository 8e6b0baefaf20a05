"""`pretrain` on a cluster: the weights of a local run, to the bit, and what came before a stop is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from micrographs import fork_join
from ray_nodes import ray_nodes

from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.errors import FileProblem
from rlplace.graphs.formats import save_graph
from rlplace.policy.options import PretrainConfig
from rlplace.pretrain.pretraining import pretrain

TINY = PretrainConfig(
    num_drawn=3,
    drawn_problems=3,
    num_bases=2,
    num_varied=2,
    varied_problems=3,
    num_components=5,
    problems=6,
    captured=False,
    hidden=4,
    steps=8,
)
WORDS = (
    *("--num-drawn", "3", "--drawn-problems", "3", "--num-bases", "2", "--num-varied", "2", "--varied-problems", "3"),
    *("--num-components", "5", "--problems", "6", "--no-captured", "--hidden", "4", "--steps", "8"),
)
"""The same on the command line."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes() as nodes, Cluster.connect(nodes.address) as connected:
        yield connected


def weights(folder: Path) -> bytes:
    return (folder / "schedule.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:.*costs nothing:RuntimeWarning")
def test_weights_and_figures_are_those_of_a_local_run(cluster: Cluster, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json"
    save_graph(fork_join(2, 3), graph)
    config = dataclasses.replace(TINY, graphs=(graph,))
    here, there = pretrain(config, tmp_path / "here"), pretrain(config, tmp_path / "there", cluster=cluster)
    assert here["held_out"] == there["held_out"]
    assert weights(tmp_path / "here") == weights(tmp_path / "there")


def test_what_came_before_a_stop_is_not_done_again(cluster: Cluster, tmp_path: Path) -> None:
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        if text.startswith("varied"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(TINY, tmp_path / "stopped", say=stop, cluster=cluster)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "tables").iterdir()}
    assert {path.name.partition("-")[0] for path in kept} == {"drawn", "varied"}
    pretrain(TINY, tmp_path / "stopped", resume=True)  # what workers made is what this process would have made
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    pretrain(TINY, tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_the_command_takes_a_cluster(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(TINY, tmp_path / "here")
    words = ["pretrain", str(tmp_path / "there"), *WORDS, "--cluster", "auto", "--json", "--quiet"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["components"] == 5
    assert weights(tmp_path / "here") == weights(tmp_path / "there")


@pytest.mark.slow
def test_a_graph_file_that_cannot_be_read_is_said_before_anything_is_simulated(tmp_path: Path) -> None:
    with pytest.raises(FileProblem):
        pretrain(dataclasses.replace(TINY, graphs=(tmp_path / "none.json",)), tmp_path / "out")
    assert list((tmp_path / "out" / "tables").iterdir()) == []
