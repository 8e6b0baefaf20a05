from __future__ import annotations

from pathlib import Path

from plotly_figures import check
from run_files import change, write_run

from rlplace.report.html.fidelity import fidelity_section, words
from rlplace.report.html.run_data import RunData
from rlplace.runs.report import read_run
from rlplace.session.folder import RunFolder


def data_of(folder: Path) -> RunData:
    return read_run(RunFolder.open(folder))


def test_each_placement_that_ran_is_a_point(tmp_path: Path) -> None:
    section = fidelity_section(data_of(write_run(tmp_path)))
    assert section is not None
    (shown,) = check(section.figures[0])
    points = shown["data"][2]
    assert (points["name"], points["x"], points["y"]) == ("learned", [21.0, 24.0, 20.0, 27.0], [20.0, 22.0, 19.0, 30.0])
    assert "Each of the 8 placements" in section.lead
    assert "-8.3%" in section.body


def test_the_error_in_words() -> None:
    assert words([(0.9, 1.0), (1.8, 2.0), (2.7, 3.0)]) == (
        "The median error is 10 %; on the whole the simulator says 10 % too little. It orders them with a rank "
        "correlation of 1.00 (1 is perfect)."
    )
    assert words([(1.0, 1.0)] * 5).endswith("too little.")
    assert "correlation of 0.50" in words([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)])


def test_a_simulated_run_has_nothing_to_compare(tmp_path: Path) -> None:
    change(write_run(tmp_path), "result.json", measured=False)
    assert fidelity_section(data_of(tmp_path)) is None
