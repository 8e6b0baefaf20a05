"""Counts the ops and edges of every named workload's training step and keeps them in the package.

python scripts/count_workloads.py            # all, about two minutes; no model is allocated
python scripts/count_workloads.py gpt2 bert  # these, the others stay
"""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.files import read_json, write_json_atomic
from rlplace.graphs import capture
from rlplace.workloads import CATALOG, SIZES, build, parse_workload
from rlplace.workloads.catalog import COUNTS_PATH

kept = read_json(COUNTS_PATH)["workloads"] if COUNTS_PATH.exists() else {}
counts = {name: kept[name] for name in sorted(CATALOG) if name in kept}
for name in sys.argv[1:] or sorted(CATALOG):
    counts[name] = {}
    for size in SIZES:
        with FakeTensorMode():
            workload = build(parse_workload(f"{name}@{size}"))
        graph = capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer)
        counts[name][size] = {"num_ops": graph.num_ops, "num_edges": graph.num_edges}
        print(f"{name}@{size}: {graph.num_ops} ops, {graph.num_edges} edges", flush=True)
write_json_atomic(COUNTS_PATH, {"schema": 1, "torch": torch.__version__.split("+")[0], "workloads": counts})
