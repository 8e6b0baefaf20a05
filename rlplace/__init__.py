"""rlplace: reinforcement-learning device placement for PyTorch.

The face of the package; importing it imports no torch. Import it before torch where gangs of cores run ops: it tells
OpenMP how long to spin (`rlplace.process_settings`).

    graph   = rlplace.capture(model, inputs, loss_fn=loss, optimizer="adam", targets=labels)
    problem = rlplace.Problem.profile(graph, rlplace.Host.detect())
    result  = rlplace.train(problem, budget_s=300, seed=0)
    step    = rlplace.export.to_step(model, graph, result.placement)
    placed  = rlplace.place(model, inputs)          # all of the above in one call
"""

# Python puts the current folder first, which may be a stranger's: what a command imports is not from there. `python -m
# rlplace` imports this package before its `__main__`, so nothing is imported up to here but what is loaded already; not
# even `__future__`. A user's function is looked for there all the same (`rlplace.workloads.user_function`).
import os
import sys

named = "".join(sys.orig_argv[-len(sys.argv) :][:1])  # behind `-m`, or together with it: `-mrlplace`
named = named.partition("m")[2] if named.startswith("-") else named
if sys.argv[:1] == ["-m"] and named in ("rlplace", "rlplace.__main__"):
    first, home = sys.path[0] or ".", os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    is_current = not sys.flags.safe_path and os.path.isdir(first) and os.path.samefile(first, ".")
    if is_current and not os.path.samefile(first, home):  # rlplace itself may be there: a checkout
        del sys.path[0]
    del first, home, is_current
del named, os, sys

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy
from rlplace.process_settings import spin_briefly

spin_briefly()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlplace import cli, compare, env, errors, export, graphs, measure, policy, report, search, workloads  # noqa: F401
    from rlplace.advice.advising import advise
    from rlplace.export.place_model import place
    from rlplace.graphs import (
        Constraints,
        Grouping,
        OpGraph,
        OptimizerSpec,
        SplitPlan,
        capture,
        group_ops,
        load_graph,
        register_cost,
        save_graph,
    )
    from rlplace.measure import (
        Costs,
        Device,
        Host,
        HostRunner,
        Measurement,
        Measurer,
        Placement,
        Plan,
        Problem,
        Simulator,
        load_placement,
        save_placement,
    )
    from rlplace.training import TrainConfig, TrainResult, train

__all__ = [
    "Constraints",
    "Costs",
    "Device",
    "Grouping",
    "Host",
    "HostRunner",
    "Measurement",
    "Measurer",
    "OpGraph",
    "OptimizerSpec",
    "Placement",
    "Plan",
    "Problem",
    "Simulator",
    "SplitPlan",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "advise",
    "capture",
    "group_ops",
    "load_graph",
    "load_placement",
    "place",
    "register_cost",
    "save_graph",
    "save_placement",
    "train",
]
_ROOMS = ["cli", "compare", "env", "errors", "export", "graphs", "measure", "policy", "report", "search", "workloads"]

__getattr__ = lazy(__name__, __file__)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
