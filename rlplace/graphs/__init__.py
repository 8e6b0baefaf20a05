"""Graphs: what a step computes (`OpGraph`), how to run it (`Program`), what moves together (`Grouping`).

Names are looked up when they are first used: what runs a step needs nothing of what captures one, which takes seconds
to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.graphs.capturing.capture import capture
    from rlplace.graphs.capturing.op_costs import register_cost, unregister_cost
    from rlplace.graphs.formats import load_graph, save_graph
    from rlplace.graphs.grouping.constraints import Constraints
    from rlplace.graphs.grouping.groups import Grouping, group_ops
    from rlplace.graphs.interpreter import StepResult, run_graph
    from rlplace.graphs.opgraph import BACKWARD, FORWARD, PHASES, UPDATE, OpGraph
    from rlplace.graphs.program import OptimizerSpec, Program

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PHASES",
    "UPDATE",
    "Constraints",
    "Grouping",
    "OpGraph",
    "OptimizerSpec",
    "Program",
    "StepResult",
    "capture",
    "group_ops",
    "load_graph",
    "register_cost",
    "run_graph",
    "save_graph",
    "unregister_cost",
]

_HOMES = {
    "BACKWARD": "rlplace.graphs.opgraph",
    "Constraints": "rlplace.graphs.grouping.constraints",
    "FORWARD": "rlplace.graphs.opgraph",
    "Grouping": "rlplace.graphs.grouping.groups",
    "OpGraph": "rlplace.graphs.opgraph",
    "OptimizerSpec": "rlplace.graphs.program",
    "PHASES": "rlplace.graphs.opgraph",
    "Program": "rlplace.graphs.program",
    "StepResult": "rlplace.graphs.interpreter",
    "UPDATE": "rlplace.graphs.opgraph",
    "capture": "rlplace.graphs.capturing.capture",
    "group_ops": "rlplace.graphs.grouping.groups",
    "load_graph": "rlplace.graphs.formats",
    "register_cost": "rlplace.graphs.capturing.op_costs",
    "run_graph": "rlplace.graphs.interpreter",
    "save_graph": "rlplace.graphs.formats",
    "unregister_cost": "rlplace.graphs.capturing.op_costs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
