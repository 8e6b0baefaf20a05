"""Graphs: what a step computes (`OpGraph`), how to run it (`Program`), what moves together (`Grouping`)."""

from rlplace.graphs.capture import capture
from rlplace.graphs.grouping import Grouping, group_ops
from rlplace.graphs.interpreter import StepResult, run_graph
from rlplace.graphs.op_costs import register_cost, unregister_cost
from rlplace.graphs.opgraph import BACKWARD, FORWARD, PHASES, UPDATE, OpGraph
from rlplace.graphs.program import OptimizerSpec, Program

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PHASES",
    "UPDATE",
    "Grouping",
    "OpGraph",
    "OptimizerSpec",
    "Program",
    "StepResult",
    "capture",
    "group_ops",
    "register_cost",
    "run_graph",
    "unregister_cost",
]
