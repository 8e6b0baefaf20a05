"""`rlplace simulate` and `measure`: what they tell people of one placement.

`rlplace fidelity`: what it tells people.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from rlplace.cli.workload import fidelity_words, show_step_time
from rlplace.measure.prediction_error import Fidelity

TIMED = {
    "placement": "everything on cpu:0",
    "kind": "measured",
    "status": "ok",
    "why": "",
    "step_time_s": 0.01234,
    "spread_s": 0.0005,
    "lower_bound_s": 0.004,
    "lower_bound": "work",
}


def test_a_measured_time_has_a_spread_and_a_simulated_one_none(capsys: pytest.CaptureFixture[str]) -> None:
    show_step_time(TIMED, json=False)
    assert capsys.readouterr().out == "everything on cpu:0, measured: 12.34 ms ± 0.50, bound 4.00 ms (work)\n"
    show_step_time({**TIMED, "kind": "simulated"}, json=False)
    assert capsys.readouterr().out == "everything on cpu:0, simulated: 12.34 ms, bound 4.00 ms (work)\n"


def test_a_placement_that_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    show_step_time({**TIMED, "status": "oom", "why": "cpu:0 is 3 MiB short"}, json=False)
    assert capsys.readouterr().out == "everything on cpu:0, measured: oom: cpu:0 is 3 MiB short\n"


def test_json_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show_step_time({**TIMED, "step_time_s": float("inf")}, json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == {**TIMED, "step_time_s": None}
    assert said.err == ""


def test_fidelity_tells_people_its_figures() -> None:
    figures = Fidelity(0.978, 0.56, 0.031, 0.069, 0.004, 0.001, 0.943, -0.07, 40)
    words = fidelity_words({**asdict(figures), "plot": "fidelity.png"})
    for figure in ("40 unseen placements", "0.978", "median 3.1%", "0.4% slower"):
        assert figure in words
    assert words.endswith("scatter plot: fidelity.png")


def test_fidelity_says_where_there_is_no_rank_correlation() -> None:
    figures = Fidelity(0.978, None, 0.031, 0.069, 0.004, 0.001, 0.943, None, 8)
    words = fidelity_words({**asdict(figures), "plot": "fidelity.png"})
    assert (
        "correlation 0.978 (two measurements of the same placements: 0.943); among the best quarter none (none)"
        in words
    )
