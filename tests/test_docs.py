"""What the documents show is run, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readmes_python_runs() -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    assert len(code.strip().splitlines()) <= 10
    small = code.replace("budget_s=60", "budget_s=2")
    assert small.count("budget_s=2") == 1
    names: dict[str, object] = {}
    exec(compile(small, "README.md", "exec"), names)
    assert float(names["loss"]) > 0  # type: ignore[arg-type]


def test_the_readmes_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from rlplace.cli.main import COMMANDS

    known = set(COMMANDS)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        line.split()[2]
        for page in pages
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ rlplace ")
    }
    assert shown
    assert shown <= known
    targets = {
        line.split()[2]
        for block in blocks(ROOT / "README.md", "console")
        for line in block.splitlines()
        if line.startswith("$ make ")
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize("path", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_every_method_is_in_the_docs() -> None:
    from rlplace.compare.pytorch_baselines import BASELINES
    from rlplace.training.method_choice import METHODS

    text = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
    assert [name for name in (*METHODS, *BASELINES) if f"`{name}`" not in text] == []


def test_every_export_format_is_in_the_docs() -> None:
    from rlplace.export import FORMATS

    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert [name for name, entry in FORMATS.items() if f"| `{entry.file}` |" not in text] == []


def test_pages_are_short() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").glob("*.md")}
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500
    assert {name: count for name, count in words.items() if count > 2500} == {}


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    for block in blocks(ROOT / "docs" / "tutorial.md", "python"):
        exec(compile(block.replace("budget_s=5", "budget_s=2"), "tutorial.md", "exec"), names)
    assert float(names["loss"]) > 0
    assert (tmp_path / "placement.json").is_file()
    assert names["step"].table is not None


@pytest.mark.slow
def test_the_python_about_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    code = blocks(ROOT / "docs" / "training-in-python.md", "python")
    assert len(code) == 3
    monkeypatch.chdir(tmp_path)
    for block in code:
        exec(compile(block, "training-in-python.md", "exec"), names)
    assert set(names["METHODS"]) >= {"learned", "policy", "anneal"}
    assert {"policy", "portfolio"} <= {row["method"] for row in names["result"].table.rows}
    assert "anneal" in {row["method"] for row in names["again"].table.rows}
    assert names["found"].evaluations == 300
    assert names["found"].learned.num_groups == names["problem"].grouping.num_groups
    assert names["learned"].history[-1].measurements <= 16
    assert (tmp_path / "host_model.json").is_file()


@pytest.mark.slow
def test_the_python_about_processes_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPLACE_IN_PROCESS", raising=False)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "processes.md", "python"):
        exec(compile(block, "processes.md", "exec"), names)
    assert names["losses"][-1] < names["losses"][0]
    assert names["seconds"]["4xV100-pcie-procs"] < names["seconds"]["4xV100-pcie"]


@pytest.mark.slow
def test_the_python_about_policies_runs() -> None:
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "policies.md", "python"):
        exec(compile(block, "policies.md", "exec"), names)
    assert names["guided"].learned.num_groups == names["problem"].grouping.num_groups
    assert max(names[found].evaluations for found in ("alone", "joint", "guided")) <= 200


def test_every_policy_and_learner_has_its_place_in_the_docs() -> None:
    from rlplace.policy import LEARNERS, POLICIES

    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert [name for name in (*POLICIES, *LEARNERS) if f"| `{name}` |" not in text] == []
    assert [name for name in POLICIES if f"\n## `{name}`" not in text] == []


def test_the_options_of_training_exist_and_default_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    from rlplace.cli.main import main

    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    parts = re.split(r"(?<=\s)(--[a-z][a-z.-]+)", re.sub(r"[\s│]+", " ", capsys.readouterr().out))
    told = dict(zip(parts[1::2], parts[2::2], strict=True))
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z.-]+", text)) <= {*told, "--help", "--help-all", "--evaluations"}
    shown = re.findall(r"^\| `(--[a-z.-]+) ([\d.]+)`", text, flags=re.MULTILINE)
    assert len(shown) == 4
    for option, default in shown:
        (said,) = re.findall(r"\(default: ([\d.]+)\)", told[option])
        assert float(said) == float(default), option


def test_ratios_of_times_point_one_way() -> None:
    """Step time over a reference: below 1 is better, in tables as in prose."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
    sources = [*(ROOT / "rlplace").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    other_way = re.compile(r"\d ?(?:×|x|times) (?:as fast|faster)|times as fast|\bspeed-?ups?\b(?!\")", re.IGNORECASE)
    found = {path.name: other_way.findall(path.read_text(encoding="utf-8")) for path in (*pages, *sources)}
    assert {name: words for name, words in found.items() if words} == {}
