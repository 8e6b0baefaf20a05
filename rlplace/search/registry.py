"""`METHODS`: every search method by name; `find` runs one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UnknownName
from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import Problem
from rlplace.search.task import Budget, Task

Kind = Literal["baseline", "scheduler", "exact", "search"]


@dataclass(frozen=True)
class Method:
    """A way to find a placement.

    Attributes:
        name: as in `--methods`.
        home: `module:function` below `rlplace.search`; the function takes a `Task`, scores placements through it and
            returns nothing: the task's best is the answer.
        kind: `baseline` and `scheduler` need a handful of evaluations, `exact` and `search` use the budget.
        source: what it is after.
    """

    name: str
    home: str
    kind: Kind
    source: str

    def run(self, task: Task) -> None:
        """Runs the method on `task`.

        Raises:
            MissingExtra: it needs a package that is not installed.
        """
        module, _, function = self.home.partition(":")
        solve: Callable[[Task], None] = getattr(importlib.import_module(f"rlplace.search.{module}"), function)
        solve(task)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("single", "rules.baselines:solve_single", "baseline", "everything on the best feasible device"),
        Method("round-robin", "rules.baselines:solve_round_robin", "baseline", "groups dealt out in order"),
        Method("random", "rules.baselines:solve_random", "search", "groups drawn uniformly"),
        Method("blocks", "rules.baselines:solve_blocks", "baseline", "contiguous blocks of equal cost"),
        Method(
            "expert",
            "rules.expert:solve_expert",
            "baseline",
            "by module, as by hand: runs, layer k on device k, halves",
        ),
        Method("metis", "rules.metis:solve_metis", "baseline", "balanced parts, few bytes cut: Karypis and Kumar 1998"),
        Method("scotch", "rules.scotch:solve_scotch", "baseline", "mapping onto the devices: Pellegrini 1996"),
        Method("eft", "schedule.eft:solve_eft", "scheduler", "earliest finish time, without insertion"),
        Method("heft", "schedule.heft:solve_heft", "scheduler", "HEFT with insertion: Topcuoglu et al. 2002"),
        Method(
            "peft",
            "schedule.peft:solve_peft",
            "scheduler",
            "look-ahead by optimistic costs: Arabnejad and Barbosa 2014",
        ),
        Method(
            "critical-path", "schedule.critical_path:solve_critical_path", "scheduler", "CPOP: Topcuoglu et al. 2002"
        ),
        Method(
            "m-topo", "schedule.baechi:solve_m_topo", "scheduler", "even memory, in order: Baechi, Jeon et al. 2020"
        ),
        Method("m-etf", "schedule.baechi:solve_m_etf", "scheduler", "earliest start first: Baechi, Jeon et al. 2020"),
        Method(
            "m-sct", "schedule.baechi:solve_m_sct", "scheduler", "favourite children by LP: Baechi, Jeon et al. 2020"
        ),
        Method(
            "cp-sat",
            "exact.cp_sat:solve_cp_sat",
            "exact",
            "constraint program: optimal when small, else a bound (OR-Tools)",
        ),
        Method("anneal", "improve.anneal:solve", "search", "annealing over groups, then ops: Kirkpatrick et al. 1983"),
        Method(
            "evolve", "improve.evolve:solve", "search", "a list scheduler whose weights CMA-ES tunes, then annealing"
        ),
        Method(
            "local-search", "improve.local_search:solve", "search", "first improvement over critical groups, restarted"
        ),
        Method("multilevel", "improve.multilevel:solve", "search", "annealing over ever finer groups: Walshaw 2004"),
        Method("genetic", "improve.genetic:solve", "search", "biased random keys: Gonçalves & Resende 2011"),
        Method("cem", "improve.cem:solve", "search", "cross-entropy method, a categorical a group: Rubinstein 1999"),
        Method("portfolio", "improve.portfolio:solve", "search", "all placements where they are few, else evolve"),
    )
}


@dataclass(frozen=True, eq=False)
class Found:
    """What a method found.

    Attributes:
        devices: (N,) int32; None where it found nothing feasible.
        step_time_s: infinite where it found nothing feasible.
        evaluations: placements scored.
        plan_s: wall time that finding it took.
        lower_bound_s: a bound that the method proved; 0 where it proved none.
        history: (evaluations, best step time) wherever the best improved.
    """

    devices: NDArray[np.int32] | None
    step_time_s: float
    evaluations: int
    plan_s: float
    lower_bound_s: float
    history: tuple[tuple[int, float], ...]


def find(problem: Problem, method: str, timer: StepTimer, budget: Budget | None = None, *, seed: int = 0) -> Found:
    """The best placement that `method` finds within `budget`; the same seed and evaluations find the same.

    Raises:
        UnknownName: no such method.
        MissingExtra: the method needs a package that is not installed.
    """
    if method not in METHODS:
        raise UnknownName("method", method, METHODS)
    task = Task(problem, timer, budget, seed=seed)
    METHODS[method].run(task)
    return Found(
        task.best_devices, task.best_s, task.evaluations, task.elapsed_s, task.lower_bound_s, tuple(task.history)
    )
