"""rlplace: reinforcement-learning device placement for PyTorch.

The face of the package; importing it imports no torch. Import it before torch where gangs of cores run ops: it tells
OpenMP how long to spin (`rlplace.openmp`).

    graph   = rlplace.capture(model, inputs, loss_fn=loss, optimizer="adam", targets=labels)
    problem = rlplace.Problem.profile(graph, rlplace.Host.detect())
    result  = rlplace.train(problem, budget_s=300, seed=0)
    step    = rlplace.export.to_step(model, graph, result.placement)
    placed  = rlplace.place(model, inputs)          # all of the above in one call
"""

from __future__ import annotations

import importlib
from typing import Any

from rlplace.openmp import spin_briefly

spin_briefly()

__version__ = "0.1.0"

_HOMES = {
    "advise": "rlplace.runs.advise.advise",
    "capture": "rlplace.graphs",
    "OpGraph": "rlplace.graphs",
    "OptimizerSpec": "rlplace.graphs",
    "Constraints": "rlplace.graphs",
    "Grouping": "rlplace.graphs",
    "group_ops": "rlplace.graphs",
    "load_graph": "rlplace.graphs",
    "register_cost": "rlplace.graphs",
    "save_graph": "rlplace.graphs",
    "Costs": "rlplace.measure",
    "Device": "rlplace.measure",
    "Host": "rlplace.measure",
    "HostRunner": "rlplace.measure",
    "Measurement": "rlplace.measure",
    "Measurer": "rlplace.measure",
    "Placement": "rlplace.measure",
    "Plan": "rlplace.measure",
    "Problem": "rlplace.measure",
    "Simulator": "rlplace.measure",
    "load_placement": "rlplace.measure",
    "save_placement": "rlplace.measure",
    "TrainConfig": "rlplace.training",
    "TrainResult": "rlplace.training",
    "train": "rlplace.training",
    "place": "rlplace.export",
}
_ROOMS = ("cli", "compare", "env", "errors", "export", "graphs", "measure", "policy", "report", "search", "workloads")

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"rlplace.{name}")
    raise AttributeError(f"module 'rlplace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
