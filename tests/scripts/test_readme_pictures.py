from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread, imsave
from run_files import HOSTILE, rows_of, write_run

from rlplace.errors import InvalidValue

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "readme_pictures.py"
save_field_png = runpy.run_path(str(SCRIPT))["save_field_png"]


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


def columns_of(picture: np.ndarray, color: str) -> int:
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return int(np.all(np.rint(picture[..., :3] * 255) == rgb, axis=-1).any(axis=0).sum())


def test_bars_are_as_long_as_steps_and_eager_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "field.png"
    save_field_png(path, {"rows": rows_of(), "best": {"method": "portfolio"}, "measured": True}, title="a step")
    picture = imread(path)
    best, others = columns_of(picture, "#0072B2"), columns_of(picture, "#9CC3DB")
    assert best / others == pytest.approx(20 / 30, abs=0.02)
    assert 0 < columns_of(picture, "#D55E00") < others
    assert picture.shape[0] == round((1.5 + 4 * 0.36) * 150)


def test_a_run_without_eager_or_single_and_any_name_can_be_drawn(tmp_path: Path) -> None:
    rows = [{"method": name, "step_time_s": 0.01 * (k + 1), "status": "ok"} for k, name in enumerate(HOSTILE[:4])]
    save_field_png(tmp_path / "a.png", {"rows": rows, "best": None}, title="$x$ <b>")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_nothing_timed_is_refused(tmp_path: Path) -> None:
    rows = [{"method": "single", "step_time_s": None, "status": "error"}]
    with pytest.raises(InvalidValue, match="at least one with a step time"):
        save_field_png(tmp_path / "a.png", {"rows": rows}, title="")
