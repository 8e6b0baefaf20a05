"""`pretrain`, at a tiny size: the same weights whether it is stopped or not, and better guesses than before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rlplace.errors import FileProblem, InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.problem import Problem
from rlplace.policy.options import PretrainConfig
from rlplace.policy.schedule_network import load_network
from rlplace.pretrain import pretraining
from rlplace.pretrain.pretraining import Table, pretrain, simulate_pairs

TINY = PretrainConfig(
    num_drawn=3,
    drawn_problems=2,
    num_bases=2,
    num_varied=2,
    varied_problems=2,
    num_components=5,
    problems=6,
    captured=False,
    hidden=4,
    steps=8,
)


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"recurrent": {"layers": (1, 2), "steps": (3, 5)}, "fork_join": {"stages": (2, 3), "width": (2, 3)}}
    monkeypatch.setattr(pretraining, "SHAPES", shapes)


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = pretrain(TINY, tmp_path / "straight")
    asked: list[tuple[int, int]] = []
    real = pretraining.ProblemSource.problem

    def stopping(self: pretraining.ProblemSource, stage: int, number: int) -> Problem:
        asked.append((stage, number))
        if len(asked) == 5:
            raise KeyboardInterrupt
        return real(self, stage, number)

    monkeypatch.setattr(pretraining.ProblemSource, "problem", stopping)
    with pytest.raises(KeyboardInterrupt):
        pretrain(TINY, tmp_path / "stopped")
    with pytest.raises(FileProblem, match="--resume"):
        pretrain(TINY, tmp_path / "stopped")
    resumed = pretrain(TINY, tmp_path / "stopped", resume=True)
    assert len(asked) == len(set(asked)) + 1  # what was stopped is asked for again, nothing else
    assert resumed["held_out"] == straight["held_out"]
    weights = [(tmp_path / name / "schedule.safetensors").read_bytes() for name in ("straight", "stopped")]
    assert weights[0] == weights[1]
    assert len(load_network(tmp_path / "stopped" / "schedule.safetensors").components) == 5


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    pretrain(TINY, tmp_path)
    with pytest.raises(FileProblem, match="other options"):
        pretrain(dataclasses.replace(TINY, seed=1), tmp_path, resume=True)


def test_a_row_says_what_each_pair_led_to() -> None:
    problem = pretraining.ProblemSource(TINY).problem(0, 0)
    pairs = [("own", (1.0,) * 9), ("own", (1.0,) * 9), ("finest", (0.5,) * 9)]
    row = simulate_pairs(problem, pairs)
    assert row["log_times"][0] == row["log_times"][1]
    assert row["estimates"].shape == (3, 6)
    assert np.isfinite(row["summary"]).all()


def test_ratios_of_what_does_not_fit_are_the_worst() -> None:
    empty = np.zeros((2, 3, 6))
    table = Table(np.zeros((2, 22), np.float32), np.array([[0.0, 0.5, np.inf], [np.inf] * 3]), empty)
    assert table.log_ratios == pytest.approx(np.array([[0.0, 0.5, np.log(3)], [np.log(3)] * 3]))


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(InvalidValue, match="problems"):
        PretrainConfig(problems=1)
    with pytest.raises(InvalidValue, match="synthetic"):
        PretrainConfig(synthetic=1.5)
    assert isinstance(pretraining.ProblemSource(TINY).problem(2, 3).graph, OpGraph)
