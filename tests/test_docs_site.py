"""The documentation site: it builds strictly, needs no network, and has a place for every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rlplace

mkdocs = pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_a_page_is_listed_once() -> None:
    pages = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(pages) == sorted(set(pages))


@pytest.mark.slow
def test_every_page_and_result_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    for page in (ROOT / "benchmarks" / "results").glob("*.md"):
        assert (site / "results" / f"{page.stem}.html").is_file(), page
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="examples/place_a_model.html"' in text
    assert 'href="results/core.html"' in text


@pytest.mark.slow
def test_it_needs_no_network(site: Path) -> None:
    loaded = r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"'
    for page in site.rglob("*.html"):
        assert re.findall(loaded, page.read_text(encoding="utf-8")) == [], page


@pytest.mark.slow
def test_every_public_name_has_its_place(site: Path) -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    headings = set(re.findall(r'id="rlplace\.[\w.]*?(\w+)"', shown))
    assert [name for name in rlplace.__all__ if name not in headings and not name.startswith("__")] == []


@pytest.mark.slow
def test_links_out_of_the_site_are_plain_text_and_others_lead_to_pages(site: Path) -> None:
    text = (site / "capture-and-run.html").read_text(encoding="utf-8")
    assert 'href="training-loops.html#shapes"' in text
    for page in set(site.glob("*.html")) - {site / "404.html"}:
        for target in re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import importlib

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("script", ["docs_hooks"], indirect=True)
def test_links_are_moved_and_code_is_left_alone(script: ModuleType) -> None:
    class All:
        def get_file_from_path(self, path: str) -> str:
            return path

    def moved(line: str, uri: str = "training.md") -> str:
        home = script.source_of(uri).parent
        return str(script.LINK_OR_CODE.sub(lambda match: script.moved(match, home, uri, All()), line))

    assert moved("[r](../benchmarks/results/core.md#all)") == "[r](results/core.md#all)"
    assert moved("![p](pictures/x.png)") == "![p](pictures/x.png)"
    assert moved("[e](../examples/training_loop.py), [s](../rlplace/say.py)") == "[e](examples/training_loop.md), s"
    assert moved("`a[0](b)` and [w](https://x.y/z)") == "`a[0](b)` and [w](https://x.y/z)"
    assert moved("[t](../training.md)", "api/training.md") == "[t](../training.md)"
    assert moved("[t](core-true.md)", "results/core.md") == "[t](core-true.md)"


@pytest.mark.parametrize("script", ["docs_doctests"], indirect=True)
def test_doctests_are_fenced_where_they_are(script: ModuleType) -> None:
    text = "One.\n\nExample:\n    >>> 1 + 1\n    2\n\nMore.\n\n>>> [3]\n[3]"
    assert script.fenced(text).splitlines() == [
        *("One.", "", "Example:", "    ```pycon", "    >>> 1 + 1", "    2", "    ```", "", "More.", ""),
        *("```pycon", ">>> [3]", "[3]", "```"),
    ]
