from __future__ import annotations

import pytest

from rlplace.report.html.figure import MOST_CHARACTERS, clean, escaped, plot_text, prose, readable


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
