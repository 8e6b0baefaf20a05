"""The sections on the search: curves of the best step so far, and the simulator against measured steps."""

from __future__ import annotations

from pathlib import Path

from run_files import change, forget, retable, rows_of, run_data, write_run

from rlplace.report.html.page import curves_of, fidelity_section, learning_section, words


def test_curves_stand_beside_what_they_had_to_beat(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path))
    section = learning_section(data)
    assert section is not None
    assert [curve.method for curve in curves_of(data)] == ["learned", "portfolio"]
    assert curves_of(data)[0].spent == (900, 5, 12.0)
    for text in ("best heuristic: heft", "eager PyTorch", "one device", "learned: 20 ms"):
        assert text in section.body
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
    assert "eager PyTorch" not in section.body
    assert "one device" in section.body


def test_a_run_without_search_json_is_drawn_from_its_table(tmp_path: Path) -> None:
    without_searches(write_run(tmp_path))
    rows = rows_of()
    rows[3]["history"] = [[64, 0, 0.5, 0.025], [20000, 0, 9.0, 0.020], [1, 2]]
    rows[1]["history"] = [[2, 0, 0.001, 0.024]]
    retable(tmp_path, rows)
    change(tmp_path, "ending", is_measured=False)
    data = run_data(tmp_path)
    section = learning_section(data)
    assert section is not None
    assert "All of it is simulated" in section.lead
    assert {curve.method: len(curve.history) for curve in curves_of(data)} == {"heft": 1, "portfolio": 2}


def test_without_any_history_there_is_no_section(tmp_path: Path) -> None:
    without_searches(write_run(tmp_path))
    assert learning_section(run_data(tmp_path)) is None


def test_each_placement_that_ran_is_a_point(tmp_path: Path) -> None:
    section = fidelity_section(run_data(write_run(tmp_path)))
    assert section is not None
    assert section.body.count("learned\nmeasured 21.00 ms\nsimulated 20.00 ms") == 1
    assert section.body.count("<title>") >= 8
    assert "The 8 placements" in section.lead


def test_the_error_in_words() -> None:
    assert words([(0.9, 1.0), (1.8, 2.0), (2.7, 3.0)]) == (
        "The median error is 10 %; on the whole the simulator says 10 % too little. It orders them with a rank "
        "correlation of 1.00 (1 is perfect)."
    )
    assert words([(1.0, 1.0)] * 5).endswith("too little.")
    assert "correlation of 0.50" in words([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)])


def test_a_simulated_run_has_nothing_to_compare(tmp_path: Path) -> None:
    change(write_run(tmp_path), "ending", is_measured=False)
    assert fidelity_section(run_data(tmp_path)) is None
