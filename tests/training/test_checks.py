"""Every option of `TrainConfig` takes effect in `train(problem, ...)`, or is refused there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from micrographs import fork_join
from random_problems import plain_host

from rlplace.errors import InvalidValue
from rlplace.graphs import Constraints, Grouping, capture
from rlplace.measure import Costs, Problem
from rlplace.policy import LearnConfig
from rlplace.training import SearchConfig, TrainConfig, train
from rlplace.training.agent import AgentConfig
from rlplace.training.tracking import NoTracker


class Seen(BaseException):
    """Carries what arrived where an option takes effect; it is no method's fault, so it ends the run."""


def problem(*, is_real: bool) -> Problem:
    graph = fork_join(3, 2, 1000)
    costs = Costs(np.full((graph.num_ops, 2), 0.01), "estimated")
    return Problem(graph, core_host() if is_real else plain_host(2), costs, Grouping(np.arange(graph.num_ops)))


GROUPS = "its groups and constraints"
REFUSED = {
    "num_groups": (7, GROUPS),
    "grouping": ("none", GROUPS),
    "acyclic": (True, GROUPS),
    "constraints": (Constraints(pins=(("*", "d0"),)), GROUPS),
    "track": ("offline", "tracker"),
}
"""What means nothing for a problem that is made, or with nowhere to go; and what the message says."""
ANNEAL = "rlplace.search.improve.anneal:solve_anneal"
LEARNED = "rlplace.training.agent.agent:solve"
HONOURED: dict[str, tuple[object, str, Callable[..., object]]] = {
    "budget_s": (0.25, ANNEAL, lambda task, **_: task.budget.seconds),
    "total_s": (9.5, "rlplace.training.phases:searching_within", lambda config, *_: config.total_s),
    "evaluations": (7, ANNEAL, lambda task, **_: task.budget.evaluations),
    "seed": (5, ANNEAL, lambda task, **_: task._seed),
    "isolated": (False, "rlplace.measure.evaluator:make_runner", lambda *_, isolated, **__: isolated),
    "is_traced": (False, LEARNED, lambda *_, is_traced, **__: is_traced),
    "cluster": ("a:1", "rlplace.training.run:reach", lambda word, **_: word),
    "store": ("off", "rlplace.training.run:measuring", lambda host, word, **_: word),
    "search": (SearchConfig(method="anneal"), ANNEAL, lambda *_, **__: SearchConfig(method="anneal")),
    "learn": (
        LearnConfig(share=0.5),
        "rlplace.training.policy_methods:search_by_policy",
        lambda task, config, **_: config,
    ),
    "agent": (AgentConfig(batch=5), LEARNED, lambda task, config, **_: config),
}
"""A value, the function that it takes effect in, and how it arrives there."""
REAL = ("isolated", "is_traced", "store", "agent")


@pytest.mark.slow
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainConfig)])
def test_an_option_takes_effect_or_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in REFUSED:
        value, hint = REFUSED[name]
        with pytest.raises(InvalidValue, match=f"{name} is (.|\n)*{hint}"):
            train(problem(is_real=False), budget_s=0.5, **{name: value})  # type: ignore[arg-type]
        return
    value, where, arrived = HONOURED[name]  # a new option has to be in one of the two

    def seen(*args: Any, **options: Any) -> object:
        raise Seen(arrived(*args, **options))

    monkeypatch.setattr(where.replace(":", "."), seen)
    options: dict[str, Any] = {"store": "off", "budget_s": 0.5} if name != "evaluations" else {}
    if where == ANNEAL:
        options["search"] = SearchConfig(method="anneal")
    if where == LEARNED:
        monkeypatch.setattr("rlplace.training.phases.make_evaluator", FakeEvaluator)
        monkeypatch.setattr("rlplace.training.phases.Evaluator", lambda *given, **_: FakeEvaluator(None, *given))
        options["search"] = SearchConfig(num_calibrated=0)
    with pytest.raises(Seen) as found:
        train(problem(is_real=name in REAL), **options | {name: value})
    assert found.value.args == (value,)


class FakeEvaluator:
    """An evaluator of a host of this machine that is asked nothing."""

    is_measured = True

    def __init__(self, cluster: object, problem: Problem, simulator: object, *_: object, **__: object) -> None:
        self.problem, self.simulator = problem, simulator

    def close(self) -> None:
        pass


def test_what_is_as_by_default_is_no_option() -> None:
    with pytest.raises(InvalidValue, match="evaluations is 5, expected none beside budget_s"):
        train(problem(is_real=False), TrainConfig(num_groups=256, grouping="heavy-edge"), budget_s=1.0, evaluations=5)


def test_a_tracker_that_is_given_goes_with_its_mode() -> None:
    search = SearchConfig(method="single")
    train(problem(is_real=False), evaluations=8, search=search, track="offline", tracker=NoTracker(), progress=False)


def test_a_graph_is_no_problem() -> None:
    graph = capture(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(InvalidValue, match=r"problem is 'OpGraph'.*Problem\.profile\(graph, host\)"):
        train(graph, budget_s=1)  # type: ignore[arg-type]
