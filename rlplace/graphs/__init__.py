"""Graphs: the ops of a step (`OpGraph`), how to run them (`Program`), and groups of them that move together
(`Grouping`).

`capturing` makes a graph of a model, `micro_batching` of a model whose batch is cut, `formats` of a file; `grouping`
says which ops move together; `splitting` splits ops into shards. Names are imported when they are first used: running a
step does not need the modules that capture one, which take seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.graphs.capturing.capture import capture
    from rlplace.graphs.capturing.lower import register_cost, unregister_cost
    from rlplace.graphs.formats import load_graph, save_graph
    from rlplace.graphs.grouping.constraints import Constraints
    from rlplace.graphs.grouping.groups import Grouping, group_ops
    from rlplace.graphs.interpreter import StepResult, run_graph
    from rlplace.graphs.opgraph import BACKWARD, FORWARD, PHASES, UPDATE, OpGraph
    from rlplace.graphs.program import OptimizerSpec, Program, SplitPlan

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
    "SplitPlan",
    "StepResult",
    "capture",
    "group_ops",
    "load_graph",
    "register_cost",
    "run_graph",
    "save_graph",
    "unregister_cost",
]

__getattr__ = lazy(__name__, __file__)
