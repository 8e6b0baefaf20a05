"""`--split` wherever a workload is named: what it gives, what runs keep of it, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused, told

from rlplace.cli.main import main
from rlplace.graphs.formats import load_graph
from rlplace.measure import load_placement

TINY = "gpt2@small,layers=1,width=16,heads=2,tokens=4,vocab=50,batch=4"
HOST = ("--host", "4xV100-pcie")
SPLIT = ("--split", "vocabulary,mlp", "--split-parts", "3:1")


def test_a_placement_says_how_its_step_is_split_and_simulates_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "placement.json")
    placed = told(capsys, "place", TINY, *HOST, *SPLIT, "--placement", path)
    assert placed["micro_batches"]["split"] == "vocabulary,mlp"
    assert placed["micro_batches"]["split_parts"] == "3:1"
    simulated = told(capsys, "simulate", TINY, *HOST, "--placement", path)  # split as the file says
    assert simulated["step_time_s"] == pytest.approx(placed["step_time_s"])
    again = told(capsys, "simulate", TINY, *HOST, *SPLIT, "--placement", path)
    assert again["step_time_s"] == simulated["step_time_s"]
    other = ("--split", "mlp", "--split-parts", "2")
    assert main(["simulate", TINY, *HOST, *other, "--placement", path]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "It places vocabulary,mlp in shards 3:1, yours are mlp in 2 shards: give `--split vocabulary,mlp" in said


def test_a_step_whose_updates_are_in_parts_is_placed_and_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, words = str(tmp_path / "placement.json"), ("--split", "updates", "--split-parts", "4", "--micro-batches", "2")
    placed = told(capsys, "place", TINY, *HOST, *words, "--placement", path)
    assert str(load_placement(path).split_words) == "updates in 4 shards"
    simulated = told(capsys, "simulate", TINY, *HOST, *words[-2:], "--placement", path)
    assert simulated["step_time_s"] == pytest.approx(placed["step_time_s"])
    assert "class to split" in refused(capsys, "place", TINY, *HOST, "--split", "update")


def test_a_graph_is_split_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    told(capsys, "graph", TINY, *SPLIT, "--save", str(file))
    assert load_graph(file).num_shards == 2
    told(capsys, "simulate", str(file), *HOST)
    said = refused(capsys, "simulate", str(file), *HOST, *SPLIT)
    assert "expected none beside the file" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--split", "auto", "--split-parts", "4"), "split_parts is '4', expected none beside `--split auto`"),
        (("--split", "heads"), "class to split"),
        (("--split-parts", "2:1"), "split_parts is '2:1', expected none without a split"),
        (("--split", "mlp", "--split-parts", "many"), "split_parts is 'many', expected a number of shards from 2"),
        (("--split", "mlp", "--split-parts", "1"), "parts is 1"),
        (("--split", "mlp", "--granularity", "module"), "split is 'mlp', expected none where modules are placed"),
        (("--split", "experts"), "cannot split experts"),
        (("--split", "attention", "--split-parts", "4"), "in module"),
    ],
)
@pytest.mark.parametrize("command", ["place", "compare"])
def test_mistakes_are_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, command, TINY, *HOST, *words)


@pytest.mark.slow
def test_a_run_is_split_exported_and_trains_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    words = ("--host", "cores", "--budget", "5s", "--run", run, "--micro-batches", "2")
    trained = told(capsys, "train", TINY, *words, *SPLIT)
    assert trained["best"]
    placement = load_placement(tmp_path / "run" / "placement.json")
    assert placement.split_words is not None
    assert str(placement.split_words) == "vocabulary,mlp in shards 3:1"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["micro_batches"]["split"] == "vocabulary,mlp"
    assert told(capsys, "export", run, "--check")["ok"]
    told(capsys, "export", run)
    script = tmp_path / "run" / "step.py"
    assert "split=placement.split" in script.read_text()
    own = script.read_text().replace("step.close()", "print(sorted(step.state_dict()) == sorted(model.state_dict()))")
    script.write_text(own + "\nstep.close()\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
    assert "whole ops for a device map" in refused(capsys, "export", run, "--format", "device_map")
    told(capsys, "export", run, "--format", "torchrun")
    assert "micro_batches=2" in (text := (tmp_path / "run" / "torchrun.py").read_text())
    assert "\n        split=placement.split,\n    )" in text
    told(capsys, "train", "--resume", run, "--budget", "+2s")


@pytest.mark.parametrize("command", ["graph", "simulate"])
def test_commands_that_search_nothing_choose_no_split(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "expected none, or classes of ops here" in refused(capsys, command, TINY, *HOST, "--split", "auto")


@pytest.mark.slow
def test_a_split_is_chosen_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "placement.json")
    workload = "gpt2@paper,layers=2,batch=1"
    words = ("--host", "4xA100-nvlink", "--split", "auto", "--evaluations", "400", "--placement", path)
    placed = told(capsys, "place", workload, *words)
    split = load_placement(path).split_words
    asked = placed["micro_batches"]
    assert (asked["split"], asked.get("split_parts")) == (
        ("auto", None) if split is None else (split.classes, split.parts)
    )
    assert split is not None
    simulated = told(capsys, "simulate", workload, "--host", "4xA100-nvlink", "--split", "auto", "--placement", path)
    assert simulated["step_time_s"] == pytest.approx(placed["step_time_s"])


def test_advice_is_on_whole_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`train`, `place` and `compare` choose a split" in refused(capsys, "advise", TINY, *HOST, "--split", "auto")
