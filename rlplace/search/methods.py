"""`METHODS`: every method that finds placements, by name; `find` runs one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.measurement import StepTimer
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.registry import Registry
from rlplace.search.task import BestSoFar, Budget, Saveable, Task

Kind = Literal["baseline", "scheduler", "exact", "search"]


@dataclass(frozen=True)
class Method:
    """A way to find a placement.

    Attributes:
        name: as in `--methods`.
        home: a function that takes a `Task`, or `module:function` of one. It scores placements through the task and the
            task's best is the answer; what it learned on the way it may return.
        kind: `baseline` and `scheduler` need a handful of evaluations, `exact` and `search` use the budget.
        source: what it is after.
        min_micro_batches: into how many slices the batch of a problem must be cut for it.
    """

    name: str
    home: str | Callable[..., Saveable | None]
    kind: Kind
    source: str
    min_micro_batches: int = 1

    def refusal(self, problem: Problem) -> InvalidValue | None:
        """Why the method has nothing to do on `problem`; None where it has."""
        count = problem.graph.num_micro_batches
        if count >= self.min_micro_batches:
            return None
        return InvalidValue(
            "micro_batches",
            count,
            f"at least {self.min_micro_batches}",
            where=f"method {self.name}",
            hint="It deals out slices of a batch: cut the step with `--micro-batches K`.",
        )

    def run(self, task: Task, **options: Any) -> Saveable | None:
        """Runs the method on `task`; returns what it learned, where it learns.

        Args:
            task: what is to be solved, and the account of it.
            options: of the method's own.

        Raises:
            InvalidValue: the batch is not cut into enough micro-batches.
            MissingExtra: it needs a package that is not installed.
        """
        if (refused := self.refusal(task.problem)) is not None:
            raise refused
        solve = self.home
        if isinstance(solve, str):
            module, _, function = solve.partition(":")
            solve = cast(Callable[..., Saveable | None], getattr(importlib.import_module(module), function))
        try:
            return solve(task, **options)
        except Exception as error:
            error.add_note(f"It happened in method {self.name!r}.")
            raise


_BUILT_IN = (
    Method(
        "single", "rlplace.search.rules.baselines:solve_single", "baseline", "everything on the best feasible device"
    ),
    Method("round-robin", "rlplace.search.rules.baselines:solve_round_robin", "baseline", "groups dealt out in order"),
    Method("random", "rlplace.search.rules.baselines:solve_random", "search", "groups drawn uniformly"),
    Method("blocks", "rlplace.search.rules.baselines:solve_blocks", "baseline", "contiguous blocks of equal cost"),
    Method(
        "expert",
        "rlplace.search.rules.baselines:solve_expert",
        "baseline",
        "by module, as by hand: runs, layer k on device k, halves",
    ),
    Method(
        "metis",
        "rlplace.search.rules.partitioners:solve_metis",
        "baseline",
        "balanced parts, few bytes cut: Karypis and Kumar 1998",
    ),
    Method(
        "scotch",
        "rlplace.search.rules.partitioners:solve_scotch",
        "baseline",
        "mapping onto the devices: Pellegrini 1996",
    ),
    Method(
        "eft",
        "rlplace.search.schedule.list_schedulers:solve_eft",
        "scheduler",
        "earliest finish time, without insertion",
    ),
    Method(
        "heft",
        "rlplace.search.schedule.list_schedulers:solve_heft",
        "scheduler",
        "HEFT with insertion: Topcuoglu et al. 2002",
    ),
    Method(
        "peft",
        "rlplace.search.schedule.list_schedulers:solve_peft",
        "scheduler",
        "look-ahead by optimistic costs: Arabnejad and Barbosa 2014",
    ),
    Method(
        "critical-path",
        "rlplace.search.schedule.list_schedulers:solve_critical_path",
        "scheduler",
        "CPOP: Topcuoglu et al. 2002",
    ),
    Method(
        "m-topo",
        "rlplace.search.schedule.baechi:solve_m_topo",
        "scheduler",
        "even memory, in order: Baechi, Jeon et al. 2020",
    ),
    Method(
        "m-etf",
        "rlplace.search.schedule.baechi:solve_m_etf",
        "scheduler",
        "earliest start first: Baechi, Jeon et al. 2020",
    ),
    Method(
        "m-sct",
        "rlplace.search.schedule.baechi:solve_m_sct",
        "scheduler",
        "favourite children by LP: Baechi, Jeon et al. 2020",
    ),
    Method(
        "data-parallel",
        "rlplace.search.parallel.hybrid:solve_data_parallel",
        "baseline",
        "micro-batches dealt out, parameters owned evenly: ZeRO-1, Rajbhandari et al. 2020",
        min_micro_batches=2,
    ),
    Method(
        "pipeline",
        "rlplace.search.parallel.hybrid:solve_pipeline",
        "baseline",
        "a stage a device: GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2019",
        min_micro_batches=2,
    ),
    Method(
        "hybrid",
        "rlplace.search.parallel.hybrid:solve_hybrid",
        "baseline",
        "stages x replicas by dynamic programming: DAPPLE, Fan et al. 2021",
        min_micro_batches=2,
    ),
    Method(
        "cp-sat",
        "rlplace.search.cp_sat:solve_cp_sat",
        "exact",
        "constraint program: optimal when small, else a bound (OR-Tools)",
    ),
    Method(
        "anneal",
        "rlplace.search.improve.anneal:solve_anneal",
        "search",
        "annealing over groups, then ops: Kirkpatrick et al. 1983",
    ),
    Method(
        "evolve",
        "rlplace.search.improve.portfolio:solve_evolve",
        "search",
        "a list scheduler whose weights CMA-ES tunes, then annealing",
    ),
    Method(
        "genetic",
        "rlplace.search.improve.random_keys:solve_genetic",
        "search",
        "biased random keys: Gonçalves & Resende 2011",
    ),
    Method(
        "cem",
        "rlplace.search.improve.random_keys:solve_cem",
        "search",
        "cross-entropy method, a categorical a group: Rubinstein 1999",
    ),
    Method(
        "portfolio",
        "rlplace.search.improve.portfolio:solve_portfolio",
        "search",
        "all placements where they are few, else evolve",
    ),
)
METHODS: Registry[Method] = Registry(
    "method", {method.name: method for method in _BUILT_IN}, group="rlplace.methods", entry_type=Method
)
"""Every method by name; installed packages bring more as entry points of `rlplace.methods`."""


def register_method(method: Method) -> None:
    """Adds a method under its own name, for this process.

    Raises:
        InvalidValue: the name is malformed or taken.
    """
    METHODS.register(method.name, method)


def adopt_methods(methods: Iterable[Method]) -> None:
    """Makes methods of another process known to this one, in place of others of their names.

    A worker of a cluster knows the methods that are built in or installed, and is sent those that `register_method`
    added where the command runs.
    """
    for method in methods:
        if METHODS.get(method.name) == method:
            continue
        with contextlib.suppress(UnknownName):  # new here, or of an installed package, which it hides
            METHODS.unregister(method.name)
        register_method(method)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a method found.

    Attributes:
        devices: (N,) int32; None where it found nothing feasible.
        step_time_s: infinite where it found nothing feasible.
        evaluations: placements scored.
        plan_s: wall time that finding it took.
        lower_bound_s: a bound that the method proved; 0 where it proved none.
        history: the best so far wherever it improved.
        learned: what the method learned; None where it learns nothing that could be kept.
        plan: `devices` with every order fixed, where the step time is of another than the default order.
    """

    devices: NDArray[np.int32] | None
    step_time_s: float
    evaluations: int
    plan_s: float
    lower_bound_s: float
    history: tuple[BestSoFar, ...]
    learned: Saveable | None = None
    plan: Plan | None = None

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every op."""
        spent = f"{self.evaluations:,} placements in {self.plan_s:.3g} s"
        found = "nothing feasible" if self.devices is None else f"{self.step_time_s * 1e3:.4g} ms a step"
        return f"SearchResult({found}, {spent})"

    @classmethod
    def of(cls, task: Task, learned: Saveable | None = None) -> SearchResult:
        """The result of a task."""
        return cls(
            task.best_devices,
            task.best_s,
            task.evaluations,
            task.elapsed_s,
            task.lower_bound_s,
            tuple(task.history),
            learned,
            task.best_plan,
        )


def find(
    problem: Problem, method: str, timer: StepTimer, budget: Budget | None = None, *, seed: int = 0, **options: Any
) -> SearchResult:
    """The best placement that `method` finds within `budget`; the same seed and evaluations find the same.

    Args:
        problem: what is placed.
        method: a name of `METHODS`.
        timer: what scores a placement.
        budget: what may be spent; no end by default.
        seed: of every random draw.
        options: of the method's own.

    Raises:
        UnknownName: no such method.
        InvalidValue: a seed below 0.
        MissingExtra: the method needs a package that is not installed.
    """
    task = Task(problem, timer, budget, seed=seed)
    return SearchResult.of(task, METHODS[method].run(task, **options))
