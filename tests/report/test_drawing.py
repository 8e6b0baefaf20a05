"""The best so far over seeds: hand-worked bands, and pictures that are pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from rlplace.errors import FileProblem, InvalidValue
from rlplace.report import Curve, save_best_so_far_png, save_fidelity_png
from rlplace.report.plots import SERIES_COLORS, Series, band_of, best_so_far

SHAPE = (840, 1800, 4)
FORMULA = r"$\frac{ of $1"
"""A name that matplotlib would read as a formula, and a wrong one."""
INF = math.inf


def arrays(*points: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """x and y of one run."""
    return np.array([x for x, _ in points], dtype=float), np.array([y for _, y in points], dtype=float)


def curve(method: str, *history: tuple[float, float, float, float], spent: tuple[float, float, float]) -> Curve:
    return Curve(method, history, spent, single_s=2.0)


def has_color(picture: np.ndarray, color: str, within: float = 0.05) -> bool:
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool(np.any(np.abs(picture[..., :3] - rgb).max(axis=-1) < within))


def test_a_value_holds_until_the_next_and_to_the_end() -> None:
    x, low, middle, high = band_of([arrays((2, 9), (5, 3))], 8.0)
    assert x.tolist() == [2, 5, 8]
    assert low.tolist() == middle.tolist() == high.tolist() == [9, 3, 3]


def test_two_seeds_are_put_on_one_grid_and_banded_from_least_to_greatest() -> None:
    x, low, middle, high = band_of([arrays((1, 8), (3, 4)), arrays((2, 6), (4, 1))], 4.0)
    assert x.tolist() == [1, 2, 3, 4]
    assert middle.tolist() == [INF, 7, 5, 2.5]  # at 1 the second seed has found nothing yet
    assert low.tolist() == [8, 6, 4, 1]
    assert high.tolist() == [INF, 8, 6, 4]


def test_four_seeds_are_banded_by_quartiles() -> None:
    _, low, middle, high = band_of([arrays((1, 4.0 * k)) for k in (4, 1, 3, 2)], 1.0)
    assert (low.item(), middle.item(), high.item()) == (7, 10, 13)  # of 4, 8, 12, 16


def test_seeds_that_found_nothing_count_as_infinitely_slow() -> None:
    nothing = arrays()
    _, _, middle, high = band_of([arrays((1, 5)), arrays((1, 7)), nothing], 2.0)
    assert (middle.tolist(), high.tolist()) == ([7, 7], [INF, INF])
    _, low, middle, _ = band_of([arrays((1, 5)), arrays((1, 7)), nothing, nothing], 2.0)
    assert (low.tolist(), middle.tolist()) == ([6.5, 6.5], [INF, INF])


def test_of_two_improvements_at_one_moment_the_later_holds() -> None:
    _, _, middle, _ = band_of([arrays((1, 5), (1, 4))], 1.0)
    assert middle.tolist() == [4]


def series_of(curves: list[Curve], axis: str, *, is_ratio: bool) -> dict[str, Series]:
    return {one.name: one for one in best_so_far(curves, axis, kind="simulated", is_ratio=is_ratio).series}


def test_methods_end_together_and_seeds_belong_to_their_method() -> None:
    curves = [
        curve("slow", (10, 1, 0.5, 4.0), (20, 2, 3.0, 2.0), spent=(40, 3, 9.0)),
        curve("slow", (10, 1, 0.5, 3.0), spent=(40, 2, 8.0)),
        curve("quick", (1, 0, 0.1, 1.0), spent=(1, 0, 0.2)),
    ]
    by_scored = series_of(curves, "evaluations", is_ratio=True)
    assert list(by_scored) == ["slow", "quick"]
    assert by_scored["slow"].low is not None
    assert by_scored["quick"].low is None
    assert by_scored["slow"].x.tolist() == [10, 20, 40]
    assert by_scored["slow"].y.tolist() == [1.75, 1.25, 1.25]
    assert by_scored["quick"].x.tolist() == [1, 40]
    assert series_of(curves, "measured", is_ratio=True)["slow"].x.tolist() == [1, 2, 3]
    in_ms = series_of(curves, "seconds", is_ratio=False)
    assert (in_ms["quick"].x.tolist(), in_ms["quick"].y.tolist()) == ([0.1, 9.0], [1000.0, 1000.0])


def test_every_measured_placement_is_a_point_and_the_best_simulated_of_them_a_line(tmp_path: Path) -> None:
    tried = [(3.0, 4.0), (5.0, 8.0), (1.0, 2.0)]
    one = Curve("m", [(9, 1, 0.5, 4.0), (30, 3, 2.0, 2.0)], (40, 3, 2.0), 2.0, tried)
    over_measured, over_seconds = (
        best_so_far([one], axis, kind="measured", is_ratio=True) for axis in ("measured", "seconds")
    )
    (pairs,) = over_measured.series[0].tried
    assert pairs.tolist() == [[1.5, 2.0], [1.5, 4.0], [0.5, 1.0]]
    assert over_seconds.series[0].tried == ()  # when each of them ran is not kept
    for plot in (over_measured, over_seconds):  # panels side by side
        assert (plot.y.low, plot.y.high, plot.y.is_log) == (over_measured.y.low, over_measured.y.high, True)
        assert plot.y.low < 0.5
        assert plot.y.high > 4.0
    pictures = []
    flat = [(9, 1, 0.5, 2.0)]
    for each in (Curve("m", flat, one.spent, 2.0, tried), Curve("m", flat, one.spent, 2.0)):
        save_best_so_far_png(tmp_path / "a.png", [each], title="one method", kind="measured")
        rgb = imread(tmp_path / "a.png")[..., :3]
        blue = (rgb[..., 2] - rgb[..., 0] > 0.2) & (np.arange(rgb.shape[1]) < 0.43 * rgb.shape[1])
        pictures.append(np.flatnonzero(blue.any(axis=1)))
    rows = [found.max() - found.min() for found in pictures]
    assert rows[0] > 300 > 20 > rows[1]  # without the points, one flat line


def test_an_improvement_after_what_was_counted_is_still_shown() -> None:
    series = series_of([curve("m", (9, 6, 1.0, 2.0), spent=(9, 4, 1.0))], "measured", is_ratio=True)["m"]
    assert (series.x.tolist(), series.y.tolist()) == ([6], [1.0])


@pytest.mark.parametrize("reach", [3.0, 5000.0])  # linear, logarithmic
def test_every_method_has_its_colour(tmp_path: Path, reach: float) -> None:
    curves = [
        curve(f"m{k}", (1, 0, 0.0, 2.0 + k), (reach, 0, reach, 1.0 + 0.3 * k + 0.1 * seed), spent=(reach, 0, reach))
        for k in range(3)
        for seed in range(2)
    ]
    save_best_so_far_png(tmp_path / "a.png", curves, title="three methods")
    picture = imread(tmp_path / "a.png")
    assert picture.shape == SHAPE
    assert all(has_color(picture, color) for color in SERIES_COLORS[:3])
    assert not has_color(picture, SERIES_COLORS[5])


def test_a_long_name_widens_the_picture(tmp_path: Path) -> None:
    long = curve("learned-without-one-thing-or-another", (1, 0, 0.0, 1.234), spent=(1, 0, 1.0))
    save_best_so_far_png(tmp_path / "a.png", [long], title="one method")
    picture = imread(tmp_path / "a.png")
    assert picture.shape[0] == SHAPE[0]
    assert picture.shape[1] > SHAPE[1]
    assert (picture[:, -5:, :3] == 1.0).all()


def test_pictures_of_little_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    save_best_so_far_png(path, [], title="nothing")
    assert imread(path).shape == SHAPE
    save_best_so_far_png(path, [Curve("stuck", [], (50, 0, 1.0))], title="nothing found")
    assert not has_color(imread(path), SERIES_COLORS[0])
    save_best_so_far_png(
        path, [Curve("m", [[1, 1, 0.0, 2.0]], (1, 1, 0.0), INF)], title="no device holds it", kind="measured"
    )
    assert has_color(imread(path), SERIES_COLORS[0])


def test_a_history_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"curve of 'm': history is \(1, 2\), expected \(K, 4\): evaluations, "):
        save_best_so_far_png(tmp_path / "a.png", [Curve("m", [(1, 2.0)], (1, 0, 1.0), 1.0)], title="")
    with pytest.raises(FileProblem, match="cannot be written"):
        save_best_so_far_png(tmp_path / "no" / "a.png", [], title="")
    assert not list(tmp_path.iterdir())


def test_names_are_no_formulas(tmp_path: Path) -> None:
    save_best_so_far_png(tmp_path / "a.png", [curve(FORMULA, (1, 0, 0.0, 1.0), spent=(1, 0, 1.0))], title=FORMULA)
    assert has_color(imread(tmp_path / "a.png"), SERIES_COLORS[0])


SCATTER_SHAPE = (1050, 1080, 4)


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_each_kind_has_its_colour_on_both_scales(tmp_path: Path, spread: float) -> None:
    measured_s = np.linspace(0.1, 0.1 + 0.1 * spread, 8)
    path = tmp_path / "fidelity.png"
    save_fidelity_png(
        path, measured_s * 1.05, measured_s, ["random", "blocks"] * 4, {"spearman": 0.97, "pick_regret": 0.0}
    )
    picture = imread(path)
    assert picture.shape == SCATTER_SHAPE
    assert has_color(picture, SERIES_COLORS[0], 0.12)
    assert has_color(picture, SERIES_COLORS[1], 0.12)
    assert not has_color(picture, SERIES_COLORS[5], 0.12)


def test_failed_placements_are_left_out(tmp_path: Path) -> None:
    save_fidelity_png(tmp_path / "a.png", [0.1, math.inf], [0.1, 0.2], ["a", "b"], {"spearman": math.nan})
    assert imread(tmp_path / "a.png").shape == SCATTER_SHAPE
    save_fidelity_png(tmp_path / "b.png", [], [], [], {})
    assert imread(tmp_path / "b.png").shape == SCATTER_SHAPE


def test_lengths_must_agree(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="kinds is '1 entries', expected 2"):
        save_fidelity_png(tmp_path / "a.png", [0.1, 0.2], [0.1, 0.2], ["a"], {})


def test_names_of_kinds_are_no_formulas(tmp_path: Path) -> None:
    formula = r"$\frac{ of $1"
    save_fidelity_png(tmp_path / "a.png", [0.1], [0.1], [formula], {formula: 1.0}, title=formula)
    assert has_color(imread(tmp_path / "a.png"), SERIES_COLORS[0], 0.12)
