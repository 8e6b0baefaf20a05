"""Placements are measured in a worker also from a notebook, and its own ops go there with their definition."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from main_scripts import MEASURES

from rlplace.measure.isolate.isolated_runner import VARIABLE

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_notebook_measures_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cells = [nbformat.v4.new_code_cell(part) for part in MEASURES.split("\n\n\n")]
    assert len(cells) > 2, "an op that one cell defines is run by another"
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.outputs]
    assert "".join(output.get("text", "") for output in outputs) == "ok \n"
