"""What people are told of a calibration: what was fitted, what it gained, and which of the two is used."""

from __future__ import annotations

import dataclasses

from search_problems import chain_problem

from rlplace.measure.calibrate import Calibration, Figures
from rlplace.runs.calibration import describe


def test_the_line_says_which_figures_are_used() -> None:
    kept = Calibration(chain_problem(3, 2), Figures(op_scale=1.25), True, 0.12, 0.034, 8, 4)
    said = describe(kept)
    assert said.startswith("calibrated (op_scale 1.25, ")
    assert said.endswith("median error on 4 held-out placements 12.0% before, 3.4% after: the fit is used")
    worse = dataclasses.replace(kept, is_kept=False, error_before=0.041, error_after=0.434)
    assert describe(worse).endswith("4.1% before, 43.4% after: the fit is worse, so the simulator stays as profiled")
