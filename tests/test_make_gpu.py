"""`make gpu` where there is no GPU: it says so, and its stages run on cores."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplace import cuda
from rlplace.workloads import build

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(cuda, "num_gpus", lambda: 0)
    return importlib.import_module("gpu")


def test_without_a_gpu_it_says_so_in_one_line(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path / "results")])
    assert gpu.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_every_stage_is_a_command_that_there_is(gpu: Any, count: int, tmp_path: Path) -> None:
    from rlplace.cli.main import COMMANDS

    listed = gpu.stages("", count, tmp_path)
    assert len({stage.name for stage in listed}) == len(listed)
    for stage in listed:
        if stage.command[1] == "benchmarks/gpu_stage.py":
            assert callable(importlib.import_module(f"gpu_stages.{stage.command[2]}").run)
        elif stage.command[1] == "-c":
            assert stage.command[3] in COMMANDS
        else:
            assert stage.command[1:3] == ("-m", "pytest")
        assert 0 < stage.limit_s < gpu.BUDGET_S


def test_a_stage_that_fails_or_takes_too_long_is_a_row_like_any_other(gpu: Any, tmp_path: Path) -> None:
    def row(code: str, limit_s: float = 60.0) -> dict[str, Any]:
        stage = gpu.Stage("odd", "an odd one", (sys.executable, "-c", code), limit_s, gpu._own)
        found: dict[str, Any] = gpu.run(stage, 60.0, tmp_path)
        return found

    verdict = {"status": "ok", "line": "all | well", "figures": {"a": 1}}
    good = row(f"print('a warning'); print({json.dumps(verdict)!r})")
    assert {key: good[key] for key in verdict} == verdict
    broken = row("raise SystemExit('this is why')")
    assert (broken["status"], broken["line"]) == ("failed", "exit code 1; see odd.err")
    assert "this is why" in (tmp_path / "odd.err").read_text()
    late = row("import time; time.sleep(60)", 1.0)
    assert (late["status"], late["line"]) == ("failed", "did not end within 1 s")
    facts = {**gpu.record(), "gpus": "1 x Some GPU", "driver": "", "cuda": None, "stages": [good, broken, late]}
    lines = gpu.table(facts).splitlines()
    assert lines[0] == "# GPUs: 1 x Some GPU"
    assert f"| odd | an odd one | ok | all / well | {good['seconds']:.0f} |" in lines


@pytest.mark.parametrize(
    ("last", "code", "status"),
    [
        ("3 passed, 1 skipped in 2.00s", 0, "ok"),
        ("4 skipped in 2.00s", 0, "skipped"),
        ("1 failed, 3 passed in 2.00s", 1, "failed"),
        ("no tests ran in 0.10s", 5, "failed"),
    ],
)
def test_tests_that_were_all_skipped_prove_nothing(gpu: Any, last: str, code: int, status: str) -> None:
    found = gpu._tests(f"SKIPPED [1] tests/some.py:1: needs two CUDA GPUs\n===== {last} =====\n", code)
    assert (found.status, found.line) == (status, last)
    assert len(found.figures["skipped"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "status"),
    [
        *((name, "ok") for name in ("copies", "waits", "races", "attention", "profiles")),
        *((name, "skipped") for name in ("memory", "out_of_memory")),
    ],
)
def test_a_stage_runs_on_cores(stage: str, status: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = importlib.import_module("gpu_stages.subject")
    monkeypatch.setattr(subject, "build", lambda _: build(subject.SMALL))
    found = importlib.import_module(f"gpu_stages.{stage}").run("cores:2")
    assert found.status == status, found.line


@pytest.mark.slow
def test_the_stage_of_processes_runs_on_cores_with_gloo(gpu: Any) -> None:
    found = importlib.import_module("gpu_stages.processes").run("procs:2")
    assert (found.status, "losses differ by 0.0e+00" in found.line) == ("ok", True), found.line
    assert sum(found.figures["transfers"]) > 30


def test_the_stage_of_processes_says_that_it_needs_two_devices(gpu: Any) -> None:
    found = importlib.import_module("gpu_stages.processes").run("procs:1")
    assert (found.status, "needs two GPUs" in found.line) == ("skipped", True)


def test_the_sanitizer_watches_every_thread_that_runs_a_device(gpu: Any) -> None:
    from rlplace.measure.execute import device_threads

    before = device_threads.as_device
    with importlib.import_module("gpu_stages.races")._Watched().threads():
        assert device_threads.as_device is not before
    assert device_threads.as_device is before
