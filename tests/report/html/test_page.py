from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_files import change, hostile_run, write_run

from rlplace.errors import MissingExtra
from rlplace.report.html import page, report_page
from rlplace.report.html.page import SECTIONS, plotly_script
from rlplace.runs.report import read_run
from rlplace.session.folder import RunFolder

MOST_BYTES_BESIDE_PLOTLY = 1_000_000


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
    return report_page(read_run(RunFolder.open(folder)))


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
    for name in ("timeline", "search", "host_model", "explanation", "problem"):
        (tmp_path / f"{name}.json").unlink()
    text = page_of(tmp_path)
    assert re.findall(r'<section id="([a-z]+)"', text) == ["field", "run"]
    assert "left out: a timeline, an explanation, the history of a search, memory over time, placements both" in text


def test_hostile_names_add_no_element_to_the_page(tmp_path: Path) -> None:
    plain, hostile = Elements(page_of(write_run(tmp_path / "a"))), Elements(page_of(hostile_run(tmp_path / "b")))
    assert {tag for tag, _ in hostile.found} == {tag for tag, _ in plain.found}
    assert len(hostile.scripts) == len(plain.scripts) == 3
    for _, attributes in hostile.found:
        assert not any(name.startswith("on") for name in attributes)
    links = [attributes["href"] for tag, attributes in hostile.found if tag == "a"]
    assert all(re.fullmatch(r"#?[a-z_.]+", str(link)) for link in links)


def test_only_our_scripts_may_run_and_nothing_may_be_loaded(tmp_path: Path) -> None:
    elements = Elements(page_of(hostile_run(tmp_path)))
    (policy,) = [
        str(attributes["content"]) for tag, attributes in elements.found if "Content-Security" in str(attributes)
    ]
    data, *run = elements.scripts
    assert json.loads(data)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run]
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
    assert len(text.encode()) - len(plotly_script().encode()) < MOST_BYTES_BESIDE_PLOTLY


def test_the_page_is_plotly_and_little_more(tmp_path: Path) -> None:
    text, plotly = page_of(write_run(tmp_path)), plotly_script()
    assert plotly in text
    assert len(text.encode()) - len(plotly.encode()) < MOST_BYTES_BESIDE_PLOTLY
    assert "</script" not in plotly


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install plotly"):
        plotly_script()


def test_a_run_of_failures_has_a_page(tmp_path: Path) -> None:
    rows = [{"method": "single", "placement": True, "status": "error", "why": "it broke"}]
    change(write_run(tmp_path), "result.json", rows=rows, best={"method": "", "step_time_s": None})
    assert "No placement ran to its end." in page_of(tmp_path)
