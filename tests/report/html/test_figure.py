""""""

from __future__ import annotations

import json

import numpy as np
import pytest
from run_files import HOSTILE

from rlplace.report.html.figure import (
    MOST_CHARACTERS,
    Figure,
    Raw,
    Variant,
    bullets,
    clean,
    details,
    discrete_scale,
    escaped,
    facts,
    figures_json,
    paragraph,
    plot_text,
    prose,
    readable,
    table,
)


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


BAD = "<b onclick='x'>&"


def test_every_text_is_escaped_but_markup_that_says_so() -> None:
    for markup in (
        paragraph(BAD),
        bullets([BAD]),
        facts([(BAD, BAD)]),
        details(BAD, ""),
        table([BAD], [[BAD]]),
    ):
        assert "<b" not in markup
        assert "&lt;b onclick=" in markup
    assert "<i></i>" in table(["a"], [[Raw("<i></i>")]])


def test_columns_are_marked_and_empty_ones_left_out() -> None:
    markup = table(["name", "ms", "", "notes"], [["a", "1", "", ""], ["b", "2", "", ""]], numbers=(1,), minor=(1,))
    assert markup.count("<th") - markup.count("<thead") == 2
    assert markup.count('<td class="number minor">') == 2
    assert "notes" not in markup


def test_rows_have_their_style() -> None:
    assert '<tr class="best"><td>b</td></tr>' in table(["n"], [["a"], ["b"]], styles={1: "best"})


@pytest.mark.parametrize("escape", [escaped, prose, plot_text])
def test_no_markup_survives(escape) -> None:
    assert "<" not in escape("<script>alert(1)</script>")
    assert escape("a&lt;b") == "a&amp;lt;b"


def test_quotes_cannot_end_an_attribute() -> None:
    assert escaped("\"'") == "&quot;&#x27;"


def test_control_characters_and_turned_writing_are_shown_as_such() -> None:
    assert clean("a\x00b\x1b[31m\u202ec\u2028d") == "a�b�[31m�c�d"
    assert clean("Straße 東京 →") == "Straße 東京 →"


def test_long_names_keep_both_ends_and_sentences_are_whole() -> None:
    text = "begin" + "x" * 1000 + "end"
    assert len(readable(text)) <= MOST_CHARACTERS
    assert readable(text).startswith("begin")
    assert readable(text).endswith("end")
    assert prose(text) == text
