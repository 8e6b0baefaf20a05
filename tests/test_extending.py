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
from fake_measurer import TimingMeasurer, chain_problem
from run_folders import run_of_problem
from safetensors.numpy import load_file
from search_problems import barred, brute_force_s, fork_problem

from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.export import FORMATS
from rlplace.files import read_json
from rlplace.graphs import capture, save_graph
from rlplace.measure import Problem, Simulator
from rlplace.policy import LEARNERS, POLICIES, LearnConfig, Learner, Policy
from rlplace.registry import Registry
from rlplace.search.methods import METHODS, SearchResult, find
from rlplace.search.task import Budget
from rlplace.session.folder import RunFolder
from rlplace.training import SearchConfig, train
from rlplace.workloads import CATALOG, build

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
MOST_LINES = 24
"""Of code; blank ones do not count."""


def block(section: str, language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], flags=re.DOTALL)
    return str(code)


@contextmanager
def example(section: str, registry: Registry[object], folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Imports a section's example from `folder`; the one name that it registers is gone again afterwards."""
    before = set(registry)
    module = f"my_{section.split()[-1]}"
    (folder / f"{module}.py").write_text(block(section, "python"), encoding="utf-8")
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, module, raising=False)
    importlib.import_module(module)
    (name,) = set(registry) - before
    try:
        yield name
    finally:
        registry.unregister(name)


def say_installed(sections: str | tuple[str, ...], folder: Path, *arguments: str, entry: str = "") -> str:
    """What `rlplace` prints (stderr, then stdout) if an installed package brings sections' examples by entry points.

    Args:
        sections: of the page; all in one package.
        folder: where the package goes.
        arguments: of `rlplace`.
        entry: what stands in the package for the last line of each example, which registers it.
    """
    code: list[str] = []
    points: list[str] = []
    for section in (sections,) if isinstance(sections, str) else sections:
        *lines, registering = block(section, "python").splitlines()
        assert "register" in registering
        code += [*lines, entry]
        ((group, homes),) = tomllib.loads(block(section, "toml"))["project"]["entry-points"].items()
        points += [f"[{group}]", *(f"{name} = {home}" for name, home in homes.items())]
    (folder / "my_package.py").write_text("\n".join(code), encoding="utf-8")
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("\n".join(points), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "rlplace.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.parametrize("section", SECTIONS)
def test_every_example_is_short_and_has_its_registry_in_the_table(section: str) -> None:
    assert 0 < len([line for line in block(section, "python").splitlines() if line.strip()]) <= MOST_LINES
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
    return run_of_problem(tmp_path / "run", "nmt@small", problem, devices, seed=3)


@pytest.mark.slow
def test_the_export_format(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with example("An export format", FORMATS, tmp_path, monkeypatch) as name:
        assert main(["export", str(run.root), "--format", name]) == 0
    written = (run.root / "placement.md").read_text(encoding="utf-8")
    assert re.findall(r"\| (\d+) \|", written) == ["2", "4"]
    assert say_installed("An export format", tmp_path, "export", str(run.root), "--format", name).startswith("wrote ")
    assert (run.root / "placement.md").read_text(encoding="utf-8") == written


@pytest.mark.slow
def test_the_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with example("A workload", CATALOG, tmp_path, monkeypatch) as name:
        work = build(f"{name}@layers=8")
        graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    assert graph.targets.count("parameter") == 2 * 8
    (family,) = re.findall(r"`(MLP = .*?)`", SECTIONS["A workload"])
    said = say_installed("A workload", tmp_path, "workloads", entry=f"from rlplace.workloads import Family\n{family}")
    assert [name, "small", "not", "counted", "layers=4"] in [line.split() for line in said.splitlines()]


def search(problem: Problem, method: str, evaluations: int, config: LearnConfig | None = None) -> SearchResult:
    options = {} if config is None else {"config": config}
    return find(problem, method, Simulator(problem, threads=1), Budget(evaluations=evaluations), seed=1, **options)


@pytest.fixture
def fork_file(tmp_path: Path) -> str:
    """A graph file of six ops: a workload for a simulated host."""
    save_graph(fork_problem(seed=0).graph, tmp_path / "fork.json")
    return str(tmp_path / "fork.json")


@pytest.mark.slow
def test_the_search_method(fork_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = barred(fork_problem(seed=0), {2: (1,)})
    with example("A search method", METHODS, tmp_path, monkeypatch) as name:
        found = search(problem, name, 200)
        trained = train(problem, budget_s=0.2, search=SearchConfig(method=name))
    assert found.evaluations == 200
    assert found.devices is not None
    assert found.step_time_s == Simulator(problem).step_times(found.devices[None])[0]
    assert found.step_time_s == pytest.approx(brute_force_s(problem), rel=1e-12)
    assert trained.table.row(name)["status"] == "ok"
    compare = ("compare", fork_file, "--host", "2xK80", "--methods", name, "--evaluations", "20")
    (row,) = (line for line in say_installed("A search method", tmp_path, *compare).splitlines() if "20 eval" in line)
    assert row.startswith(f"{name} (seed 0): ")


def test_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = barred(chain_problem(3), {1: (0,)})
    with example("A policy", POLICIES, tmp_path, monkeypatch) as name:
        policy = POLICIES[name](problem, LearnConfig(), 0)
        assert isinstance(policy, Policy)
        with pytest.raises(InvalidValue, match="TablePolicy"):
            LEARNERS["ppo"](policy, LearnConfig(), 0)
    assert (policy.num_groups, policy.num_devices) == (3, 2)
    may = np.array([[a, 0, b] for a in (0, 1) for b in (0, 1)], dtype=np.int32)
    assert policy.log_prob(may).exp().tolist() == pytest.approx([0.25] * 4)
    draws = policy.sample(400, np.random.default_rng(0))
    assert {tuple(row) for row in draws.tolist()} == {tuple(row) for row in may.tolist()}
    assert np.array_equal(draws, policy.sample(400, np.random.default_rng(0)))
    policy.save(tmp_path / "policy.safetensors")
    assert load_file(tmp_path / "policy.safetensors")["table_GD"].shape == (3, 2)


@pytest.mark.parametrize("name", ["table", "placer"])
def test_the_learner(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [0, 1, 1, 0, 0, 1]
    measurer = TimingMeasurer(chain_problem(6), wanted=wanted)
    with (
        example("A policy", POLICIES, tmp_path, monkeypatch),
        example("A learner", LEARNERS, tmp_path, monkeypatch) as learner,
    ):
        config = LearnConfig(policy=name, learner=learner, init="none", share=1.0, num_samples=32)
        found = find(measurer.problem, "policy", measurer, Budget(evaluations=640), seed=0, config=config)
        policy = POLICIES[name](measurer.problem, config, 0)
        made = LEARNERS[learner](policy, config, 0)
    assert isinstance(made, Learner)
    made.imitate(np.array(wanted))
    assert policy.mode().tolist() == wanted
    assert isinstance(found.learned, Policy)
    assert found.learned.mode().tolist() == wanted


@pytest.mark.slow
def test_the_policy_and_its_learner_as_a_package(fork_file: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_it = ("train", fork_file, "--host", "2xK80", "--budget", "2s", "--run", str(run), "--groups", "6")
    chosen = ("--policy", "table", "--learner", "plain")
    assert "best: " in say_installed(("A policy", "A learner"), tmp_path, *train_it, *chosen)
    assert load_file(run / "policy.safetensors")["table_GD"].shape == (6, 2)
    assert read_json(run / "config.json")["train"]["learn"]["learner"] == "plain"
