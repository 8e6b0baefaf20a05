"""Ctrl-C leaves a usable run folder behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.measure import load_placement

PROGRAM = """
import signal, sys
from rlplace.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests in the background start would ignore it
sys.exit(main())
"""


WORK = """
import torch

def work():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), torch.ones(4, 8), lambda y: y.square().mean(), "sgd"
"""


def test_what_is_stopped_before_the_search_has_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("RLPLACE_IN_PROCESS", "1")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlplace.training.phases.calibrated", stop)
    words = ["train", "interrupted_work:work", "--host", "cores:1", "--budget", "1s", "--store", "off", "--run", "run"]
    assert main(words) == 130
    assert load_placement(Path("run/placement.json")).method == "single"
    said = capsys.readouterr().err
    assert "the best placement so far is run/placement.json" in said
    assert "to go on: rlplace train interrupted_work:work --resume run" in said


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_placement_so_far(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "train",
        "nmt@layers=1,units=16,batch=4,steps=3,vocab=50",
        "--host",
        "cores",
        "--budget",
        "10m",
        "--run",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(4000):  # its kernels may have to be compiled first, on a busy machine
            if (folder / "placement.json").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=400)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert f"the best placement so far is {folder / 'placement.json'}" in err
    assert load_placement(folder / "placement.json").method in ("single", "random", "learned")
    assert (folder / "config.json").exists()
