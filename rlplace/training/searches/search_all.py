"""`search_all`: every method of a run gets its options and its budget, or goes on with what is left of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlplace.format import format_clock
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge, LearnedHost, Prior
from rlplace.policy.learn.state import LearnerFile
from rlplace.search.task import Budget, Saveable
from rlplace.session.calibrate import Known
from rlplace.session.facts import MethodResult, ratio_of
from rlplace.session.session import MethodKeeper
from rlplace.training.agent.agent import AgentResult
from rlplace.training.methods import GUIDED, LEARNED, POLICY, PORTFOLIO, SCHEDULE
from rlplace.training.outputs import Leader, TrainingRun
from rlplace.training.searches.on_cluster import agent_for, num_machines, search_on_cluster
from rlplace.training.searches.racing_host import LoopBudget
from rlplace.training.searches.search_loop import search_and_measure
from rlplace.training.searches.side_by_side import search_side_by_side

LEARNER = "learner.safetensors"
"""The state of a method's learner, among the files of the session."""

Options = Mapping[str, Mapping[str, Any]]


def options_of(
    run: TrainingRun,
    methods: tuple[str, ...],
    evaluator: Evaluator,
    known: Known | None,
    prior: Prior,
    knowledge: HostKnowledge | None,
) -> dict[str, dict[str, Any]]:
    """The options of each method, with what those that were interrupted go on from.

    Under a budget of evaluations that is nothing: such a method begins again, and finds the same.

    Args:
        run: with its configuration, and the placement that methods may start from.
        methods: that search.
        evaluator: measures for them.
        known: what was measured to calibrate.
        prior: how far the host may be from its figures.
        knowledge: what other workloads taught about the host.
    """
    config, start = run.config, run.start
    learn = config.learn if run.weights is None else dataclasses.replace(config.learn, init=str(run.weights))
    own: dict[str, dict[str, Any]] = {
        LEARNED: {
            "config": agent_for(config.agent, evaluator),
            "known": known,
            "prior": prior,
            "guide": config.guide,
            "start": start,
            "knowledge": knowledge,
        },
        POLICY: {"config": learn, "start": start},
        SCHEDULE: {"config": config.learn},
        GUIDED: {"config": config.guide or config.learn, "start": start},
        PORTFOLIO: {"start": start},
    }
    options = {name: own.get(name, {}) for name in methods}
    if config.evaluations is not None:
        return options
    for name, given in options.items():
        if name in (POLICY, GUIDED, SCHEDULE) or (name == LEARNED and config.guide is not None):
            given["learner_file"] = LearnerFile(run.session, LEARNER, is_resumed=run.is_resumed, say=run.progress.say)
        before = run.session.of(name, 0.0)
        if before is not None and "start" in given:
            begun = before.start if name != LEARNED or before.plan is None else before.plan.devices
            given["start"] = given["start"] if begun is None else begun
    return options


def search_all(
    run: TrainingRun, evaluator: Evaluator, options: Options, single_s: float, leader: Leader
) -> dict[str, MethodResult]:
    """What each method finds: in turn on a host of this machine, side by side on a simulated one.

    Args:
        run: what keeps results, is told how it goes, and searches on a cluster.
        evaluator: simulates, and runs.
        options: of each method.
        single_s: step time on the best single device.
        leader: keeps the best placement so far, and what is learned.
    """
    problem, session, config = evaluator.problem, run.session, run.config

    def keep_learned(learned: Saveable) -> None:
        leader.keep_learned(learned)
        if isinstance(learned, AgentResult):
            run.progress.say(_learned_words(learned))
            if run.log is not None:
                run.log.keep_learned(problem.graph.fingerprint, LearnedHost.of(learned.posterior))

    keepers = {name: MethodKeeper(session, name, problem.host.num_devices, keep_learned) for name in options}
    if evaluator.is_measured:
        return _in_turn(run, evaluator, options, single_s, leader, keepers)
    budget = Budget(seconds=config.budget_s) if config.evaluations is None else Budget(config.evaluations)
    before = {name: session.of(name, min(budget.seconds, budget.evaluations)) for name in options}
    search = search_side_by_side if run.cluster is None else partial(search_on_cluster, run.cluster)
    return search(
        options,
        problem,
        budget,
        seed=config.seed,
        progress=run.progress,
        tracker=run.tracker,
        single_s=single_s,
        on_best=lambda method, plan, step_s: leader.of(method)(plan, step_s, ratio_of(step_s, single_s)),
        before={name: result for name, result in before.items() if result is not None},
        keepers=keepers,
    )


def _in_turn(
    run: TrainingRun,
    evaluator: Evaluator,
    methods: Options,
    single_s: float,
    leader: Leader,
    keepers: Mapping[str, MethodKeeper],
) -> dict[str, MethodResult]:
    """Every method in turn: the same time, and as many measured placements as the first one ran."""
    config, reference_s = run.config, single_s / num_machines(evaluator)
    budget = LoopBudget.of(config.budget_s / len(methods), config.search.simulate_share, reference_s)
    found: dict[str, MethodResult] = {}
    for method, options in methods.items():
        before = run.session.of(method, budget.seconds)
        if before is not None and before.is_done:
            found[method] = before
        else:
            left_s = budget.seconds - (0.0 if before is None else before.seconds)
            run.progress.say(f"search: {method}, {format_clock(max(left_s, 0.0))}{'' if before is None else ' left'}")
            found[method] = search_and_measure(
                method,
                evaluator,
                budget,
                seed=config.seed,
                progress=run.progress,
                tracker=run.tracker,
                single_s=single_s,
                on_best=leader.of(method),
                options=options,
                before=before,
                keeper=keepers[method],
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
