"""Where the published workloads are: a few beside the tests, all of them where a folder with them is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import rlplace
from rlplace.graphs.formats.published import DnnPartitioning, load_dnn_partitioning

COPIES = Path(__file__).parent / "data" / "dnn_partitioning"


def folders() -> list[Path]:
    """The copies, and the whole set where it is here."""
    beside = Path(rlplace.__file__).parents[2] / "shared" / "data" / "dnn-partitioning"
    whole = Path(os.environ.get("RLPLACE_DNN_PARTITIONING", beside))
    return [COPIES, *([whole] if (whole / "values.json").exists() else [])]


def workload_paths(objective: str = "*") -> list[Path]:
    """Every workload file once, the whole set's before the copies."""
    found: dict[tuple[str, str], Path] = {}
    for folder in folders():
        for path in sorted(folder.glob(f"{objective}/*.json")):
            if path.parent.name in ("throughput", "latency"):
                found[path.parent.name, path.stem] = path
    return list(found.values())


def published_values(path: Path) -> dict[str, Any]:
    """What `values.json` says of the workload at `path`."""
    values: dict[str, Any] = json.loads((path.parents[1] / "values.json").read_text(encoding="utf-8"))
    return dict(values[path.parent.name][path.stem])


def load(objective: str, name: str) -> DnnPartitioning:
    """One of the copies."""
    return load_dnn_partitioning(COPIES / objective / f"{name}.json")
