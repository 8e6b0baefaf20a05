"""A folder that somebody sent you is the current one: commands import nothing from there but users' functions."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import rlplace

HOME = str(Path(rlplace.__file__).parents[1])
MARK = """import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran"), "a") as file:
    file.write(__name__ + " ")
raise ImportError(__name__)
"""
MINE = """import torch

@torch.library.custom_op("mine::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@halve.register_fake
def _(x):
    return torch.empty_like(x)

class Halved(torch.nn.Module):
    def forward(self, x):
        return halve(x)

def make():
    return Halved(), torch.ones(4, 3)
"""
PROFILES = """
import os, sys, torch
os.chdir(sys.argv[1])
import rlplace
from rlplace.measure.isolate.isolated_runner import profile_isolated
from rlplace.workloads import build, parse_workload
model, inputs = torch.nn.Linear(3, 2), torch.ones(4, 3)
for function in sys.argv[2:]:
    work = build(parse_workload(function))
    model, inputs = work.model, work.inputs
graph = rlplace.capture(model, inputs)
costs = profile_isolated(graph, rlplace.Host.detect("cores"), num_steps=1, warmup=1, isolated=True)
print(costs.source)
"""
REPLICAS = """
from rlplace.compare.replicas import Replicas, ReplicaTeam
from rlplace.measure.hosts.host import Device
if __name__ == "__main__":
    core = Device("cpu:0", "core", "cpu", 1 << 30)
    ReplicaTeam(Replicas("ddp", {"only": {"workload": "mine:make"}}), [core]).close()
"""

KERNEL = """from rlplace.jit import kernel

@kernel
def doubled(x):
    return 2 * x
"""
DRAWS = """
import rlplace.report
rlplace.report.save_fidelity_png("a.png", [0.1], [0.1], ["a"], {})
from matplotlib import rcParams, pyplot
assert not rcParams["text.usetex"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With modules that PyTorch and others ask for, or that a process begins with."""
    for name in ("triton", "torch", "numpy", "networkx", "numba", "tyro", "multiprocessing", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(MARK)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def ran_of(folder: Path, *arguments: str, cwd: Path, path: str = "") -> str:
    """Names of the modules in the folder that ran."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no worker can be had" not in done.stderr
    return (folder / "ran").read_text() if (folder / "ran").exists() else ""


@pytest.mark.slow
def test_a_worker_imports_nothing_of_it(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    assert ran_of(folder, "-P", "-c", PROFILES, str(folder), cwd=elsewhere, path=f".{os.pathsep}") == ""


@pytest.mark.slow
def test_a_worker_has_the_module_of_a_users_function(folder: Path) -> None:
    (folder / "triton.py").unlink()  # PyTorch asks for it again while it runs ops of users
    assert ran_of(folder, "-P", "-c", PROFILES, str(folder), "mine:make", cwd=folder) == ""


def test_python_with_m_imports_nothing_of_it(folder: Path) -> None:
    (folder / "sitecustomize.py").unlink()
    for name in ("__future__", "typing", "re", "enum", "ast", "pathlib", "dataclasses", "json"):
        (folder / f"{name}.py").write_text(MARK)
    for words in (("-m", "rlplace"), ("-mrlplace",), ("-um", "rlplace"), ("-m", "rlplace.__main__")):
        assert ran_of(folder, *words, "hosts", "2xK80", cwd=folder, path=HOME) == ""


def test_a_program_of_the_users_imports_from_its_folder_as_before(tmp_path: Path) -> None:
    """`python -m mine`, where `mine` imports rlplace, as `mine.rlplace` or anything else that is not rlplace itself."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import rlplace\n")
    (tmp_path / "mine" / "rlplace.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("print('found')\n")
    command = [sys.executable, "-m", "mine.rlplace", "rlplace"]
    done = subprocess.check_output(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": HOME}, text=True)
    assert done == "found\n"


@pytest.mark.slow
def test_replicas_begin_without_it(folder: Path) -> None:
    script = folder / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(REPLICAS)
    assert ran_of(folder, str(script), cwd=folder) == ""


class Opening:
    """What, unpickled, makes the file `ran` in the current folder."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("ran", "w")


@pytest.mark.parametrize("before", ["", "import numba; "])
def test_kernels_are_kept_nowhere_that_it_names(before: str, tmp_path: Path) -> None:
    folder, package = tmp_path / "gift", tmp_path / "package"
    folder.mkdir()
    package.mkdir()
    (package / "own_kernel.py").write_text(KERNEL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment["PYTHONPATH"] = str(package)

    def called(code: str, **variables: str) -> str:
        command = [sys.executable, "-P", "-c", code + "from own_kernel import doubled; print(doubled(21))"]
        return subprocess.check_output(command, cwd=folder, env=environment | variables, text=True)

    assert called("", NUMBA_CACHE_DIR="kernels") == "42\n"
    (index,) = folder.glob("kernels/*/*.nbi")
    index.write_bytes(pickle.dumps(Opening()))
    (folder / ".numba_config.yaml").write_text("cache_dir: kernels\ncache_locator_classes: nobody.Nothing\n")
    assert called(before) == "42\n"
    assert not (folder / "ran").exists()
    assert index.read_bytes() == pickle.dumps(Opening())


@pytest.mark.parametrize("unknown", ["", "cache"])
def test_kernels_are_kept_nowhere_below_it_where_no_home_is_known(unknown: str, tmp_path: Path) -> None:
    folder, package, kept = (tmp_path / name for name in ("gift", "package", "kept"))
    for each in (folder, package, kept):
        each.mkdir()
    (package / "own_kernel.py").write_text(KERNEL)
    (package / "__pycache__").write_text("a file: kernels are not kept beside the module")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(package), HOME))
    command = [sys.executable, "-P", "-c", "from own_kernel import doubled; print(doubled(21))"]

    def called(cache: str) -> str:
        return subprocess.check_output(command, cwd=folder, env=environment | {"XDG_CACHE_HOME": cache}, text=True)

    assert called(str(kept)) == "42\n"
    (index,) = kept.glob("numba/*/own_kernel*.nbi")
    there = folder / unknown / index.relative_to(kept)
    there.parent.mkdir(parents=True)
    there.write_bytes(pickle.dumps(Opening()))
    assert called(unknown) == "42\n"
    assert not (folder / "ran").exists()
    assert there.read_bytes() == pickle.dumps(Opening())


def test_pictures_are_drawn_without_its_settings(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: module://stranger\n")
    (tmp_path / "stranger.py").write_text(MARK)
    assert ran_of(tmp_path, "-c", DRAWS, cwd=tmp_path) == ""
    assert (tmp_path / "a.png").stat().st_size > 1000
