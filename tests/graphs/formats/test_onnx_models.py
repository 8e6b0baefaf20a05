"""Every model that comes with the `onnx` package: a graph, or refused in one line."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import pytest

from rlplace.errors import UserError
from rlplace.graphs.formats.onnx_file import load_onnx
from rlplace.graphs.opgraph import OpGraph

onnx = pytest.importorskip("onnx")


def outcome(path: Path) -> str:
    """`loaded`, or the kind of error."""
    with warnings.catch_warnings(action="ignore"):
        try:
            found: OpGraph | UserError = load_onnx(path)
        except UserError as error:
            found = error
    if isinstance(found, UserError):
        assert "\n" not in str(found)
        assert len(str(found)) < 2000
        return type(found).__name__
    assert found.num_ops > 0
    return "loaded"


@pytest.mark.slow
def test_models_of_files() -> None:
    paths = sorted(Path(onnx.__file__).parent.rglob("*.onnx"))
    counts = Counter(map(outcome, paths))
    print(counts)
    assert len(paths) > 100
    assert counts["loaded"] > 0.8 * len(paths)


@pytest.mark.slow
def test_models_of_the_tests_of_operators(tmp_path: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(action="ignore"):
        models = [case.model for case in collect_testcases(None)]
    path, counts = tmp_path / "m.onnx", Counter[str]()
    for model in models:
        path.write_bytes(model.SerializeToString())
        counts[outcome(path)] += 1
    print(counts)
    assert len(models) > 1000
    assert counts["loaded"] > 0.8 * len(models)
