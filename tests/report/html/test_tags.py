from __future__ import annotations

from rlplace.report.html.figure import Raw, bullets, details, facts, paragraph, table

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
