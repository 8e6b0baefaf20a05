"""The synthetic problems of the benchmark of the simulator."""

from __future__ import annotations

import runpy
from pathlib import Path

synthetic_problem = runpy.run_path(str(Path(__file__).resolve().parent.parent / "benchmarks" / "simulator.py"))[
    "synthetic_problem"
]
