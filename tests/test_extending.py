"""docs/extending.md is run: what a section shows is registered and used, here and as an installed package."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from search_problems import fork_problem

from rlplace.cli.main import main
from rlplace.export import FORMATS
from rlplace.graphs import capture
from rlplace.measure import Placement, Simulator
from rlplace.measure.placement import save_placement
from rlplace.registry import Registry
from rlplace.runs.folder import RunFolder
from rlplace.runs.setup import describe_problem
from rlplace.workloads import CATALOG, build

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
MOST_LINES = 24


def block(section: str, language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], flags=re.DOTALL)
    return str(code)


@contextmanager
def example(section: str, registry: Registry[object], folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Imports a section's example from `folder`; the one name that it registers is gone again afterwards."""
    before = set(registry)
    (folder / "my_module.py").write_text(block(section, "python"), encoding="utf-8")
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, "my_module", raising=False)
    importlib.import_module("my_module")
    (name,) = set(registry) - before
    try:
        yield name
    finally:
        registry.unregister(name)


def say_installed(section: str, folder: Path, *arguments: str, entry: str = "") -> str:
    """What `rlplace` says to people where a section's example is an installed package with the entry point shown.

    Args:
        section: of the page.
        folder: where the package goes.
        arguments: of `rlplace`.
        entry: what stands in the package for the last line of the example, which registers it.
    """
    *code, registering = block(section, "python").splitlines()
    assert "register" in registering
    (folder / "my_package.py").write_text("\n".join([*code, entry]), encoding="utf-8")
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n", encoding="utf-8")
    ((group, points),) = tomllib.loads(block(section, "toml"))["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {home}" for name, home in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "rlplace.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("section", SECTIONS)
def test_every_example_is_short_and_has_its_registry_in_the_table(section: str) -> None:
    assert 0 < len(block(section, "python").strip().splitlines()) <= MOST_LINES
    assert f"\n| {section.split(maxsplit=1)[1]} | `" in PAGE


def test_the_registries_are_where_the_page_says() -> None:
    rows = re.findall(r"^\| .+ \| `(rlplace\.\S+)\.(\w+)` \| `(rlplace\.\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == len(SECTIONS)
    for module, name, group in rows:
        registry = getattr(importlib.import_module(module), name)
        assert isinstance(registry, Registry)
        assert registry.group == group


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of six ops, two on the first device and four on the second."""
    problem, devices = fork_problem(seed=0), np.array([0, 1, 1, 0, 1, 1], dtype=np.int32)
    folder = RunFolder.create(tmp_path / "run")
    folder.write_json("config.json", {"workload": "nmt@small", "default_size": "small", "train": {"seed": 3}})
    folder.write_json("problem.json", describe_problem(problem))
    save_placement(Placement.of(problem, Simulator(problem).plan(devices)), folder.path("placement.json"))
    return folder


def test_the_export_format(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with example("An export format", FORMATS, tmp_path, monkeypatch) as name:
        assert main(["export", str(run.root), "--format", name]) == 0
    written = (run.root / "placement.md").read_text(encoding="utf-8")
    assert re.findall(r"\| (\d+) \|", written) == ["2", "4"]
    assert say_installed("An export format", tmp_path, "export", str(run.root), "--format", name).startswith("wrote ")
    assert (run.root / "placement.md").read_text(encoding="utf-8") == written


def test_the_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with example("A workload", CATALOG, tmp_path, monkeypatch) as name:
        work = build(f"{name}@layers=8")
        graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    assert graph.targets.count("parameter") == 2 * 8
    (family,) = re.findall(r"`(MLP = .*?)`", SECTIONS["A workload"])
    said = say_installed("A workload", tmp_path, "workloads", entry=f"from rlplace.workloads import Family\n{family}")
    assert [name, "small", "not", "counted", "layers=4"] in [line.split() for line in said.splitlines()]
