"""A folder with a workload of the user's, from which runs of it are exported."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; it has the module `WORK` of the test's file under the name `WORK_NAME`, if there is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    if hasattr(request.module, "WORK"):
        tests = str(Path(__file__).resolve().parents[1])
        path = tmp_path / f"{request.module.WORK_NAME}.py"
        path.write_text(request.module.WORK.format(tests=tests), encoding="utf-8")
    return tmp_path
