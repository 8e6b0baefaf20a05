""""""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_files import HOSTILE, data_of, explanation_of, forget, hostile_run, retable, rows_of, run_data, write_run

from rlplace.measure.explain.explanation import Explanation
from rlplace.measure.host_model import LearnedHost, Prior
from rlplace.measure.host_model.learned_host import LearnedFactor
from rlplace.measure.timing.verdict import judge
from rlplace.report.console import NOT_FASTEST_NOTE
from rlplace.report.html import page, report_page
from rlplace.report.html.markup import table
from rlplace.report.html.page import (
    SECTIONS,
    command,
    explained_section,
    field_section,
    learned_host_section,
    overview,
    sentence,
    what_was_run_section,
)

MOST_BYTES = 4_000_000


class Elements(HTMLParser):
    """Every element of a page with its attributes, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data


def page_of(folder: Path) -> str:
    return report_page(run_data(folder))


def test_every_section_is_there_and_the_contents_lead_to_it(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path))
    ids = re.findall(r'<section id="([a-z]+)"', text)
    assert len(ids) == len(SECTIONS)
    assert re.findall(r"<nav>(.*?)</nav>", text)[0].count("<a ") == len(ids)
    assert [href for href in re.findall(r'href="#([a-z]+)"', text) if href not in ids] == []
    for title, _, _ in SECTIONS:
        assert f"<h2>{title}</h2>" in text
    assert "kept nothing" not in text


def test_parts_without_data_are_named_in_one_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("explanation", "method/learned", "method/portfolio"):
        forget(tmp_path, name)
    with sqlite3.connect(tmp_path / "session.db") as database:
        database.execute("DELETE FROM arrays")
        database.execute("DELETE FROM learned_hosts")
    text = page_of(tmp_path)
    assert re.findall(r'<section id="([a-z]+)"', text) == ["field", "run"]
    assert "left out: a timeline, an explanation, the history of a search, memory over time, placements both" in text


def test_hostile_names_add_no_element_to_the_page(tmp_path: Path) -> None:
    plain, hostile = Elements(page_of(write_run(tmp_path / "a"))), Elements(page_of(hostile_run(tmp_path / "b")))
    assert {tag for tag, _ in hostile.found} == {tag for tag, _ in plain.found}
    assert len(hostile.scripts) == len(plain.scripts) == 1
    for _, attributes in hostile.found:
        assert not any(name.startswith("on") for name in attributes)
    links = [attributes["href"] for tag, attributes in hostile.found if tag == "a"]
    assert all(re.fullmatch(r"#?[a-z_.]+", str(link)) for link in links)


def test_only_our_scripts_may_run_and_nothing_may_be_loaded(tmp_path: Path) -> None:
    elements = Elements(page_of(hostile_run(tmp_path)))
    (policy,) = [
        str(attributes["content"]) for tag, attributes in elements.found if "Content-Security" in str(attributes)
    ]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in elements.scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy
    assert not [tag for tag, attributes in elements.found if "src" in attributes or tag in ("link", "iframe", "object")]


@pytest.mark.slow
def test_a_step_of_ten_thousand_ops_stays_small(tmp_path: Path) -> None:
    names = [f"aten_native_batch_norm_backward_{k}" for k in range(10_000)]
    modules = [f"encoder.layers.{k // 200}.attention.self.query_{k // 40}" for k in range(10_000)]
    text = page_of(write_run(tmp_path, names=names, modules=modules))
    assert len(text.encode()) < MOST_BYTES


def test_a_run_of_failures_has_a_page(tmp_path: Path) -> None:
    rows = [{"method": "single", "placement": True, "status": "error", "why": "it broke"}]
    retable(write_run(tmp_path), rows, "")
    assert "No placement ran to its end." in page_of(tmp_path)


RESULT: dict[str, Any] = {"rows": rows_of(), "best": {"method": "portfolio"}, "measured": True}


def test_the_result_is_a_sentence() -> None:
    assert sentence(data_of({}, RESULT)) == (
        "The best placement, found by portfolio, takes 20.00 ms a step, measured: 0.67 of the best single device's "
        "time and 0.80 of eager PyTorch's."
    )
    assert sentence(data_of({}, {"rows": []})) == "No placement ran to its end."


def test_the_verdict_of_the_second_race_follows() -> None:
    verdict = judge((2.0,) * 8, {"eager": (1.0,) * 8})
    assert sentence(dataclasses.replace(data_of({}, RESULT), verdict=verdict)).endswith(f"beside others: {verdict}.")


def test_the_head_shows_what_where_and_when(tmp_path: Path) -> None:
    head = overview(run_data(write_run(tmp_path)))
    for part in ("inception_v3@small", "20.00 ms", "0.67×", "16.0 MiB", "2 × cpu-core", "2027-01-15", "torch 2"):
        assert part in head
    assert "Simulated" not in head


def test_a_simulated_run_says_so_and_a_strange_time_is_left_out() -> None:
    head = overview(data_of({"versions": [1]}, {**RESULT, "measured": False, "time": 1e18}))
    assert "no step of this run was measured" in head
    assert "finished" not in head


def test_a_hostile_workload_is_text(tmp_path: Path) -> None:
    head = overview(run_data(hostile_run(tmp_path)))
    assert "<script" not in head
    assert HOSTILE[0].replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;") in head


def test_rows_are_in_order_with_ratios_and_reasons() -> None:
    data = data_of({}, {"rows": rows_of(), "best": {"method": "portfolio"}, "measured": True})
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
    body = field_section(data_of({}, {"rows": rows, "best": {"method": "b"}})).body
    assert body.index("b ★") < body.index("<td>a<")
    assert NOT_FASTEST_NOTE not in body


def test_notes_may_wrap_and_words_of_tables_do_not_break() -> None:
    style = (Path(page.__file__).parent / "style.css").read_text()
    rules = dict(re.findall(r"^([^{}@]+?) \{ ([^{}]+?) \}$", style, re.MULTILINE))
    assert [name for name, rule in rules.items() if name.startswith("td") and "nowrap" in rule] == [
        "td.number + td:not(.number):not(:last-child)"  # of spreads; the notes are the last column
    ]
    assert "overflow-wrap: break-word" in rules["td"]
    assert (table(["name"], [["a.b/c_d 1.5 &<b>"]])).count("a.<wbr>b/<wbr>c_d 1.5 &amp;&lt;b&gt;") == 1


def test_a_star_below_a_faster_row_is_explained() -> None:
    body = field_section(data_of({}, {"rows": rows_of(), "best": {"method": "single"}})).body
    assert body.index("single ★") > body.index("<td>portfolio<")
    assert f'<p class="note">{NOT_FASTEST_NOTE}</p>' in body


def test_hostile_methods_are_text() -> None:
    body = field_section(data_of({}, {"rows": rows_of(HOSTILE), "best": {"method": HOSTILE[0]}})).body
    assert "<script" not in body
    assert "<img" not in body
    assert "&lt;script&gt;" in body


def test_a_table_of_failures_can_be_drawn() -> None:
    rows = [{"method": "single", "placement": True, "step_time_s": None, "status": "error", "why": "it broke"}]
    body = field_section(data_of({}, {"rows": rows})).body
    assert "error: it broke" in body
    assert 'class="bar"' not in body


NO_ROWS: dict[str, Any] = {"rows": rows_of()}
FACTOR = LearnedFactor("device", "cpu:1", 0.0953, 0.01, 0.1)


def learned_host(*factors: LearnedFactor, lines: tuple[str, ...] = ()) -> LearnedHost:
    return LearnedHost("cores", "12345678abcdef00", "profiled", Prior(), factors, lines)


def test_lines_and_factors_the_surest_first() -> None:
    unsure = dataclasses.replace(FACTOR, name="unsure", log_mean=0.001)
    section = learned_host_section(data_of({}, NO_ROWS, learned=learned_host(unsure, FACTOR, lines=("cpu:1 is slow",))))
    assert section is not None
    assert "<li>cpu:1 is slow</li>" in section.body
    assert section.body.index(">cpu:1<") < section.body.index(">unsure<")
    assert "1.1×" in section.body
    assert "1.08 to 1.12" in section.body
    assert "10%" in section.body


def test_nothing_learned_is_said_and_no_model_no_section() -> None:
    section = learned_host_section(data_of({}, NO_ROWS, learned=learned_host()))
    assert section is not None
    assert "as profiled" in section.body
    assert learned_host_section(data_of({}, NO_ROWS)) is None


def test_strange_factors_are_left_out_and_names_are_text() -> None:
    strange = dataclasses.replace(FACTOR, log_mean=90.0), dataclasses.replace(FACTOR, name=HOSTILE[0])
    section = learned_host_section(data_of({}, NO_ROWS, learned=learned_host(*strange, lines=(HOSTILE[1],))))
    assert section is not None
    assert "1 of 1 factors" in section.body
    assert "<script" not in section.body


def test_the_command_asks_for_the_same_run() -> None:
    config = {
        "workload": "a model:of(mine)",
        "host": "4xV100-pcie",
        "gangs": True,
        "micro_batches": {"count": 4},
        "train": {"budget_s": 150.0, "seed": 0, "search": {"method": "policy"}, "learn": {"policy": "gnn"}},
    }
    assert command(config) == (
        "rlplace train 'a model:of(mine)' --host 4xV100-pcie --budget 150s --seed 0 --method policy --policy gnn "
        "--gangs --micro-batches 4"
    )
    assert command({"workload": "$(reboot)"}).startswith("rlplace train '$(reboot)'")


def test_what_took_how_long() -> None:
    durations = {"expected": {"search_s": 60.0, "calibration_s": 0.0}, "taken": {"search_s": 75.0, "<b>_s": 5.0}}
    body = what_was_run_section(data_of({}, {"rows": rows_of(), "durations": durations})).body
    assert '<td>search</td><td class="number">1:00</td><td class="number">1:15</td>' in body
    assert "calibration" not in body
    assert "<td>&lt;b&gt;</td>" in body


def test_every_setting_is_listed_and_hostile_ones_are_text() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"down": deep}
    config = {"train": {"seed": 3, "pins": [["a", "b"]]}, HOSTILE[0]: HOSTILE[2], "deep": deep, "none": None}
    body = what_was_run_section(data_of(config, {"rows": rows_of()}, files=("result.json",))).body
    assert "train.<wbr>seed" in body
    assert "<script" not in body
    assert "<img" not in body
    assert '<a href="result.json">' in body


def test_a_config_of_other_types_is_no_reason_to_fail() -> None:
    assert command({"train": [], "micro_batches": 3, "workload": None}) == "rlplace train None --host auto"


def body_of(names: list[str], devices: list[str]) -> str:
    explanation = Explanation.from_dict(explanation_of(names, devices), "explanation.json")
    section = explained_section(data_of({}, {"rows": rows_of()}, explanation=explanation))
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
    assert explained_section(data_of({}, {"rows": rows_of()})) is None


def test_a_disturbed_run_says_so_before_anything_else() -> None:
    data = explanation_of([f"op{k}" for k in range(20)], ["cpu:0", "cpu:1"])
    explanation = Explanation.from_dict({**data, "disturbed": "Disturbed: <b>"}, "explanation.json")
    section = explained_section(data_of({}, {"rows": rows_of()}, explanation=explanation))
    assert section is not None
    assert section.body.startswith('<p class="warning">Disturbed: &lt;b&gt;</p>')
