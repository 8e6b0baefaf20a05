"""The scripts learn from measured step times, and leave runs that can be exported."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlplace.cli.main import main
from rlplace.policy import LearnConfig
from rlplace.policy.policies import check_fit

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"
PAIRS = [("seq2seq", "reinforce"), ("gnn", "ppo")]


def train_placer(*words: str, **environment: str) -> None:
    command = [sys.executable, str(SCRIPTS / "train_placer.py"), TINY, *words]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "learner"), PAIRS)
def test_a_policy_learns_from_measured_steps_and_its_run_is_exported(
    policy: str, learner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = f"--host cores --policy {policy} --learner {learner} --track offline --budget 6s --groups 12 --quiet"
    small = "--simulate-share 0.2 --num-calibrated 0 --table-rounds 3 --num-samples 16"
    train_placer(*words.split(), *small.split(), "--run", str(run))
    config, result, learning = (
        json.loads((run / f"{name}.json").read_text()) for name in ("config", "result", "learning")
    )
    assert config["train"]["search"]["method"] == "policy"
    assert (config["train"]["learn"]["policy"], config["train"]["learn"]["learner"]) == (policy, learner)
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["policy"]["status"] == "ok"
    assert rows["policy"]["measured"] > 0
    curve = [figures["measured_vs_single"] for figures in learning["policy"] if "measured_vs_single" in figures]
    assert curve
    assert all(np.isfinite(value) and value > 0 for value in curve)
    assert json.loads((run / "policy.json").read_text())["kind"] == policy
    assert list((run / "wandb").glob("offline-run-*"))
    capsys.readouterr()
    assert main(["export", str(run), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.slow
def test_runs_of_a_sweep_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--host", "4xV100-pcie", "--method", "blocks", "--budget", "0.5s", "--quiet"]
    train_placer(*words, WANDB_SWEEP_ID="s", WANDB_RUN_ID="abc")
    assert (tmp_path / "runs" / "sweep" / "abc" / "result.json").is_file()


def test_the_sweep_calls_the_script_with_options_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = yaml.safe_load((SCRIPTS / "sweep.yaml").read_text(encoding="utf-8"))
    assert (SCRIPTS.parent / sweep["program"]).is_file()
    assert sweep["command"][:3] == ["${env}", "${interpreter}", "${program}"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help-all"])
    known = capsys.readouterr().out
    flags = [word for word in sweep["command"] if word.startswith("--")]
    for flag in (*flags, *(f"--{name}" for name in sweep["parameters"])):
        assert f"{flag} " in known, flag


def test_every_pair_of_the_sweep_fits() -> None:
    parameters = yaml.safe_load((SCRIPTS / "sweep.yaml").read_text(encoding="utf-8"))["parameters"]
    for policy, learner in itertools.product(parameters["policy"]["values"], parameters["learner"]["values"]):
        check_fit(LearnConfig(policy=policy, learner=learner))
