"""`describe_workloads`: every named workload with its options and how many ops its step has; imports no torch.

The counts are kept in `op_counts.json` beside this file, which `python scripts/count_workloads.py` writes: counting
means building and capturing each.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlplace.files import read_json
from rlplace.workloads.catalog import CATALOG
from rlplace.workloads.options import SIZES

COUNTS_PATH = Path(__file__).with_name("op_counts.json")


def describe_workloads() -> list[dict[str, Any]]:
    """One row a workload, by name, as `rlplace workloads --json` prints them.

    Each has `name`, the options of sizes `small` and `paper`, `counts` (of each size `num_ops` and `num_edges` of a
    training step with Adam), the `extra` that it needs, if any, and `is_installed`.
    """
    counts = op_counts()
    return [
        {
            "name": name,
            "small": asdict(family.config.small()),
            "paper": asdict(family.config.paper()),
            "counts": counts[name],
            "extra": family.extra or None,
            "is_installed": family.is_installed,
        }
        for name, family in sorted(CATALOG.items())
    ]


def op_counts() -> dict[str, dict[str, dict[str, int]]]:
    """By name and size, `num_ops` and `num_edges` of a training step, as they were counted last."""
    kept = read_json(COUNTS_PATH)["workloads"]
    return {name: {size: dict(kept[name][size]) for size in SIZES} for name in CATALOG}
