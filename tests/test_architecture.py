"""The house rules: who may import whom, and what a bare import costs."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import rlplace

ROOT = Path(rlplace.__file__).parent
GROUND = {"errors", "lazy_imports", "files", "jit", "registry", "cuda", "say", "process_settings", "records", "locks"}
"""What everybody may import."""
LAYERS = {
    **{name: set[str]() for name in GROUND},
    "graphs": set(),
    "workloads": {"graphs", "measure"},
    "measure": {"graphs"},
    "search": {"graphs", "measure"},
    "env": {"graphs", "measure", "search", "report", "session", "workloads"},
    "policy": {"graphs", "measure", "env"},
    "report": {"graphs", "measure", "search", "session"},
    "store": {"graphs", "measure"},
    "session": {"graphs", "measure", "search", "store", "workloads"},
    "cluster": {"graphs", "measure", "store"},
    "training": {
        *("graphs", "measure", "search", "store", "env", "policy", "report", "session", "workloads", "cluster"),
    },
    "compare": {
        *("graphs", "measure", "search", "store", "report", "session", "training", "workloads", "cluster", "export"),
    },
    "doctor": {"measure"},
    "advice": {"graphs", "measure", "search", "report", "session", "workloads"},
    "partitioning": {"graphs", "measure", "search", "report", "compare"},
    "export": {"graphs", "measure", "search", "report", "session", "training", "workloads"},
    "cli": {
        *("graphs", "measure", "search", "env", "policy", "report", "session", "training", "workloads"),
        *("export", "compare", "partitioning", "store", "cluster", "doctor", "advice"),
    },
    "__main__": {"cli"},
}
"""What each room may import besides itself and the ground, lazy imports included."""
OPEN_CIRCLES = {
    ("rlplace.measure.hosts.host", "rlplace.measure.hosts.detect"): "`Host.detect` is how users ask for this machine",
    ("rlplace.graphs.opgraph", "rlplace.graphs.formats.networkx_graph"): "`OpGraph.to_networkx` and `from_networkx`",
    (
        "rlplace.measure.problem",
        "rlplace.measure.profiling.profile",
    ): "`Problem.profile` measures what a problem is made of",
}
"""Imports inside a function that close a circle, each for a method that users expect on a class."""
SUBROOMS = {
    "export": {"placed"},
    "graphs": {"capturing", "formats", "grouping", "micro_batching", "splitting"},
    "measure": {"costs", "execute", "explain", "host_model", "hosts", "isolate", "profiling", "simulate", "timing"},
    "policy": {"learn", "weights"},
    "report": {"html"},
    "search": {"improve", "parallel", "rules", "schedule"},
    "training": {"agent", "elastic", "searches"},
    "workloads": {"networks"},
}
"""Folders within rooms; none of them has a folder."""
MOST_FILES, MOST_LINES = 22, 700


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Every module of ours that the file imports anywhere, also inside functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in below}
    return {name for name in found if name.startswith("rlplace.")}


def imports_of(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path)}


def rooms() -> list[str]:
    return sorted(
        {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
        - {"__init__", "__pycache__"}
    )


def test_every_room_has_its_rule() -> None:
    assert rooms() == sorted(LAYERS)


@pytest.mark.parametrize("room", sorted(LAYERS))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = [ROOT / f"{room}.py"] if (ROOT / f"{room}.py").exists() else sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        extra = imports_of(path) - LAYERS[room] - GROUND - {room}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_rooms_have_one_direction() -> None:
    edges = [(room, other) for room, others in LAYERS.items() for other in others]
    assert list(nx.simple_cycles(nx.DiGraph(edges))) == []


def test_there_are_no_circles_but_those_that_are_named() -> None:
    graph = nx.DiGraph()
    for name, path in MODULES.items():
        graph.add_edges_from((name, other) for other in imported(path) & set(MODULES) if other != name)
    for edge in OPEN_CIRCLES:
        assert graph.has_edge(*edge), f"{edge} is no longer needed"
        graph.remove_edge(*edge)
    assert list(nx.simple_cycles(graph)) == []


def test_the_graph_of_rooms_has_no_circle() -> None:
    graph = nx.DiGraph()
    for name, path in MODULES.items():
        room = name.partition(".")[2].partition(".")[0]
        graph.add_edges_from((room, other) for other in imports_of(path) - GROUND - {room} if room)
    assert list(nx.simple_cycles(graph)) == []


def test_folders_of_measure_have_one_direction() -> None:
    """`timing` aside: its races are below hosts, and its runner of placed steps is above them."""
    graph = nx.DiGraph()
    for name in (name for name in MODULES if name.startswith("rlplace.measure.")):
        others = {other for other in imported(MODULES[name]) if (name, other) not in OPEN_CIRCLES}
        folders = {".".join(other.split(".")[:3]) for other in others if other.startswith("rlplace.measure.")}
        graph.add_edges_from((".".join(name.split(".")[:3]), other) for other in folders)
    graph.remove_node("rlplace.measure.timing")
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    assert list(nx.simple_cycles(graph)) == []


def test_train_reaches_few_modules() -> None:
    """Of ours, faces resolved, imports inside functions included: following one `train` opens these."""
    reached = set()
    for node in ast.walk(ast.parse(MODULES["rlplace.training.run"].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlplace."):
            face = importlib.import_module(str(node.module))
            reached |= {getattr(getattr(face, alias.name), "__module__", node.module) for alias in node.names}
    assert len(reached) <= 15, sorted(reached)


def test_partitioning_has_one_door() -> None:
    outside = {name: path for name, path in MODULES.items() if not name.startswith("rlplace.partitioning")}
    for name, path in outside.items():
        assert not [other for other in imported(path) if other.startswith("rlplace.partitioning.")], name


def test_torch_cuda_is_behind_one_module() -> None:
    """The doctor aside: it looks at a `torch` that it is given, also at one that cannot be imported."""
    users = {name for name, path in MODULES.items() if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert {name for name in users if not name.startswith("rlplace.doctor.")} == {"rlplace.cuda"}


@pytest.mark.parametrize(("library", "users"), [("numba", {"jit"}), ("matplotlib", {"report.drawing"})])
def test_what_reads_files_of_the_current_folder_is_imported_by_one_module(library: str, users: set[str]) -> None:
    importing = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    found = {name for name, path in MODULES.items() if importing.search(path.read_text(encoding="utf-8"))}
    assert found == {f"rlplace.{user}" for user in users}


def packages() -> list[Path]:
    return [path.parent for path in sorted(ROOT.rglob("__init__.py"))]


@pytest.mark.parametrize("folder", packages(), ids=lambda path: module_of(path))
def test_a_folder_says_what_belongs_there_and_is_not_too_full(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST_FILES


def test_folders_are_rooms_and_those_of_the_list() -> None:
    folders = {path.parent.relative_to(ROOT).parts for path in ROOT.rglob("*.py")} - {()}
    listed = {(room, name) for room, names in SUBROOMS.items() for name in names}
    assert folders == {(room,) for room in rooms() if (ROOT / room).is_dir()} | listed


def test_a_file_is_a_chapter_and_no_book() -> None:
    long = {name for name, path in MODULES.items() if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES}
    assert {name for name in long if ".kernel_" not in name} == set()


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import rlplace", "import rlplace.cli.main", "import rlplace.errors", "import rlplace.registry"]
)
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
