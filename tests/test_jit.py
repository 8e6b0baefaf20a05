"""Kernels that are kept on disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlplace.jit import is_kept

MODULE = """from rlplace.jit import kernel

@kernel
def doubled(x):
    return 2 * x
"""


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
