"""`rlplace simulate` and `measure`: what they tell people of one placement."""

from __future__ import annotations

import json

import pytest

from rlplace.cli.simulate import show_step_time

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
    assert capsys.readouterr().err == "everything on cpu:0, measured: 12.34 ms ± 0.50, bound 4.00 ms (work)\n"
    show_step_time({**TIMED, "kind": "simulated"}, json=False)
    assert capsys.readouterr().err == "everything on cpu:0, simulated: 12.34 ms, bound 4.00 ms (work)\n"


def test_a_placement_that_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    show_step_time({**TIMED, "status": "oom", "why": "cpu:0 is 3 MiB short"}, json=False)
    assert capsys.readouterr().err == "everything on cpu:0, measured: oom: cpu:0 is 3 MiB short\n"


def test_json_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show_step_time({**TIMED, "step_time_s": float("inf")}, json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == {**TIMED, "step_time_s": None}
    assert said.err == ""
