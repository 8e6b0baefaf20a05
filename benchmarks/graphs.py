"""Building, validating, saving, loading and grouping a graph of 100,000 ops: python benchmarks/graphs.py OUT_FOLDER."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from record import as_markdown, record, save

from rlplace.graphs import OpGraph, group_ops, load_graph, save_graph
from rlplace.graphs.synthetic import synthetic

Result = TypeVar("Result")

GRAPHS: dict[str, dict[str, Any]] = {
    "forward": {"family": "layered", "layers": 670, "width": 100, "fan_in": 3, "is_training": False},
    "training": {"family": "layered", "layers": 217, "width": 100, "fan_in": 2},
}
NUM_GROUPS = 256


def main(folder: str) -> None:
    rows = [measure(name, params) for name, params in GRAPHS.items()]
    result = {"schema": 1, **record(), "load_average": os.getloadavg()[0], "graphs": GRAPHS, "rows": rows}
    save(Path(folder).resolve() / "graphs", result, page(result))


def measure(name: str, params: dict[str, Any]) -> dict[str, Any]:
    graph, build_s = timed(lambda: synthetic(**params))
    _, validate_s = timed(lambda: dataclasses.replace(graph))  # its arrays are there: all that is left is to check them
    _, fingerprint_s = timed(lambda: graph.fingerprint)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "graph.json"
        _, save_s = timed(lambda: save_graph(graph, path))
        loaded, load_s = timed(lambda: load_graph(path))
        row = {
            "memory_bytes_per_op": memory_of(lambda: load_graph(path)) / graph.num_ops,
            "file_bytes_per_op": path.stat().st_size / graph.num_ops,
        }
    assert loaded.fingerprint == graph.fingerprint
    group_ops(synthetic("layered"), np.ones(synthetic("layered").num_ops))  # compiles its kernels
    grouping, group_s = timed(lambda: group_ops(graph, graph.flops / 1e13 + 1e-6, NUM_GROUPS))
    row |= {
        "graph": name,
        "num_ops": graph.num_ops,
        "num_edges": graph.num_edges,
        "build_s": build_s,
        "validate_s": validate_s,
        "fingerprint_s": fingerprint_s,
        "save_s": save_s,
        "load_s": load_s,
        "group_s": group_s,
        "num_groups": grouping.num_groups,
        "build_validate_group_s": build_s + validate_s + group_s,
    }
    print(row)
    return row


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """The result of a call, and its seconds."""
    begin_s = time.perf_counter()
    return call(), time.perf_counter() - begin_s


def memory_of(make: Callable[[], OpGraph]) -> int:
    """Bytes that the graph holds: its arrays, tuples and texts."""
    tracemalloc.start()
    graph = make()
    try:
        return tracemalloc.get_traced_memory()[0] if graph else 0
    finally:
        tracemalloc.stop()


def page(result: dict[str, Any]) -> str:
    lines = [
        "# Graphs of 100,000 ops",
        "",
        as_markdown(result),
        f"Load average {result['load_average']:.1f} (1 if nothing else ran).",
        "",
        f"`layered` synthetic graphs, forward alone and with gradients and updates; `group_ops` with {NUM_GROUPS} "
        "groups, kernels compiled; files are own JSON. Memory is what `tracemalloc` counts for a loaded graph.",
        "",
        "| graph | ops | edges | build, s | validate, s | group, s | groups | save, s | load, s | memory, bytes/op | "
        "file, bytes/op |",
        "|" + "---|" * 11,
        *(
            f"| {row['graph']} | {row['num_ops']:,} | {row['num_edges']:,} | {row['build_s']:.2f} | "
            f"{row['validate_s']:.3f} | {row['group_s']:.2f} | {row['num_groups']} | {row['save_s']:.2f} | "
            f"{row['load_s']:.2f} | {row['memory_bytes_per_op']:.0f} | {row['file_bytes_per_op']:.0f} |"
            for row in result["rows"]
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1])
