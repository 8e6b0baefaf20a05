from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from run_files import HOSTILE, rows_of

from rlplace.errors import InvalidValue
from rlplace.report.field_picture import save_field_png


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
