from __future__ import annotations

import re

from run_files import HOSTILE, rows_of

from rlplace.report.html.page import field_section
from rlplace.report.html.run_data import decode_run


def test_rows_are_in_order_with_ratios_and_reasons() -> None:
    data = decode_run({}, {"rows": rows_of(), "best": {"method": "portfolio"}, "measured": True})
    body = field_section(data).body
    assert re.findall(r"<tr[^>]*><td>(.*?)</td>", body) == [
        "portfolio ★", "learned", "heft", "single", "blocks", "eager †",
    ]  # fmt: skip
    assert '<tr class="best"><td>portfolio ★</td><td class="number">20.00</td>' in body
    assert "0.67×" in body
    assert "0.80×" in body
    assert "oom: cpu:0 is full" in body
    assert "cannot be handed back" in body


def test_of_equals_the_one_that_is_handed_back_is_first() -> None:
    rows = [{"method": name, "step_time_s": 0.5} for name in ("a", "b")]
    body = field_section(decode_run({}, {"rows": rows, "best": {"method": "b"}})).body
    assert body.index("b ★") < body.index("<td>a<")


def test_hostile_methods_are_text() -> None:
    body = field_section(decode_run({}, {"rows": rows_of(HOSTILE), "best": {"method": HOSTILE[0]}})).body
    assert "<script" not in body
    assert "<img" not in body
    assert "&lt;script&gt;" in body


def test_a_table_of_failures_can_be_drawn() -> None:
    rows = [{"method": "single", "placement": True, "step_time_s": None, "status": "error", "why": "it broke"}]
    body = field_section(decode_run({}, {"rows": rows})).body
    assert "error: it broke" in body
    assert 'class="bar"' not in body
