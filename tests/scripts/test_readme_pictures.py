from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from matplotlib.image import imread, imsave
from run_files import write_run

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "readme_pictures.py"


def test_one_command_draws_the_pictures_and_leaves_the_run_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    imsave(run / "timeline.png", [[0.0, 1.0]])
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    command = [sys.executable, str(SCRIPT), str(run), str(tmp_path / "pictures")]
    nowhere = {**os.environ, "PATH": str(tmp_path)}  # no browser there
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True, timeout=600, check=True)
    assert "no chromium here" in done.stderr
    assert imread(tmp_path / "pictures" / "field.png").shape[1] == 1500
    assert (tmp_path / "pictures" / "timeline.png").read_bytes() == before["timeline.png"]
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
