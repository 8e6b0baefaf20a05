"""A run that is exported, checked and run again from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.measure import Host

TINY = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


@pytest.mark.slow
def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = ["train", TINY, "--host", "cores", "--budget", "4s", "--run", str(folder), "--json"]
    assert main([*arguments, "--groups", "40"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == 1
    rows = {row["method"]: row for row in printed["rows"]}
    assert list(rows) == [
        *("single", "blocks", "round-robin", "expert", "eft", "heft"),
        *("learned", "portfolio", "eager"),
    ]
    assert rows["learned"]["measured"] >= rows["portfolio"]["measured"] > 0
    assert rows["eager"]["placement"] is False
    assert all(row["status"] == "ok" and row["step_time_s"] > 0 and row["spread_s"] >= 0 for row in printed["rows"])
    best = rows[printed["best"]["method"]]
    assert best["placement"]
    assert printed["best"]["step_time_s"] == best["step_time_s"]
    kept = json.loads((folder / "result.json").read_text())
    assert {key: kept[key] for key in printed} == printed
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "problem.json",
        "result.json",
        "placement.json",
        "host_model.json",
        "timeline.json",
        "timeline.png",
        "best_so_far.png",
        "search.json",
        "explanation.json",
        "report.html",
        "step.py",
    }
    assert main(["export", str(folder), "--check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"]
    assert checked["max_loss_rel_diff"] <= 1e-5
    assert checked["max_param_rel_diff"] <= 1e-4
    assert main(["export", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].endswith("step.py")
    done = subprocess.run(
        [sys.executable, str(folder / "step.py")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1].removeprefix("tensor(").rstrip(")")) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    for command in ("simulate", "measure"):
        arguments = [command, TINY, "--host", "cores", "--placement", str(folder / "placement.json"), "--json"]
        assert main(arguments) == 0
        timed = json.loads(capsys.readouterr().out)
        assert timed["status"] == "ok"
        assert timed["step_time_s"] > 0
        assert timed["lower_bound_s"] > 0
        if command == "simulate":  # what is measured may be under a bound from costs that a busier minute gave
            assert timed["lower_bound_s"] <= timed["step_time_s"] * (1 + 1e-9)
        assert len(timed["peak_bytes"]) == Host.detect("cores").num_devices
    assert (
        main(["simulate", "nmt@layers=1,units=8", "--host", "cores", "--placement", str(folder / "placement.json")])
        == 2
    )
    assert "made for another graph" in capsys.readouterr().err
    assert main(["train", TINY, "--run", str(folder)]) == 2


@pytest.mark.slow
def test_a_users_function_is_imported_only_if_passed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_users_model.py").write_text(
        "import torch\ndef work():\n    return torch.nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum(), 'sgd'\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a_users_model:work", "--host", "cores", "--budget", "1s", "--run", "r", "--quiet"]) == 0
    assert main(["export", "r", "--check"]) == 2
    assert "--workload a_users_model:work" in capsys.readouterr().err
    assert main(["export", "r", "--check", "--workload", "a_users_model:work"]) == 0


@pytest.mark.slow
def test_a_simulated_host_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", TINY, "--host", "2xK80", "--budget", "2s", "--run", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert "simulated" in said.err
    rows = {row["method"]: row for row in json.loads(said.out)["rows"]}
    assert rows["eager"]["status"] == "skipped"
    assert "simulated" in rows["eager"]["why"]
    assert rows["policy"]["status"] == "ok"
