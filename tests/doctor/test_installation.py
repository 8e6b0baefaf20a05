"""The doctor's checks on machines that are made up: how checks are run, and what is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_machine import FILES, Machine, fake_torch, only

from rlplace.doctor import CHECKS, Check, Finding, System, run_checks, worst


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_sound_machine_has_nothing_but_ok(machine: Machine) -> None:
    findings = run_checks(machine.system(), CHECKS)
    assert [finding for finding in findings if finding.verdict != "ok"] == []
    assert [finding.name for finding in findings] == [check.name for check in CHECKS]


def test_a_machine_that_tells_nothing_is_no_failure(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for path in FILES:
        (tmp_path / path).unlink()
    findings = run_checks(machine.system(), CHECKS)
    assert {finding.verdict for finding in findings} == {"ok"}


def test_a_check_that_raises_is_a_failure_and_the_others_are_made() -> None:
    def broken(system: System) -> Iterator[Finding]:
        yield Finding("half", "ok", "this far")
        raise ZeroDivisionError("by\nnothing")

    sound = Check("sound", lambda system: [Finding("sound", "ok", "yes")])
    findings = run_checks(System(), [Check("broken", broken), sound, Check("after", broken, needs="broken")])
    assert [(finding.name, finding.verdict) for finding in findings] == [
        ("half", "ok"),
        ("broken", "fail"),
        ("sound", "ok"),
        ("after", "warn"),
    ]
    assert "ZeroDivisionError: by nothing" in findings[1].found
    assert findings[3].found == "not looked at: the check of broken failed"
    assert worst(findings) == "fail"


def test_every_check_survives_a_system_where_everything_raises(machine: Machine) -> None:
    def refuse(*_: object) -> Any:
        raise PermissionError("no")

    same = {"root", "environ"}
    system = System(machine.folder, **{name: refuse for name in System.__dataclass_fields__ if name not in same})
    findings = run_checks(system, CHECKS)
    assert {check.name for check in CHECKS if not check.needs} - {finding.name for finding in findings} == set()
    assert worst(findings) == "fail"


@pytest.mark.slow
def test_this_process_is_looked_at_without_importing_or_writing_anything(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from rlplace.doctor import CHECKS, System, run_checks\n"
        "assert 'torch' not in sys.modules\n"
        "found = run_checks(System(), CHECKS)\n"
        "print([finding for finding in found if finding.verdict == 'fail'])\n"
        "print({'wandb', 'numba', 'transformers', 'ortools'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\nset()\n", "")
    assert list(tmp_path.iterdir()) == []


def test_packages_that_are_missing_or_too_old_are_named(machine: Machine) -> None:
    finding = only(machine.look("packages", versions={"rlplace": "0.1.0", "numpy": "1.26.4"}))
    assert finding.verdict == "fail"
    assert finding.found == "numpy>=2.0 is 1.26.4, numba>=0.61 is not installed"
    assert finding.remedy == "pip install 'numpy>=2.0' 'numba>=0.61'"
    assert only(machine.look("packages", versions={})).verdict == "warn"


def test_a_torch_that_cannot_be_imported_fails_once(machine: Machine) -> None:
    def broken() -> None:
        raise OSError("libcublas.so.12: cannot open shared object file")

    findings = run_checks(machine.system(import_torch=broken), CHECKS)
    failed = only([finding for finding in findings if finding.verdict == "fail"])
    assert (failed.name, failed.remedy) == ("torch", "pip install 'torch>=2.9'")
    assert "libcublas" in failed.found
    skipped = [finding.name for finding in findings if finding.found.startswith("not looked at")]
    assert skipped == ["cuda", "hyper-threads", "threads", "timing"]


def test_an_old_torch_fails(machine: Machine) -> None:
    old = SimpleNamespace(**{**vars(fake_torch()), "__version__": "2.8.1"})
    finding = only(machine.look("torch", import_torch=lambda: old))
    assert (finding.verdict, finding.found) == ("fail", "2.8.1, CPU build; rlplace needs torch>=2.9")


def test_where_the_current_folder_is_gone_torch_is_left_alone(machine: Machine) -> None:
    def gone() -> str:
        raise FileNotFoundError("getcwd")

    findings = run_checks(machine.system(current_folder=gone, import_torch=fake_torch), CHECKS)
    assert [finding.name for finding in findings if finding.verdict == "fail"] == ["torch"]
