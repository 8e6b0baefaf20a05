"""`describe_workloads`: every named workload with its options and how many ops its step has; imports no torch.

The counts are kept in `op_counts.json` beside this file, which `python scripts/count_workloads.py` writes: counting
means building and capturing each.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlplace.errors import UserError
from rlplace.files import read_json
from rlplace.workloads.catalog import CATALOG
from rlplace.workloads.options import SIZES

COUNTS_PATH = Path(__file__).with_name("op_counts.json")


def describe_workloads() -> list[dict[str, Any]]:
    """One row a workload, by name, as `rlplace workloads --json` prints them.

    Each has `name`, the options of sizes `small` and `paper`, `counts` (of each size `num_ops` and `num_edges` of a
    training step with Adam; empty for a workload that is not rlplace's own), the `extra` that it needs, if any,
    `is_installed`, and `problem`: why an installed package does not bring what it says, else null.
    """
    counts = op_counts()
    return [_describe(name, counts.get(name, {})) for name in sorted(CATALOG)]


def _describe(name: str, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    row = {"name": name, "small": {}, "paper": {}, "counts": counts, "extra": None}
    try:
        family = CATALOG[name]
        sizes = {"small": asdict(family.config.small()), "paper": asdict(family.config.paper())}
    except UserError as error:
        return {**row, "is_installed": False, "problem": str(error)}
    return {**row, **sizes, "extra": family.extra or None, "is_installed": family.is_installed, "problem": None}


def op_counts() -> dict[str, dict[str, dict[str, int]]]:
    """By name and size, `num_ops` and `num_edges` of a training step, as they were counted last."""
    kept = read_json(COUNTS_PATH)["workloads"]
    return {name: {size: dict(sizes[size]) for size in SIZES} for name, sizes in kept.items()}
