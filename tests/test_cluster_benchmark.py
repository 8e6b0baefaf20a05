"""The benchmark of Ray workers: its rates and its table, by hand."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("cluster_benchmark", BENCHMARKS / "cluster.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_task_counts_by_the_share_of_it_that_lies_within(benchmark: ModuleType) -> None:
    done = [benchmark.Done("a", 1, 0.0, 2.0), benchmark.Done("b", 2, 1.0, 3.0), benchmark.Done("a", 1, 2.0, 4.0)]
    # of seconds 1 to 3: half of the first, all of the second, half of the third
    assert benchmark.rate(done, 1.0, 3.0) == benchmark.BATCH * 2 / 2
    assert benchmark.rate(done, 5.0, 6.0) == 0.0


def test_all_are_at_work_when_the_last_one_has_ended_its_first_task(benchmark: ModuleType) -> None:
    done = [benchmark.Done("a", 1, 0.0, 1.0), benchmark.Done("a", 1, 1.0, 2.0)]
    assert benchmark.begin_of_all(done, 1) == 1.0
    assert benchmark.begin_of_all(done, 2) == math.inf
    assert benchmark.begin_of_all([*done, benchmark.Done("b", 2, 0.0, 2.5)], 2) == 2.5


def test_the_table_has_a_line_for_each_rate(benchmark: ModuleType) -> None:
    rows = [
        {"what": "one worker", "per_second": 1000.0, "ratio": None, "idle_before": 0.9},
        {"what": "two workers", "per_second": 1900.4, "ratio": 1.9004, "idle_before": 0.95},
    ]
    page = benchmark.markdown(rows, benchmark.record())
    assert "| one worker | 1,000 |  | 90% |\n| two workers | 1,900 | 1.90 | 95% |\n" in page
