"""Kernels that are kept on disk."""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlplace
from rlplace import jit
from rlplace.jit import Block, Floats, IntTable, is_kept, kernel

MODULE = """from rlplace.jit import kernel

@kernel
def doubled(x):
    return 2 * x
"""
PACKAGE = Path(rlplace.__file__).parent


def test_a_kernel_is_kept_once_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    path = tmp_path / "one_kernel.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("one_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not is_kept(module.doubled)
    assert module.doubled(21) == 42
    assert is_kept(module.doubled)


HELPER = """from rlplace.jit import inlined

OFFSET = {offset}

@inlined
def scaled(x):
    return {factor} * x
"""
CALLER = """from rlplace.helper import OFFSET, scaled
from rlplace.jit import is_kept, kernel

@kernel
def moved(x):
    return scaled(x) + OFFSET
"""
ASK = "from rlplace.caller import is_kept, moved; print(is_kept(moved), moved(10))"


def test_without_a_folder_that_can_be_written_to_a_kernel_is_compiled_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nowhere:
        def __init__(self, function: Callable[..., Any]) -> None:
            raise RuntimeError(f"cannot cache function {function.__name__!r}: no locator available")

    monkeypatch.setattr(jit, "_Cache", Nowhere)
    monkeypatch.setenv(jit._TOLD, "")
    monkeypatch.delenv(jit._TOLD)
    jit._warn_not_kept.cache_clear()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as told:
        made = [jit.kernel(lambda x, k=k: k * x) for k in (2, 3)]
    assert [each(5) for each in made] == [10, 15]
    assert len(told) == 1
    jit._warn_not_kept.cache_clear()


def test_a_full_disk_stops_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.FunctionCache, "save_overload", full)
    monkeypatch.setenv(jit._TOLD, "")
    monkeypatch.delenv(jit._TOLD)
    jit._warn_not_kept.cache_clear()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert jit.kernel(_plus_one)(1) == 2
    jit._warn_not_kept.cache_clear()


def _plus_one(x: int) -> int:
    return x + 1


def test_an_edit_of_what_is_compiled_into_a_kernel_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "rlplace"
    package.mkdir()
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, package)
    (package / "caller.py").write_text(CALLER)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def asked(factor: int, offset: int) -> str:
        (package / "helper.py").write_text(HELPER.format(factor=factor, offset=offset))
        done = subprocess.run(
            [sys.executable, "-B", "-c", ASK],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert asked(2, 0) == "False 20"
    assert asked(2, 0) == "True 20"
    assert asked(101, 0) == "False 1010"
    assert asked(101, 3) == "False 1013"
    assert len(list((package / "__pycache__").glob("caller.moved-*.nbi"))) == 1  # those of other sources are removed


class Inner(Block):
    weights: Floats
    scale: float


class Outer(Block):
    count: int
    is_scaled: bool
    table: IntTable
    inner: Inner


@kernel
def weighted(o: Outer, row: int) -> float:
    total = 0.0
    for column in range(o.count):
        total += o.table[row, column] * o.inner.weights[column] * (o.inner.scale if o.is_scaled else 1.0)
    return total + len(o.inner.weights) + o.table.shape[0]


def test_a_kernel_reads_the_fields_of_a_block_and_of_those_within() -> None:
    inner = Inner(np.array([1.0, 10.0, 100.0]), 0.5)
    outer = Outer(count=3, is_scaled=True, table=np.arange(6, dtype=np.int32).reshape(2, 3), inner=inner)
    assert weighted(outer, 1) == (3 + 40 + 500) * 0.5 + 3 + 2
    assert weighted(outer.replace(is_scaled=False, count=2), 0) == 10 + 3 + 2
    inner.weights[0] = 7.0  # the block holds the array itself
    assert weighted(outer, 1) == (21 + 40 + 500) * 0.5 + 3 + 2
    assert weighted(copy.deepcopy(outer), 1) == (21 + 40 + 500) * 0.5 + 3 + 2


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": np.zeros(3)},
        {"weights": np.zeros(3, np.float32), "scale": 1.0},
        {"weights": np.zeros((3, 1)), "scale": 1.0},
        {"weights": np.zeros(6)[::2], "scale": 1.0},
        {"weights": np.zeros(3), "scale": 1.0, "other": 1},
    ],
    ids=["missing", "dtype", "dimensions", "layout", "unknown"],
)
def test_a_block_refuses_what_a_kernel_would_misread(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Inner(**fields)


def test_a_block_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Inner(np.zeros(1), 1.0).scale = 2.0  # type: ignore[misc]


@pytest.mark.slow
def test_all_that_kernels_are_made_of_stands_in_files_that_the_cache_looks_at() -> None:
    trees = {path: ast.parse(text) for path in PACKAGE.rglob("*.py") if "rlplace.jit" in (text := path.read_text())}
    assert len(trees) > 20
    for path, tree in trees.items():
        homes = {
            name.asname or name.name: PACKAGE.parent / f"{(node.module or '').replace('.', '/')}.py"
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlplace.")
            for name in node.names
        }
        homes = {name: home for name, home in homes.items() if home not in (*trees, PACKAGE / "jit.py")}
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id in ("kernel", "inlined") for mark in function.decorator_list
            ):
                body = [function.args, *function.body]
                used = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
                assert not used & set(homes), f"{path.name}: {function.name}"
