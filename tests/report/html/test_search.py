"""The sections on the search: curves of the best step so far, and the simulator against measured steps."""

from __future__ import annotations

from pathlib import Path

from plotly_figures import check
from run_files import change, forget, retable, rows_of, run_data, write_run

from rlplace.report.html.page import fidelity_section, learning_section, words
from rlplace.report.html.run_data import RunData


def test_curves_end_where_their_search_ended_beside_what_they_had_to_beat(tmp_path: Path) -> None:
    section = learning_section(run_data(write_run(tmp_path)))
    assert section is not None
    over_time, over_measured, over_scored = check(section.figures[0])
    names = [line["name"] for line in over_time["data"]]
    assert names == ["learned", "portfolio", "best heuristic: heft", "eager PyTorch", "one device"]
    assert (over_time["data"][0]["x"], over_time["data"][0]["y"]) == ([2.0, 9.0, 12.0], [25.0, 20.0, 20.0])
    assert over_measured["data"][0]["x"] == [1.0, 4.0, 5.0]
    assert over_scored["data"][0]["x"] == [10.0, 400.0]
    assert over_time["data"][4]["y"] == [30.0, 30.0]
    assert over_time["layout"]["yaxis"]["range"][1] > 30
    assert "the table is right" in section.lead


def without_searches(folder: Path) -> None:
    for name in ("learned", "portfolio"):
        forget(folder, f"method/{name}")


def test_what_is_far_away_does_not_flatten_the_curves(tmp_path: Path) -> None:
    rows = rows_of()
    rows[-1]["step_time_s"] = 9.0
    retable(write_run(tmp_path), rows)
    section = learning_section(run_data(tmp_path))
    assert section is not None
    assert check(section.figures[0])[0]["layout"]["yaxis"]["range"][1] < 40


def test_a_run_without_search_json_is_drawn_from_its_table(tmp_path: Path) -> None:
    without_searches(write_run(tmp_path))
    rows = rows_of()
    rows[3]["history"] = [[64, 0, 0.5, 0.025], [20000, 0, 9.0, 0.020]]
    rows[1]["history"] = [[2, 0, 0.001, 0.024]]
    retable(tmp_path, rows)
    change(tmp_path, "ending", is_measured=False)
    section = learning_section(run_data(tmp_path))
    assert section is not None
    assert "All of it is simulated" in section.lead
    over_time, over_scored = check(section.figures[0])
    assert over_time["data"][1]["name"] == "portfolio"
    assert over_scored["layout"]["xaxis"]["type"] == "log"


def test_without_any_history_there_is_no_section(tmp_path: Path) -> None:
    without_searches(write_run(tmp_path))
    assert learning_section(run_data(tmp_path)) is None


def fidelity_data(folder: Path) -> RunData:
    return run_data(folder)


def test_each_placement_that_ran_is_a_point(tmp_path: Path) -> None:
    section = fidelity_section(fidelity_data(write_run(tmp_path)))
    assert section is not None
    (shown,) = check(section.figures[0])
    points = shown["data"][2]
    assert (points["name"], points["x"], points["y"]) == ("learned", [21.0, 24.0, 20.0, 27.0], [20.0, 22.0, 19.0, 30.0])
    assert "The 8 placements" in section.lead
    assert "-8.3%" in section.body


def test_the_error_in_words() -> None:
    assert words([(0.9, 1.0), (1.8, 2.0), (2.7, 3.0)]) == (
        "The median error is 10 %; on the whole the simulator says 10 % too little. It orders them with a rank "
        "correlation of 1.00 (1 is perfect)."
    )
    assert words([(1.0, 1.0)] * 5).endswith("too little.")
    assert "correlation of 0.50" in words([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)])


def test_a_simulated_run_has_nothing_to_compare(tmp_path: Path) -> None:
    change(write_run(tmp_path), "ending", is_measured=False)
    assert fidelity_section(fidelity_data(tmp_path)) is None
