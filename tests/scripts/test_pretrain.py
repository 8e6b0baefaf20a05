"""`pretrain.py`, at a tiny size: how its problems and weights are drawn, what networks learn, and runs that go on."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from micrographs import fork_join

from rlplace.env.sequential import FIRST_WEIGHTS, GROUPINGS
from rlplace.errors import FileProblem, InvalidValue
from rlplace.graphs.formats import save_graph
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.problem import Problem
from rlplace.policy.schedule import best_together
from rlplace.policy.schedule_network import SUMMARY, Components, ScheduleNetwork, load_network
from rlplace.workloads import parse_workload

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import pretrain as pretraining
from pretrain import (
    CAPTURED,
    DEVICE_COUNTS,
    PretrainConfig,
    ProblemSource,
    Table,
    draw,
    fit,
    held_out,
    over_groupings,
    pretrain,
    random_host,
    simulate_pairs,
    vary,
)

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


@pytest.mark.slow
def test_the_program_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    pretrain(TINY, tmp_path)
    words = [sys.executable, str(pretraining.__file__), str(tmp_path), "--no-captured"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pretrain: {tmp_path}")
    assert "--resume" in done.stderr


def test_columns_are_taken_for_what_they_add() -> None:
    log_ratios = np.array([[0.0, 0.1, 0.9], [0.9, 0.4, 0.0], [0.9, 0.1, 0.9]])
    # alone, column 1 is the least on average (0.2); with it, column 2 gains 0.4 and column 0 gains 0.1
    assert best_together(log_ratios, 3) == [1, 2, 0]
    assert best_together(log_ratios, 9) == [1, 2, 0]


def test_weights_are_drawn_by_the_generator_alone() -> None:
    first, same = (draw(np.random.default_rng(5), 40) for _ in range(2))
    assert first.tolist() == same.tolist()
    assert 0.15 < (first == 0).mean() < 0.35
    assert (first[:, :7] >= 0).all()
    assert (first[:, 8] < 0).any()


def test_variations_stay_near_their_bases_and_memory_never_attracts() -> None:
    bases = np.array([[1.0] * 9, [0.0] * 9])
    varied = vary(np.random.default_rng(0), bases, 200)
    assert (varied[:, 5] >= 0).all()
    near_one = varied[:, 0] > 0.5
    assert 0.3 < near_one.mean() < 0.7
    assert (varied[:, 0] == 1.0).mean() > 0.1  # some weights are left alone


def test_every_grouping_takes_every_weight() -> None:
    pairs = over_groupings(np.arange(18.0).reshape(2, 9))
    assert [name for name, _ in pairs] == [*GROUPINGS, *GROUPINGS]
    assert pairs[len(GROUPINGS)][1] == tuple(range(9, 18))


def table_of(seed: int, count: int) -> Table:
    """Component 0 is best where the first number of a summary is positive, component 1 elsewhere, 2 nowhere.

    The list schedule's end says the same, but for component 2, whose busiest link gives it away.
    """
    rng = np.random.default_rng(seed)
    summary = rng.normal(size=(count, len(SUMMARY))).astype(np.float32)
    is_first = summary[:, 0] > 0
    ratio = np.stack((np.where(is_first, 0.0, 0.4), np.where(is_first, 0.4, 0.0), np.full(count, 0.6)), axis=1)
    estimates = np.zeros((count, 3, 6))
    estimates[..., 0] = np.exp(np.where(np.arange(3) == 2, -0.2, ratio))
    estimates[:, 2, 2] = 2.0
    return Table(summary, ratio - 3.0, estimates)


def network() -> ScheduleNetwork:
    return ScheduleNetwork(Components.of(FIRST_WEIGHTS[:3]), 8)


def test_what_suits_a_problem_is_learned_from_others() -> None:
    before = held_out(network(), table_of(1, 40))
    after = held_out(fit(network(), table_of(0, 120), 200), table_of(1, 40))
    assert before["listed@1"] == after["listed@1"] == pytest.approx(np.exp(0.2), rel=0.1)
    assert after["gate@1"] < 1.06 < before["gate@1"]
    assert after["ranker@1"] < 1.02 < before["ranker@1"]
    assert after["gate@4"] == after["ranker@4"] == 1.0


def test_equal_tables_give_equal_networks() -> None:
    first, same = (fit(network(), table_of(0, 30), 20).state_dict() for _ in range(2))
    assert all(first[name].tolist() == same[name].tolist() for name in first)
    assert first["scenarios"].shape == (30, 3)
    assert first["scenarios"].mean(dim=1).numpy() == pytest.approx(np.zeros(30), abs=1e-6)


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
