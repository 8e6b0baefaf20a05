""""""

from __future__ import annotations

import pytest

from rlplace.report.html.markup import (
    Raw,
    bullets,
    clean,
    details,
    escaped,
    facts,
    legend,
    paragraph,
    picture,
    prose,
    stacked,
    table,
)
from rlplace.report.plots import MOST_CHARACTERS, readable


def test_a_figure_says_what_it_is_and_two_views_are_chosen_by_buttons() -> None:
    one = picture("a", 'a "figure"', {"": "<svg></svg>"})
    assert 'aria-label="a &quot;figure&quot;"' in one
    assert "<input" not in one
    two = picture("a", "a figure", {"by phase": "<svg>1</svg>", "by module": "<svg>2</svg>"})
    assert two.count("<input") == two.count('<div class="view"') == 2
    assert two.count(" checked>") == 1
    assert '<label for="a-1">by module</label>' in two


def test_parts_of_a_bar_are_shares_of_it() -> None:
    bar = stacked([("#000000", 3.0), ("#FFFFFF", 1.0)], 0.5)
    assert "background:#000000;width:75.00%" in bar
    assert "background:#FFFFFF;width:25.00%" in bar
    assert '<span style="width:50.00%">' in bar
    assert "0.00%" in stacked([("#000000", 0.0)])


BAD = "<b onclick='x'>&"


def test_every_text_is_escaped_but_markup_that_says_so() -> None:
    for markup in (
        paragraph(BAD),
        bullets([BAD]),
        facts([(BAD, BAD)]),
        details(BAD, ""),
        table([BAD], [[BAD]]),
        legend({BAD: "#000000"}),
        picture("a", BAD, {BAD: "", "": ""}),
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


@pytest.mark.parametrize("escape", [escaped, prose])
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
