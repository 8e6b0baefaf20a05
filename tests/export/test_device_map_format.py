"""`rlplace export --format device_map`: what is written, what is said, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from run_folders import run_of_problem

from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.export.formats import export_run
from rlplace.graphs.grouping.module_classes import ModuleClasses
from rlplace.graphs.opgraph import FORWARD
from rlplace.measure import Problem, Simulator
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.say import format_bytes
from rlplace.session.folder import RUN_FILES, RunFolder
from rlplace.session.prepare import capture_workload
from rlplace.session.session import Session
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.workloads import build, without_memory

pytest.importorskip("transformers")
WORKLOAD = "gpt2@small,layers=2"


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(WORKLOAD)


def problem_of(name: str) -> Problem:
    with without_memory():
        workload = build(name)
    return Problem.estimate(capture_workload(workload), resolve_host("RTX4090+RTX3060"), grouping="device-map")


def run_of(
    folder: Path, problem: Problem, devices: np.ndarray, workload: str = WORKLOAD, cut: CutOptions = WHOLE
) -> RunFolder:
    return run_of_problem(folder, workload, problem, devices, cut=cut)


def second_block_apart(problem: Problem) -> np.ndarray:
    """(N,) all on the first device but for the second block."""
    classes = ModuleClasses(problem.graph)
    return (classes.op_class == classes.entry_class["transformer.h.1"]).astype(np.int32)


def test_a_placement_of_modules_is_its_map(
    tmp_path: Path, problem: Problem, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", problem, second_block_apart(problem))
    assert main(["export", str(run.root), "--format", "device_map", "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    entries = json.loads(run.path("device_map.json").read_text(encoding="utf-8"))
    assert entries == {
        "transformer.wte": 0, "transformer.wpe": 0, "transformer.h.0": 0, "transformer.h.1": 1, "transformer.ln_f": 0,
        "lm_head": 0,
    }  # fmt: skip
    assert told["device_map"] == entries
    assert told["schema"] == 1
    assert told["inputs"] == [[4, 64], [4, 64]]
    assert told["projection"]["ratio"] == 1.0
    assert told["projection"]["moved_share"] == 0.0
    assert "the placement was one of modules, nothing is lost" in said.err
    assert "6 entries: 5 on GPU 0, 1 on GPU 1" in said.err
    assert "device_map.json" in RUN_FILES, "else --overwrite would leave it beside another placement"


def test_single_ops_that_are_elsewhere_come_to_their_module(tmp_path: Path, problem: Problem) -> None:
    devices = second_block_apart(problem)
    classes = ModuleClasses(problem.graph).op_class
    runs = ~problem.graph.is_source & (problem.graph.phases == FORWARD)
    block = np.flatnonzero((classes == classes[devices == 1][0]) & runs)
    free = dataclasses.replace(problem.graph, colocation=np.full_like(problem.graph.colocation, -1))
    loose = dataclasses.replace(problem, graph=free)
    devices[block[:3]] = 0
    run = run_of(tmp_path / "run", loose, devices)
    told = export_run(run.root, workload=None, is_check=False, format="device_map")
    assert told["device_map"]["transformer.h.1"] == 1
    assert 0 < told["projection"]["moved_share"] < 0.5
    expected = Simulator(loose, threads=1).measure(second_block_apart(problem)[None])[0].step_time_s
    assert told["projection"]["module_step_s"] == pytest.approx(expected)
    ratio = told["projection"]["module_step_s"] / told["projection"]["op_step_s"]
    assert told["projection"]["ratio"] == pytest.approx(ratio)


def test_memory_is_told_part_by_part(tmp_path: Path, problem: Problem, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", problem, second_block_apart(problem))
    told = export_run(run.root, workload=None, is_check=False, format="device_map", cache_tokens=100)
    assert f"context {format_bytes(told['memory'][1]['context_bytes'])}" in capsys.readouterr().err
    graph = problem.graph
    first, second = told["memory"]
    assert first["parameter_bytes"] + second["parameter_bytes"] == graph.output_bytes[graph.is_resident].sum()
    block = 12 * 256 * 256 + 13 * 256  # parameters of a block of width 256
    assert second["parameter_bytes"] == second["gradient_bytes"] == 4 * block
    assert second["optimizer_bytes"] == pytest.approx(8 * block, rel=1e-3), "Adam's two moments, and steps"
    assert first["cache_bytes"] == second["cache_bytes"] == 2 * 4 * 256 * 100 * 4, "keys and values, four sequences"
    kept = second["parameter_bytes"] + second["gradient_bytes"] + second["optimizer_bytes"] + second["context_bytes"]
    assert second["peak_bytes"] >= kept + second["cache_bytes"]
    assert second["fits"]


def test_modules_that_do_not_fit_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{WORKLOAD},batch=1,tokens=2"  # gradients are most of what it holds
    problem = problem_of(name)
    devices = second_block_apart(problem)
    need = Simulator(problem, threads=1).measure(devices[None])[0].peak_bytes
    small = tuple(
        dataclasses.replace(device, memory_bytes=need[number]) for number, device in enumerate(problem.host.devices)
    )
    tight = dataclasses.replace(problem, host=dataclasses.replace(problem.host, devices=small))
    run = run_of(tmp_path / "run", tight, devices, name)
    told = export_run(run.root, workload=None, is_check=False, format="device_map")
    assert told["projection"]["status"] == "ok"
    assert [each["fits"] for each in told["memory"]] == [False, False]
    assert "short where gradients stay until the optimizer's step" in capsys.readouterr().err


def test_a_step_in_micro_batches_is_no_device_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with without_memory():
        graph = capture_workload(build(WORKLOAD), 2, CutOptions(2, loss="accumulated"))
    cut = Problem.estimate(graph, resolve_host("RTX4090+RTX3060"))
    asked = CutOptions(2, loss="accumulated")
    run = run_of(tmp_path / "run", cut, np.zeros(graph.num_ops, dtype=np.int32), cut=asked)
    assert main(["export", str(run.root), "--format", "device_map"]) == 2
    assert "micro_batches is 2, expected 1 for a device map" in capsys.readouterr().err
    assert not run.path("device_map.json").exists()


def test_what_cannot_be_a_device_map_is_refused(
    tmp_path: Path, problem: Problem, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "file" / "placement.json")
    run = run_of(tmp_path / "file", problem, second_block_apart(problem), file)
    assert main(["export", str(run.root), "--format", "device_map", "--workload", file]) == 2
    assert "simulated, not measured" in capsys.readouterr().err
    with pytest.raises(InvalidValue, match="cache_tokens is 5, expected 0 with csv"):
        export_run(run.root, workload=None, is_check=False, format="csv", cache_tokens=5)
    with pytest.raises(InvalidValue, match="expected 0 or more"):
        export_run(run.root, workload=None, is_check=False, format="device_map", cache_tokens=-1)


def test_a_run_of_another_model_is_refused(tmp_path: Path, problem: Problem) -> None:
    run = run_of(tmp_path / "run", problem, second_block_apart(problem), "gpt2@small,layers=3")
    with pytest.raises(Exception, match="made for another graph"):
        export_run(run.root, workload=None, is_check=False, format="device_map")
    assert not run.path("device_map.json").exists()


BROKEN: list[dict[str, np.ndarray]] = [
    {"op_time_s": np.array([[1.0, 2.0]])},
    {"allowed": np.array([[True, True]])},
    {"op_group": np.array([7], dtype=np.int32)},
]


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_a_malformed_run_is_one_line(tmp_path: Path, problem: Problem, broken: dict[str, np.ndarray]) -> None:
    run = run_of(tmp_path / "run", problem, second_block_apart(problem))
    with Session.open(run) as session:
        session._keep_arrays("problem", session._arrays("problem") | broken)
    with pytest.raises(InvalidValue, match="shape"):
        export_run(run.root, workload=None, is_check=False, format="device_map")
