"""`search_all`: every method of a run gets its budget, or goes on with what an interruption left of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlplace.cluster import Cluster
from rlplace.format import format_clock
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import LearnedHost
from rlplace.report.console import Progress
from rlplace.runs.tracking import Tracker
from rlplace.search.task import Budget, Saveable
from rlplace.store.log import StoreLog
from rlplace.training.agent.agent import AgentResult
from rlplace.training.config import TrainConfig
from rlplace.training.outcome import Keeper
from rlplace.training.resume.journal import Journal, MethodJournal
from rlplace.training.resume.state import ratio_of
from rlplace.training.searches.budget import LoopBudget
from rlplace.training.searches.on_cluster import num_machines, search_on_cluster
from rlplace.training.searches.result import LoopResult
from rlplace.training.searches.search_loop import search_and_measure
from rlplace.training.searches.side_by_side import search_side_by_side


def search_all(
    evaluator: Evaluator,
    config: TrainConfig,
    methods: Mapping[str, Mapping[str, Any]],
    single_s: float,
    keeper: Keeper,
    journal: Journal,
    progress: Progress,
    tracker: Tracker,
    log: StoreLog | None = None,
    cluster: Cluster | None = None,
) -> dict[str, LoopResult]:
    """What each method finds: in turn on a host of this machine, side by side on a simulated one.

    Args:
        evaluator: simulates, and runs.
        config: of the run.
        methods: names of `METHODS`, each with its options.
        single_s: step time on the best single device.
        keeper: keeps the best placement so far, and what is learned.
        journal: keeps what methods come to, and knows what they had come to.
        progress: told how it goes.
        tracker: told figures.
        log: keeps what is learned about the host.
        cluster: whose workers search on a simulated host; None for this machine.
    """
    problem = evaluator.problem

    def keep_learned(learned: Saveable) -> None:
        keeper.keep_learned(learned)
        if isinstance(learned, AgentResult):
            progress.say(_learned_words(learned))
            if log is not None:
                log.keep_learned(problem.graph.fingerprint, LearnedHost.of(learned.posterior))

    journals = {name: MethodJournal(journal, name, keep_learned) for name in methods}
    if evaluator.is_measured:
        return _in_turn(evaluator, config, methods, single_s, keeper, journal, journals, progress, tracker)
    budget = Budget(seconds=config.budget_s) if config.evaluations is None else Budget(config.evaluations)
    before = {name: journal.of(name, min(budget.seconds, budget.evaluations)) for name in methods}
    search = search_side_by_side if cluster is None else partial(search_on_cluster, cluster)
    return search(
        methods,
        problem,
        budget,
        seed=config.seed,
        progress=progress,
        tracker=tracker,
        single_s=single_s,
        on_best=lambda method, plan, step_s: keeper.of(method)(plan, step_s, ratio_of(step_s, single_s)),
        before={name: state for name, state in before.items() if state is not None},
        journals=journals,
    )


def _in_turn(
    evaluator: Evaluator,
    config: TrainConfig,
    methods: Mapping[str, Mapping[str, Any]],
    single_s: float,
    keeper: Keeper,
    journal: Journal,
    journals: Mapping[str, MethodJournal],
    progress: Progress,
    tracker: Tracker,
) -> dict[str, LoopResult]:
    """Every method in turn: the same time, and as many measured placements as the first one came to."""
    reference_s = single_s / num_machines(evaluator)
    budget = LoopBudget.of(config.budget_s / len(methods), config.search.simulate_share, reference_s)
    found: dict[str, LoopResult] = {}
    for method, options in methods.items():
        before = journal.of(method, budget.seconds)
        if before is not None and before.is_done:
            found[method] = LoopResult.of(before)
        else:
            left_s = budget.seconds - (0.0 if before is None else before.seconds)
            progress.say(f"search: {method}, {format_clock(max(left_s, 0.0))}{'' if before is None else ' left'}")
            found[method] = search_and_measure(
                method,
                evaluator,
                budget,
                seed=config.seed,
                progress=progress,
                tracker=tracker,
                single_s=single_s,
                on_best=keeper.of(method),
                options=options,
                before=before,
                journal=journals[method],
            )
        if found[method].failure is None:
            budget = dataclasses.replace(budget, measurements=max(found[method].num_measured, 1))
    return found


def _learned_words(result: AgentResult) -> str:
    """What the agent learned about the host, a line each."""
    lines = result.say()
    if not lines:
        return "the host is as profiled, as far as the measured steps tell"
    return "\n  ".join(["what was learned about the host:", *lines])
