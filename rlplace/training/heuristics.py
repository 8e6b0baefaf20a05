"""Rows of the table that need no search: each a handful of simulated placements."""

from __future__ import annotations

import contextlib

from rlplace.errors import UserError
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import find
from rlplace.search.task import Budget, Failure
from rlplace.training.table import Entry

HEURISTICS = ("single", "blocks", "round-robin", "expert", "eft", "heft")
EVALUATIONS = 64
WARM_UP = "portfolio"
WARM_UP_EVALUATIONS = 400
"""Enough for every kernel of `portfolio` to be called: those of heuristics, which few evaluations leave out, and of
annealing, the last."""


def place_quickly(problem: Problem, simulator: Simulator, name: str) -> Entry:
    """What a heuristic places, in a moment."""
    try:
        found = find(problem, name, simulator, Budget(EVALUATIONS))
    except UserError:
        raise
    except Exception as error:  # whatever it is: one that failed is one row, not the run
        return Entry(name, None, 0, failure=Failure.of(error))
    if found.devices is None:
        why = "pins and exclusions leave it no placement" if not found.evaluations else "found no feasible placement"
        return Entry(name, None, found.evaluations, why=why)
    history = found.history if problem.host.is_simulated else ()  # a measured row is not followed by simulated steps
    return Entry(name, simulator.plan(found.devices), found.evaluations, history=history)


def compile_kernels(problem: Problem, simulator: Simulator) -> None:
    """Runs a short search: kernels are compiled, or read from disk, before the clock of any method starts."""
    with contextlib.suppress(Exception):  # its own row will say so
        find(problem, WARM_UP, simulator, Budget(WARM_UP_EVALUATIONS))


def num_rows(methods: tuple[str, ...]) -> int:
    """What the final table measures with these methods: the reference, and plain PyTorch with all threads and one."""
    return len({*HEURISTICS, *methods}) + 3
