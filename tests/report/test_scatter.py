from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from rlplace.errors import InvalidValue
from rlplace.report import save_fidelity_png
from rlplace.report.scatter import KIND_COLORS

SHAPE = (1050, 1080, 4)


def has_color(picture: np.ndarray, color: str) -> bool:
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool(np.any(np.abs(picture[..., :3] - rgb).max(axis=-1) < 0.12))


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_each_kind_has_its_colour_on_both_scales(tmp_path: Path, spread: float) -> None:
    measured_s = np.linspace(0.1, 0.1 + 0.1 * spread, 8)
    path = tmp_path / "fidelity.png"
    save_fidelity_png(
        path, measured_s * 1.05, measured_s, ["random", "blocks"] * 4, {"spearman": 0.97, "pick_regret": 0.0}
    )
    picture = imread(path)
    assert picture.shape == SHAPE
    assert has_color(picture, KIND_COLORS[0])
    assert has_color(picture, KIND_COLORS[1])
    assert not has_color(picture, KIND_COLORS[5])


def test_failed_placements_are_left_out(tmp_path: Path) -> None:
    save_fidelity_png(tmp_path / "a.png", [0.1, math.inf], [0.1, 0.2], ["a", "b"], {"spearman": math.nan})
    assert imread(tmp_path / "a.png").shape == SHAPE
    save_fidelity_png(tmp_path / "b.png", [], [], [], {})
    assert imread(tmp_path / "b.png").shape == SHAPE


def test_lengths_must_agree(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="kinds is '1 entries', expected 2"):
        save_fidelity_png(tmp_path / "a.png", [0.1, 0.2], [0.1, 0.2], ["a"], {})


def test_names_are_no_formulas(tmp_path: Path) -> None:
    formula = r"$\frac{ of $1"
    save_fidelity_png(tmp_path / "a.png", [0.1], [0.1], [formula], {formula: 1.0}, title=formula)
    assert has_color(imread(tmp_path / "a.png"), KIND_COLORS[0])
