"""Export formats: what is built in, what is registered, and what each needs of a run.

Which devices have a process, and what PyTorch calls them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core_hosts import core_host
from run_files import change, forget
from run_folders import placed_run, run_of_problem
from search_problems import chain_problem, fork_problem
from torch import nn

from rlplace.cli.main import main
from rlplace.errors import FileProblem, FingerprintMismatch, InvalidValue, UnknownName
from rlplace.export import FORMATS, Exported, ExportFormat, ExportRequest
from rlplace.export.formats import export_run, rank_devices
from rlplace.graphs import capture
from rlplace.measure import Problem, resolve_host
from rlplace.session.folder import RUN_FILES, RunFolder
from rlplace.session.step_script import script

FORK = fork_problem(seed=0)
MODULES = ("", "encoder", "encoder", "encoder.norm", "decoder", "")
PROBLEM = Problem(dataclasses.replace(FORK.graph, modules=MODULES), FORK.host, FORK.costs, FORK.grouping)
DEVICES = np.array([0, 0, 1, 1, 0, 1], dtype=np.int32)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of six ops, three on each device."""
    return run_of_problem(tmp_path / "run", "nmt@small", PROBLEM, DEVICES, seed=3, host="another host")


@pytest.fixture
def short_format() -> Iterator[str]:
    def text(request: ExportRequest) -> str:
        return f"{request.session.request.workload}: {request.placement.devices.tolist()}"

    FORMATS.register("short", ExportFormat("short.txt", "devices of all ops", text))
    yield "short"
    FORMATS.unregister("short")


def test_the_script_is_the_default(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.root), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"schema": 1, "format": "script", "path": str(run.path("step.py"))}
    assert "which was simulated: it runs on such a host only, not on this machine" in said.err
    assert "run it with" not in said.err
    assert 'parse_workload("nmt@small"), default_size="small", seed=3' in run.path("step.py").read_text()


def ended_with(program: Path) -> str:
    """What a script says as it ends at once."""
    with pytest.raises(SystemExit) as ended:
        exec(compile(program.read_text(encoding="utf-8"), "step.py", "exec"), {"__file__": str(program)})
    return str(ended.value.code)


def test_the_script_is_short_and_valid() -> None:
    text = script("nmt@small", default_size="small", seed=3)
    compile(text, "step.py", "exec")
    assert len(text.splitlines()) <= 28


def test_a_script_that_cannot_run_here_says_so_in_a_line(run: RunFolder) -> None:
    export_run(run.root, workload=None, is_check=False)
    said = ended_with(run.path("step.py"))
    assert "placement.json was found on another host, which was simulated: it cannot run here." in said
    assert "`rlplace train nmt@small --host auto` finds a placement for this machine" in said
    run.path("step.py").write_text(script("nmt@small", default_size="small", seed=3, host='a "b" {c}'))
    assert 'was found on a "b" {c}, and this machine is another: it cannot run here.' in ended_with(run.path("step.py"))


def test_a_loss_that_was_not_checked_is_said(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for is_checked in (True, False):
        verdict = {"kind": "separate", "is_checked": is_checked, "why": "unchecked: too large"}
        change(run.root, "problem", num_micro_batches=2, verdict=verdict)
        export_run(run.root, workload=None, is_check=False)
        said = capsys.readouterr().err
        assert said.startswith("warning: the loss of the run's 2 micro-batches was not checked") is not is_checked
        assert ("(unchecked: too large)" in said) is not is_checked


def test_csv_has_a_row_an_op(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.root), "--format", "csv"]) == 0
    assert "placement.csv: one row an op" in capsys.readouterr().err
    with run.path("placement.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == list(PROBLEM.graph.names)
    names = [device.name for device in PROBLEM.host.devices]
    assert [row["module"] for row in rows] == list(MODULES)
    assert [row["device"] for row in rows] == [names[device] for device in DEVICES]
    assert [int(row["group"]) for row in rows] == PROBLEM.grouping.op_group.tolist()
    times_s = PROBLEM.costs.op_time_s[np.arange(6), DEVICES]
    assert [float(row["op_time_s"]) for row in rows] == times_s.tolist()
    assert "placement.csv" in RUN_FILES, "else --overwrite would leave it beside another placement"


def test_a_registered_format_works_from_the_command_line(run: RunFolder, short_format: str) -> None:
    assert main(["export", str(run.root), "--format", short_format]) == 0
    assert (run.root / "short.txt").read_text() == "nmt@small: [0, 0, 1, 1, 0, 1]"


def test_an_unknown_format_is_answered_with_the_nearest(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.root), "--format", "scrpt"]) == 2
    assert "unknown export format 'scrpt': did you mean 'script'? Known: csv, " in capsys.readouterr().err
    with pytest.raises(UnknownName):
        export_run(run.root, workload=None, is_check=True, format="scrpt")


def test_a_list_says_what_each_format_is_for(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.root), "--format", "list", "--json"]) == 0
    said = capsys.readouterr()
    formats = json.loads(said.out)["formats"]
    assert formats.keys() == set(FORMATS)
    assert formats["csv"]["file"] == "placement.csv"
    assert len(said.err.splitlines()) == len(formats)
    assert all(one["file"] in RUN_FILES for one in formats.values()), "else --overwrite would leave it"


def test_figures_of_a_format_are_in_the_answer(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    FORMATS.register("counted", ExportFormat("counted.txt", "ops", lambda _: Exported("six", {"num_ops": 6})))
    try:
        assert main(["export", str(run.root), "--format", "counted", "--json"]) == 0
    finally:
        FORMATS.unregister("counted")
    assert json.loads(capsys.readouterr().out)["num_ops"] == 6
    assert (run.root / "counted.txt").read_text() == "six"


def test_a_check_takes_no_format(run: RunFolder) -> None:
    with pytest.raises(InvalidValue, match="A check runs the placed step and writes nothing"):
        export_run(run.root, workload=None, is_check=True, format="csv")


def test_csv_needs_neither_the_users_code_nor_a_model(run: RunFolder) -> None:
    for workload in ("a_users_model:work", str(run.path("problem.json"))):
        change(run.root, "request", workload=workload)
        assert export_run(run.root, workload=None, is_check=False, format="csv")["format"] == "csv"
        with pytest.raises(InvalidValue, match=f"--workload {workload}"):
            export_run(run.root, workload=None, is_check=False)


def test_csv_says_what_the_run_lacks(run: RunFolder) -> None:
    def export() -> object:
        return export_run(run.root, workload=None, is_check=False, format="csv")

    change(run.root, "problem", names=["a"], modules=[""])
    with pytest.raises(InvalidValue, match="op_device is '6 ops on 2 devices', expected 1 ops"):
        export()
    change(run.root, "problem", graph_fingerprint=chain_problem(5, 2).graph.fingerprint)
    with pytest.raises(FingerprintMismatch, match="made for another graph"):
        export()
    forget(run.root, "problem")
    with pytest.raises(FileProblem, match="this run has no problem"):
        export()


@pytest.mark.parametrize("file", ["", "..", "a/b.txt", "/b.txt", "placement.json", "config.json"])
def test_a_format_writes_no_other_file_of_the_run(file: str) -> None:
    with pytest.raises(InvalidValue, match="export format: file is"):
        ExportFormat(file, "what it is", str)


def test_a_simulated_run_cannot_be_checked_here(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.root), "--check"]) == 2
    assert "expected one of this machine" in capsys.readouterr().err


def test_a_run_of_this_machine_is_said_to_run_here(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    here = dataclasses.replace(PROBLEM, host=core_host(2))
    run = run_of_problem(run.root.parent / "here", "nmt@small", here, DEVICES)
    assert main(["export", str(run.root)]) == 0
    assert f"run it with python {run.path('step.py')}" in capsys.readouterr().err


USERS = """
import torch

def work():
    return torch.nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum(), "sgd"

def other():
    return torch.nn.Linear(4, 5), torch.ones(3, 4), lambda y: y.sum(), "sgd"
"""


def test_another_workload_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a_users_work.py").write_text(USERS, encoding="utf-8")
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum(), "sgd")
    zeros = np.zeros(graph.num_ops, dtype=np.int32)
    run = placed_run(folder / "run", "a_users_work:work", graph, core_host(1), zeros)
    assert main(["export", str(run.root), "--workload", "a_users_work:other"]) == 2
    assert f"its graph fingerprint is {graph.fingerprint}" in capsys.readouterr().err
    assert not run.path("step.py").exists()
    assert main(["export", str(run.root), "--workload", "a_users_work:work"]) == 0
    assert run.path("step.py").is_file()
    sys.modules.pop("a_users_work", None)


def test_cores_are_ranks_and_gangs_are_not() -> None:
    assert rank_devices(core_host(3, has_gang=True), "test") == {0: "cpu", 1: "cpu", 2: "cpu"}


def test_gpus_are_ranks_and_the_cpu_beside_them_is_not() -> None:
    host = resolve_host("cpu+4xA100")
    names = [host.devices[index].name for index in rank_devices(host, "test")]
    assert len(names) == 4
    assert "cpu" not in names
    assert list(rank_devices(host, "test").values()) == [f"cuda:{index}" for index in range(4)]


def test_gpus_are_counted_on_each_machine() -> None:
    host = resolve_host("2x8xV100-25gbe")
    assert list(rank_devices(host, "test").values()) == [f"cuda:{index % 8}" for index in range(16)]


def test_parts_of_a_gpu_have_no_process_of_their_own() -> None:
    host = core_host(2)
    parts = tuple(
        replace(device, name=f"cuda:0/{index}", backend="simulated") for index, device in enumerate(host.devices)
    )
    parted = replace(
        host,
        devices=parts,
        routes=tuple(
            replace(
                route,
                source=route.source.replace("cpu:", "cuda:0/"),
                destination=route.destination.replace("cpu:", "cuda:0/"),
            )
            for route in host.routes
        ),
    )
    with pytest.raises(InvalidValue, match=r"test: device is 'cuda:0/0', expected a whole GPU"):
        rank_devices(parted, "test")
