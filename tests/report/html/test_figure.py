from __future__ import annotations

import json

import numpy as np
from run_files import HOSTILE

from rlplace.report.html.figure import Figure, Variant, discrete_scale, figures_json


def figure(**trace: object) -> Figure:
    return Figure(
        "a", "a figure", [trace], {"title": "x"}, 100, [Variant("v", {"x": [[1]]}, {"y": 2}, [("n", "#000")])]
    )


def test_data_comes_back_as_it_was_and_cannot_leave_its_script_element() -> None:
    text = figures_json([figure(names=list(HOSTILE), values=np.array([1.5, np.nan]))])
    assert not set("<>&") & set(text)
    (back,) = json.loads(text)
    assert back["data"][0] == {"names": list(HOSTILE), "values": [1.5, None]}
    assert back["variants"][0] == {
        "label": "v",
        "restyle": {"x": [[1]]},
        "relayout": {"y": 2},
        "legend": [["n", "#000"]],
    }


def test_the_place_of_a_figure_says_what_it_is() -> None:
    place = Figure("a", 'a "figure"', [], {}, 120).place
    assert 'aria-label="a &quot;figure&quot;"' in place
    assert "height:120px" in place


def test_each_number_gets_its_colour() -> None:
    scale = discrete_scale(["red", "blue"])
    assert scale["colorscale"] == [[0.0, "red"], [0.5, "red"], [0.5, "blue"], [1.0, "blue"]]
    assert (scale["cmin"], scale["cmax"]) == (-0.5, 1.5)
