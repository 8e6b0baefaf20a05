"""`--micro-batches` wherever a workload is named: what it gives, what runs keep of it, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import refused, told
from layer_profiles import profile_text
from matplotlib.image import imread

from rlplace.cli.main import main
from rlplace.graphs.formats import load_graph

TINY = "gpt2@small,layers=1,width=16,heads=2,tokens=4,vocab=50,batch=4"
HOST = ("--host", "4xV100-pcie")


@pytest.mark.slow
def test_a_graph_is_cut_saved_and_simulated_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = told(capsys, "graph", TINY)
    file = tmp_path / "cut.json"
    cut = told(capsys, "graph", TINY, "--micro-batches", "3", "--save", str(file))
    assert (whole["num_micro_batches"], cut["num_micro_batches"]) == (1, 3)
    assert cut["num_ops"] > 2 * whole["num_ops"] > 2 * cut["num_shared"]
    assert load_graph(file).num_micro_batches == 3
    simulated = told(capsys, "simulate", str(file), *HOST)
    captured = told(capsys, "simulate", TINY, *HOST, "--micro-batches", "3")
    assert simulated["step_time_s"] == captured["step_time_s"]
    assert captured["micro_batches"]["count"] == 3
    assert captured["micro_batches"]["verdict"]["kind"] == "separate"
    assert captured["micro_batches"]["verdict"]["is_checked"]


@pytest.mark.slow
def test_a_comparison_keeps_placements_that_simulate_and_draw(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    methods = "single,data-parallel,pipeline,portfolio"
    words = ("compare", TINY, *HOST, "--micro-batches", "2", "--methods", methods, "--evaluations", "40")
    result = told(capsys, *words, "--save", str(tmp_path))
    rows = {row["method"]: row for row in result["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(methods.split(","), "ok")
    cut = result["micro_batches"]
    assert (cut["asked"], cut["count"]) == (2, 2)
    assert cut["op_order"] in ("rank", "tilt", "backward-first")
    for asked in ("2", "auto"):
        placement = ("--placement", str(tmp_path / "pipeline-0.placement.json"))
        picture = tmp_path / f"pipeline-{asked}.png"
        found = told(capsys, "simulate", TINY, *HOST, "--micro-batches", asked, *placement, "--timeline", str(picture))
        assert found["step_time_s"] == pytest.approx(rows["pipeline"]["step_time_s"], rel=1e-12)
        assert found["micro_batches"]["count"] == 2
        assert imread(picture).shape[1] > 1000
    message = refused(capsys, "simulate", TINY, *HOST, *placement)
    assert "another graph" in message
    assert "--micro-batches" in message


@pytest.mark.slow
def test_auto_is_what_a_placement_file_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Three micro-batches are none that a search tries, and accumulation is none that `auto` takes."""
    words = (TINY, *HOST, "--micro-batches", "3", "--loss", "accumulated", "--methods", "data-parallel")
    (row,) = told(capsys, "compare", *words, "--evaluations", "30", "--save", str(tmp_path))["rows"]
    file = tmp_path / "data-parallel-0.placement.json"
    placement = ("--placement", str(file))
    for asked in ("auto", "3"):
        found = told(capsys, "simulate", TINY, *HOST, "--micro-batches", asked, *placement)
        assert (found["micro_batches"]["count"], found["micro_batches"]["verdict"]["kind"]) == (3, "accumulated")
        assert found["step_time_s"] == pytest.approx(row["step_time_s"], rel=1e-12)
    message = refused(capsys, "simulate", TINY, *HOST, "--micro-batches", "2", *placement)
    assert "It places 3 micro-batches of accumulated loss, yours is 2 micro-batches of separate loss" in message
    assert "give `--micro-batches 3`" in message
    message = refused(capsys, "simulate", TINY, *HOST, "--micro-batches", "3", "--loss", "joined", *placement)
    assert "accumulated" in message
    message = refused(capsys, "simulate", TINY, *HOST, "--micro-batches", "9", *placement)
    assert "at most the batch, which is 4" in message
    assert "The placement was made for 3 micro-batches of accumulated loss." in message
    data = json.loads(file.read_text())
    del data["micro_batches"]
    file.write_text(json.dumps(data))
    message = refused(capsys, "simulate", TINY, *HOST, *placement)
    assert "give `--micro-batches` again" in message


@pytest.mark.slow
def test_auto_of_files_is_what_a_placement_file_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile, cut = tmp_path / "layers.txt", tmp_path / "cut.json"
    profile.write_text(profile_text([(8.0, 16.0, 1000, 4000)] * 4))
    told(capsys, "graph", TINY, "--micro-batches", "3", "--save", str(cut))
    for file, flags in ((profile, ("--micro-batches", "3")), (cut, ())):
        words = (*HOST, *flags, "--methods", "data-parallel", "--evaluations", "30", "--save", str(tmp_path))
        (row,) = told(capsys, "compare", str(file), *words)["rows"]
        placement = ("--placement", str(tmp_path / "data-parallel-0.placement.json"))
        for asked in (flags, ("--micro-batches", "auto")):
            found = told(capsys, "simulate", str(file), *HOST, *asked, *placement)
            assert found["step_time_s"] == pytest.approx(row["step_time_s"], rel=1e-12)
            assert found["micro_batches"]["count"] == 3


@pytest.mark.slow
def test_a_run_keeps_how_its_batch_was_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", TINY, *HOST, "--micro-batches", "2", "--budget", "0.5s", "--method", "anneal", "--run", str(run))
    result = told(capsys, *words)
    config = json.loads((run / "config.json").read_text())
    assert config["micro_batches"] == result["micro_batches"]
    assert config["micro_batches"]["count"] == 2
    assert config["micro_batches"]["verdict"]["kind"] == "separate"
    problem = json.loads((run / "problem.json").read_text())
    assert problem["graph"]["num_micro_batches"] == 2
    assert problem["op_order"] == config["micro_batches"]["op_order"]
    script = (run / "step.py").read_text()
    assert "micro_batches=2, batch_dims=workload.batch_dims, loss='separate'" in script
    compile(script, "step.py", "exec")
    written = told(capsys, "export", str(run))
    assert Path(written["path"]).read_text() == script


@pytest.mark.slow
def test_auto_tries_what_the_batch_allows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", TINY, *HOST, "--micro-batches", "auto", "--methods", "single", "--evaluations", "60", "--json")
    assert main(list(words)) == 0
    said = capsys.readouterr()
    cut = json.loads(said.out)["micro_batches"]
    assert cut["asked"] == "auto"
    assert cut["count"] in (1, 2, 4)
    assert 0 < cut["evaluations"] <= 60
    assert re.search(r"8 micro-batches( and more)?: left out", said.err), "the batch is 4"
    assert said.err.count("is simulated") == 1


def test_a_layer_profile_is_as_many_micro_batches_as_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layers.txt"
    path.write_text(profile_text([(8.0, 16.0, 1000, 4000)] * 4))
    one = told(capsys, "simulate", str(path), *HOST)
    four = told(capsys, "simulate", str(path), *HOST, "--micro-batches", "4")
    assert four["step_time_s"] == pytest.approx(4 * one["step_time_s"], rel=1e-3)
    methods = ("--methods", "data-parallel,pipeline", "--evaluations", "20")
    rows = told(capsys, "compare", str(path), *HOST, "--micro-batches", "4", *methods)["rows"]
    assert all(row["step_time_s"] < 0.6 * four["step_time_s"] for row in rows)
    assert told(capsys, "graph", str(path), "--micro-batches", "4")["costs_source"] == "given"
    message = refused(capsys, "compare", str(path), *HOST, "--micro-batches", "auto")
    assert "expected a number" in message
    for flags in (("--loss", "accumulated"), ("--batch-dims", "0")):
        message = refused(capsys, "compare", str(path), *HOST, "--micro-batches", "4", *flags)
        assert f"expected none beside the file {path}" in message


@pytest.mark.parametrize("command", ["train", "compare", "simulate", "measure", "fidelity", "graph"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--micro-batches", "0"], "micro_batches is '0', expected `auto`, or a number from 1 to 1024."),
        (["--micro-batches", "few"], "micro_batches is 'few', expected `auto`, or a number from 1 to 1024."),
        (["--micro-batches", "2", "--loss", "separat"], "unknown loss in cut options 'separat': did you mean 'sep"),
        (["--micro-batches", "2", "--batch-dims", "0,x"], "batch_dims is '0,x', expected a dimension or `none`"),
        (["--loss", "joined"], "loss is 'joined', expected `auto` for a batch that is not cut"),
    ],
)
def test_mistakes_are_named_before_anything_is_built(
    command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, command, "gpt2", *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "flags", "message"),
    [
        (TINY, ["--micro-batches", "5"], "expected at most the batch, which is 4"),
        (TINY, ["--micro-batches", "2", "--batch-dims", "0"], "expected an entry for each of the 2 tensors"),
        (TINY, ["--micro-batches", "2", "--batch-dims", "0,none"], "micro-batch"),
        (TINY, ["--micro-batches", "auto"], "micro_batches is 'auto', expected a number"),
        (TINY, ["--micro-batches", "2", "--loss", "accumulated", "--exact"], "expected 1 for exactly the step"),
        ("evoformer@small", ["--micro-batches", "2"], "expected one with a batch"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line(
    workload: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "simulate", workload, *HOST, *flags)


def test_graph_files_of_other_formats_are_not_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    told(capsys, "graph", TINY, "--save", str(file))
    for command in ("simulate", "compare"):
        assert "micro_batches is 2, expected 1" in refused(capsys, command, str(file), *HOST, "--micro-batches", "2")
    published = tmp_path / "published.json"
    node = {"id": 0, "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 1}
    published.write_text(json.dumps({"maxSizePerFPGA": 9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": [node], "edges": []}))
    assert "micro_batches is 2" in refused(capsys, "compare", str(published), "--micro-batches", "2")


@pytest.mark.slow
def test_a_run_on_cores_exports_a_step_that_agrees_with_eager(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ("train", TINY, "--host", "cores", "--micro-batches", "2", "--budget", "2s", "--run", str(run))
    assert told(capsys, *words)["micro_batches"]["verdict"]["is_checked"]
    assert told(capsys, "export", str(run), "--check")["ok"]
    done = subprocess.run([sys.executable, str(run / "step.py")], capture_output=True, text=True, check=True)
    losses = [float(line.split()[1].removeprefix("tensor(").rstrip(",)")) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert np.all(np.diff(losses) < 0)
