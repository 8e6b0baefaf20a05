"""The house rules: who may import whom, and what a bare import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlplace

ROOT = Path(rlplace.__file__).parent
EVERYONE = {"errors", "files"}
FACE = {"training", "compare", "export", "report", "cli", "workloads"}
ALLOWED = {
    "errors": set(),
    "files": set(),
    "graphs": set(),
    "workloads": set(),
    "measure": {"graphs"},
    "search": {"graphs", "measure"},
    "env": {"graphs", "measure", "search"},
    "policy": {"graphs", "measure", "env"},
    "report": {"graphs", "measure"},
    "training": {"graphs", "measure", "search", "env", "policy", "report", "workloads", "export"},
    "compare": {"graphs", "measure", "search", "report", "training", "workloads"},
    "export": {"graphs", "measure", "training", "workloads"},
    "cli": {"graphs", "measure", "search", "env", "policy", "report", "training", "workloads", "export",
            "compare"},
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module] if node.module != "rlplace" else [f"rlplace.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("rlplace.")}
    return rooms


def rooms() -> list[str]:
    return sorted(
        {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
        - {"__init__", "__pycache__"}
    )


def test_every_room_has_its_rule() -> None:
    assert rooms() == sorted(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = [ROOT / f"{room}.py"] if (ROOT / f"{room}.py").exists() else sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        extra = imports_of(path) - ALLOWED[room] - EVERYONE - {room, "__version__"}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import rlplace", "import rlplace.cli.main", "import rlplace.errors"])
def test_a_bare_import_loads_nothing_heavy(statement: str) -> None:
    assert not loaded_by(statement) & {"torch", "wandb", "matplotlib", "numba", "stable_baselines3", "numpy"}


def test_the_face_is_complete() -> None:
    for name in rlplace.__all__:
        assert getattr(rlplace, name) is not None
    with pytest.raises(AttributeError):
        _ = rlplace.no_such_name


def test_nothing_that_is_loaded_can_run_code() -> None:
    forbidden = {"pickle.load", "pickle.loads", "torch.load", "eval", "PPO.load", "yaml.unsafe_load", "yaml.full_load"}
    for path in ROOT.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        assert not {ast.unparse(call.func) for call in calls} & forbidden, path
        assert "yaml.Loader" not in path.read_text(encoding="utf-8"), path
