"""Notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONGEST_CELL = 12


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_valid_short_and_has_no_outputs(path: Path) -> None:
    nbformat.validate(read(path))
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= LONGEST_CELL, cell.source
        assert cell.outputs == []
        assert cell.execution_count is None


def run(path: Path, folder: Path) -> list[dict[str, Any]]:
    """What each code cell shows, as data by MIME type."""
    notebook = read(path)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [output.text for cell in cells for output in cell.outputs if "Warning" in output.get("text", "")]
    return [cell.outputs[-1].get("data", {}) if cell.outputs else {} for cell in cells]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_model_is_placed_and_trains(tmp_path: Path) -> None:
    _, _, _, graph, problem, result, table, picture, placement, losses, is_lower = run(
        FOLDER / "place_a_model.ipynb", tmp_path
    )
    assert graph["text/plain"].endswith("TwoBranches)")
    assert problem["text/plain"].startswith("Problem(OpGraph(")
    assert result["text/plain"].startswith("TrainResult(best ")
    assert "<table>" in table["text/html"]
    assert "image/png" in picture
    assert placement["text/plain"].startswith("Placement(")
    first, last = map(float, losses["text/plain"].strip("()").split(", "))
    assert last < first
    assert is_lower["text/plain"] == "True"
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.png"]
