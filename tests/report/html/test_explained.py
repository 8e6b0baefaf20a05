from __future__ import annotations

from run_files import HOSTILE, explanation_of, rows_of

from rlplace.measure.explain.explanation import Explanation
from rlplace.report.html.explained import explained_section
from rlplace.report.html.run_data import decode_run


def body_of(names: list[str], devices: list[str]) -> str:
    explanation = Explanation.from_dict(explanation_of(names, devices), "explanation.json")
    section = explained_section(decode_run({}, {"rows": rows_of()}, explanation=explanation))
    assert section is not None
    return section.body


def test_devices_path_copies_alternatives_and_advice_are_there() -> None:
    body = body_of([f"op{k}" for k in range(20)], ["cpu:0", "cpu:1"])
    assert "Keep this placement, op0." in body
    assert "57%" in body
    assert "6 more" in body
    assert "copies cpu:0 → cpu:1" in body
    assert "cpu:0: op0 in op1" in body
    assert "cpu:1: op1 in op0 and 2 more" in body
    assert "1.50×" in body
    assert "it does not fit" in body


def test_names_are_text() -> None:
    body = body_of(list(HOSTILE), [HOSTILE[0], HOSTILE[2]])
    assert "<script" not in body
    assert "<img" not in body


def test_a_run_without_an_explanation_has_no_section() -> None:
    assert explained_section(decode_run({}, {"rows": rows_of()})) is None


def test_a_disturbed_run_says_so_before_anything_else() -> None:
    data = explanation_of([f"op{k}" for k in range(20)], ["cpu:0", "cpu:1"])
    explanation = Explanation.from_dict({**data, "disturbed": "Disturbed: <b>"}, "explanation.json")
    section = explained_section(decode_run({}, {"rows": rows_of()}, explanation=explanation))
    assert section is not None
    assert section.body.startswith('<p class="warning">Disturbed: &lt;b&gt;</p>')
