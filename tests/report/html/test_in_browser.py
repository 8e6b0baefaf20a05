"""The page in a browser: drawn without an error, without a network, readable when narrow or dark, and safe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_chromium import CHROMIUM, Browser
from run_files import HOSTILE, hostile_run, retable, rows_of, write_run

from rlplace.report.html.page import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
DRAWN = "document.documentElement?.dataset.drawn"
FIGURES = ["timeline-figure", "learning-figure", "memory-figure", "fidelity-figure"]
MARKS_OF = "document.querySelectorAll('#{} svg path, #{} svg use').length"
WIDER_THAN_ITS_BOX = """
[...document.querySelectorAll("body *")]
  .filter(one => !one.closest(".wide") && !one.closest("svg") && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.tagName + "." + one.className)
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def assert_sound(browser: Browser, page: Path) -> None:
    assert browser.problems == []
    assert set(browser.requests) == {page.as_uri()}
    assert browser.ask("[...document.querySelectorAll('figure')].map(one => one.id)") == FIGURES
    assert browser.ask(f"{DRAWN}") == str(len(FIGURES))
    for name in FIGURES:
        assert browser.ask(MARKS_OF.format(name, name)) > 3, name


@pytest.mark.parametrize("width", [1200, 400])
def test_every_figure_is_drawn_without_a_network(browser: Browser, tmp_path: Path, width: int) -> None:
    page = write_report(write_run(tmp_path / "run"))
    browser.look(width=width)
    browser.open(page, DRAWN)
    assert_sound(browser, page)
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.ask(WIDER_THAN_ITS_BOX) == []


def test_on_a_phone_all_of_the_timeline_is_in_view(browser: Browser, tmp_path: Path) -> None:
    browser.look(width=420)
    browser.open(write_report(write_run(tmp_path / "run")), DRAWN)
    picture = "document.querySelector('#timeline-figure svg').getBoundingClientRect()"
    assert browser.ask(f"0 <= {picture}.left && {picture}.right <= innerWidth")
    assert browser.ask("document.querySelector('#timeline .minor').offsetParent === null"), "nothing is dragged here"


PATH = "transformer.encoder.layers.0.self_attention.output.dense"
BROKEN_WORDS = """
[...document.querySelectorAll("td")].filter(cell => cell.offsetParent).flatMap(cell => {
  const found = [], walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/[^\\s-]+-?/g)) {
    const range = document.createRange();
    range.setStart(walker.currentNode, word.index);
    range.setEnd(walker.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(line => Math.round(line.top))).size > 1) found.push(word[0]);
  }
  return found;
})
"""


@pytest.mark.parametrize("width", [1300, 420])
def test_no_note_is_clipped_and_no_word_broken(browser: Browser, tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path / "run", names=[PATH.replace("0", str(k)) for k in range(24)])
    noted = [{**row, "why": "its best until a device did not end its part in time " * 3} for row in rows_of()]
    retable(run, [row for row in noted if row["step_time_s"]])
    browser.look(width=width)
    browser.open(write_report(run), DRAWN)
    assert browser.ask(BROKEN_WORDS) == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    tables = (
        "[...document.querySelectorAll('#field .wide, #explained .wide')].map(box => box.scrollWidth - box.clientWidth)"
    )
    assert max(browser.ask(tables)) <= (0 if width == 1300 else 20)


BARS = "document.querySelectorAll('#timeline-figure .view')[{}].querySelectorAll('g[aria-label] path')"


def test_another_way_to_look_at_a_figure_is_a_click_away(browser: Browser, tmp_path: Path) -> None:
    browser.look(width=1200)
    browser.open(write_report(write_run(tmp_path / "run")), DRAWN)
    seen = "[...document.querySelectorAll('#timeline-figure .view')].map(one => one.offsetHeight > 0)"
    assert browser.ask(seen) == [True, False]
    browser.ask("[...document.querySelectorAll('#timeline-figure label')][1].click()")
    assert browser.ask(seen) == [False, True]
    assert browser.ask(f"{BARS.format(1)}.length") == 36
    assert browser.problems == []


def test_pointing_at_an_op_tells_its_name_as_it_is(browser: Browser, tmp_path: Path) -> None:
    browser.look(width=1200)
    browser.open(write_report(hostile_run(tmp_path / "run")), DRAWN)
    browser.point_at("#timeline-figure g[aria-label] path")
    browser.wait_for("!document.querySelector('.tip').hidden")
    told = browser.ask("document.querySelector('.tip').textContent")
    assert told.startswith(HOSTILE[0])
    assert "aten.op.default" in told
    assert browser.ask("document.querySelectorAll('.tip *').length") == 0
    assert browser.problems == []


def test_dragging_zooms_into_the_timeline_and_a_double_click_shows_all_of_it(browser: Browser, tmp_path: Path) -> None:
    browser.look(width=1200)
    browser.open(write_report(write_run(tmp_path / "run")), DRAWN)
    box = "document.querySelector('#timeline-figure svg').getBoundingClientRect()"
    width = f"{BARS.format(0)}[0].getBoundingClientRect().width"
    name = "[...document.querySelectorAll('#timeline-figure text')].find(one => one.textContent === 'cpu:0')"
    before, left = browser.ask(width), browser.ask(f"{name}.getBoundingClientRect().left")
    event = "new MouseEvent('{}', {{bubbles: true, clientX: {}.left + {} * {}.width, clientY: {}.top + 30}})"
    for kind, share in (("mousedown", 0.1), ("mouseup", 0.5)):
        made = event.format(kind, box, share, box, box)
        browser.ask(f"document.querySelector('#timeline-figure svg').dispatchEvent({made})")
    assert browser.ask(width) > 1.5 * before
    assert browser.ask(f"{name}.getBoundingClientRect().left") == pytest.approx(left, abs=1), "names stay"
    browser.ask("document.querySelector('#timeline-figure svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.ask(width) == pytest.approx(before, rel=0.01)
    assert browser.problems == []


def test_the_page_and_its_figures_follow_the_readers_light_or_dark(browser: Browser, tmp_path: Path) -> None:
    browser.look(width=1200)
    browser.open(write_report(write_run(tmp_path / "run")), DRAWN)
    ink = "getComputedStyle(document.querySelector('#memory-figure text')).fill"
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.ask(ink), browser.ask(paper)
    browser.look(width=1200, is_dark=True)
    browser.wait_for(f"{ink} !== '{light[0]}'")
    assert browser.ask(paper) != light[1]
    assert browser.problems == []


def test_hostile_names_are_shown_and_nothing_else_happens(browser: Browser, tmp_path: Path) -> None:
    page = write_report(hostile_run(tmp_path / "run"))
    browser.look(width=400)
    browser.open(page, DRAWN)
    assert_sound(browser, page)
    assert browser.ask("document.title") == "<script>document.title='broken'</script>: rlplace report"
    assert browser.ask("document.querySelector('h1').textContent").startswith("<script>document.title")
    assert browser.ask("document.querySelectorAll('body img, svg a, main iframe').length") == 0
    assert browser.ask("document.documentElement.scrollWidth") == 400


def test_without_javascript_pictures_and_tables_are_there(browser: Browser, tmp_path: Path) -> None:
    browser.look(width=1200)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.call("Page.navigate", url=write_report(write_run(tmp_path / "run")).as_uri())
    browser.wait_for("document.querySelector('footer')")
    assert browser.ask("[...document.querySelectorAll('figure')].every(one => one.offsetHeight > 50)")
    assert browser.ask("document.querySelectorAll('table').length") > 5
