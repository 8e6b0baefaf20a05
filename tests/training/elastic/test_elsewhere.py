"""Training on another host from what a run knows."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from core_hosts import core_host
from elastic_hosts import simulated_host

from rlplace.errors import DeviceLost, FileProblem, InvalidValue
from rlplace.graphs import save_graph
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.placement import load_placement
from rlplace.measure.timing.threads import usable_cores
from rlplace.policy.options import LearnConfig
from rlplace.session.setup import Setup
from rlplace.training import SearchConfig, TrainConfig
from rlplace.training.elastic.placed_again import without_policy
from rlplace.training.method_choice import check_names
from rlplace.training.place_and_replace import folder_for, resume_elsewhere
from rlplace.training.train_and_resume import Shown, resume_training, run_training
from rlplace.workloads import parse_workload

GRAPH = synthetic("fork_join", seed=4, stages=3, width=3, flops=1e9)
TWO, THREE = simulated_host("fast", "fast"), simulated_host("fast", "fast", "slow")
QUIET = Shown(is_quiet=True)
CONFIG = TrainConfig(evaluations=60, seed=3)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on two devices, `run`, and the host file of three."""
    folder = tmp_path_factory.mktemp("work")
    save_graph(GRAPH, folder / "graph.json")
    for name, host in (("two.json", TWO), ("three.json", THREE)):
        save_host(host, folder / name)
    spec = parse_workload(str(folder / "graph.json"))
    setup = Setup(spec=spec, host=TWO, host_word=str(folder / "two.json"))
    run_training(setup, CONFIG, folder / "run", shown=QUIET)
    return folder


def go_on(work: Path, name: str, **options: object) -> dict[str, object]:
    return resume_elsewhere(
        work / "run",
        THREE,
        work / name,
        workload=str(work / "graph.json"),
        host_word=str(work / "three.json"),
        shown=QUIET,
        **options,  # type: ignore[arg-type]
    )


def own_setup() -> Setup:
    return Setup(spec=parse_workload("elastic_work:work"), host=resolve_host("cores:2"), host_word="cores:2")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_a_run_is_begun_again_on_another_host(work: Path) -> None:
    before = files(work / "run")
    told = go_on(work, "other")
    assert files(work / "run") == before
    config = json.loads((work / "other" / "config.json").read_text())
    assert (config["host"], config["placed_again"]) == (str(work / "three.json"), str(work / "run"))
    assert config["asked"]["train"]["evaluations"] == 60
    placement = load_placement(work / "other" / "placement.json")
    assert placement.device_names == ("gpu:0", "gpu:1", "gpu:2")
    problem = json.loads((work / "other" / "problem.json").read_text())
    carried = load_placement(work / "run" / "placement.json").devices
    assert problem["start"] == carried.tolist()
    assert {"portfolio", "policy"} <= {row["method"] for row in told["rows"]}  # type: ignore[attr-defined]
    with pytest.raises(FileProblem, match="not empty"):
        go_on(work, "other")


@pytest.mark.slow
def test_it_is_gone_on_with_after_any_end(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on(work, "straight")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlplace.training.phases.search_all", stop)
        with pytest.raises(KeyboardInterrupt):
            go_on(work, "stopped")
    assert not (work / "stopped" / "result.json").exists()
    resume_training(work / "stopped", workload=str(work / "graph.json"), shown=QUIET)
    for name in ("placement.json", "problem.json"):
        assert (work / "stopped" / name).read_bytes() == (work / "straight" / name).read_bytes(), name


def test_options_of_a_policy_stay_behind_where_the_agent_learns_the_host() -> None:
    config, here = TrainConfig(learn=LearnConfig(num_samples=8)), core_host(2)
    with pytest.raises(InvalidValue, match="num_samples"):
        check_names(config)
    check_names(without_policy(config, here))
    for kept, host in (
        (config, TWO),
        (dataclasses.replace(config, search=SearchConfig(method="policy")), here),
        (dataclasses.replace(config, search=SearchConfig(guide="placer")), here),
    ):
        assert without_policy(kept, host) == kept


def test_the_new_folder_is_called_after_the_host() -> None:
    assert folder_for(Path("runs/nmt"), "cores:3") == Path("runs/nmt-cores-3")
    assert folder_for(Path("runs/nmt"), "cuda/2+cpu") == Path("runs/nmt-cuda-2+cpu")
    assert folder_for(Path("runs/nmt"), "hosts/mine.json") == Path("runs/nmt-mine")


WORK = """
import torch

def work():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), torch.ones(4, 8), lambda y: y.square().mean(), "sgd"
"""
MEASURED = TrainConfig(budget_s=1.0, store="off", search=SearchConfig(num_calibrated=0, table_rounds=2))


@pytest.fixture
def own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elastic_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "elastic_work", raising=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores, of which one is left")
def test_op_times_are_not_measured_again_on_fewer_cores(own_work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_work / "run"
    run_training(own_setup(), MEASURED, folder)
    assert "profiling" in capsys.readouterr().err
    told = resume_elsewhere(
        folder, resolve_host("cores:1"), own_work / "one", workload="elastic_work:work", host_word="cores:1"
    )
    said = capsys.readouterr().err
    assert "profiling " not in said
    assert "gone: cpu:1" in said
    assert told["rows"]
    before, after = (json.loads((path / "problem.json").read_text()) for path in (folder, own_work / "one"))
    times_s = np.array(before["costs"]["op_time_s"])[:, :1]
    assert (np.array(after["costs"]["op_time_s"]) == times_s).all()


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_a_run_that_loses_a_device_offers_to_go_on_without_it(
    own_work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, calls = Evaluator.measure_plans, [0]

    def losing(self: Evaluator, *args: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] > 1:
            raise DeviceLost(("cpu:1",), "this process may not use core 1 any more")
        return measure(self, *args, **options)  # type: ignore[arg-type]

    folder = own_work / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "measure_plans", losing)
        with pytest.raises(DeviceLost) as lost:
            run_training(own_setup(), MEASURED, folder, shown=QUIET)
    assert f"rlplace train elastic_work:work --resume {folder} --host cores:" in str(lost.value)
    told = resume_elsewhere(
        folder,
        resolve_host("cores:1"),
        own_work / "left",
        workload="elastic_work:work",
        host_word="cores:1",
        shown=QUIET,
    )
    assert told["rows"]
