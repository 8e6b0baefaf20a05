"""`METHODS` with those that learn, the method that a configuration runs, and `check_names`: whether it can run.

`check_names` looks up every name of a configuration before anything is measured.
"""

from __future__ import annotations

import dataclasses

from rlplace.env import make_reward
from rlplace.errors import UnknownName, refuse_if
from rlplace.graphs.grouping.groups import GroupingRule
from rlplace.measure import Host
from rlplace.measure.host_model import load_priors
from rlplace.policy import LEARNERS, POLICIES, LearnConfig
from rlplace.policy.policies import check_fit
from rlplace.search import METHODS, Method, register_method
from rlplace.training.config import AgentConfig, TrainConfig
from rlplace.training.forecast import least_calibrated

LEARNED, POLICY, GUIDED, SCHEDULE = "learned", "policy", "guided", "schedule"
PORTFOLIO = "portfolio"
"""The method that searches beside the one that is asked for."""

for _method in (
    Method(LEARNED, "rlplace.training.agent.agent:solve", "search", "learns the host from measured steps"),
    Method(
        SCHEDULE,
        "rlplace.training.policy_methods:search_zero_shot",
        "search",
        "a pretrained policy, zero-shot: GO, DOPPLER",
    ),
    Method(
        POLICY,
        "rlplace.training.policy_methods:search_by_policy",
        "search",
        "a policy and annealing learn from each other",
    ),
    Method(
        GUIDED,
        "rlplace.training.policy_methods:search_guided",
        "search",
        "portfolio, with starts and moves of a policy",
    ),
):
    if _method.name not in METHODS:
        register_method(_method)

__all__ = ["GUIDED", "LEARNED", "METHODS", "POLICY", "PORTFOLIO", "SCHEDULE", "check_names", "method_of", "methods_of"]


def method_of(config: TrainConfig, *, is_simulated: bool) -> str:
    """The method that `train` runs.

    It is the one that is named; where none is, `policy` if a policy or a learner is named and no guide, else `learned`.
    On a simulated host, where nothing can be measured, `guided` takes the place of `learned` if there is a guide, else
    `policy`.
    """
    method = config.search.method
    if method is None:
        is_policy_named = config.learn.policy is not None or config.learn.learner is not None
        method = POLICY if is_policy_named and config.guide is None else LEARNED
    on_simulated = POLICY if config.guide is None else GUIDED
    return on_simulated if is_simulated and method == LEARNED else method


def methods_of(config: TrainConfig, host: Host) -> tuple[str, ...]:
    """The methods that search, the one that is asked for first."""
    return tuple(dict.fromkeys((method_of(config, is_simulated=host.is_simulated), PORTFOLIO)))


def check_names(config: TrainConfig, *, is_simulated: bool = False) -> None:
    """Looks up everything that `config` names, so that a mistake is refused before anything is measured.

    Args:
        config: of the run.
        is_simulated: whether its host is.

    Raises:
        UnknownName: no such method, policy, learner, reward or rule.
        InvalidValue: evaluations on a host that is measured or beside a budget of time, too few placements to
            calibrate on, a guide, a policy, a learner or options of one for a method that takes none, the learner
            cannot teach the policy, or the policy takes no weights.
        FileProblem: the file of priors or of weights cannot be read, or it is of another kind of policy.
    """
    load_priors(config.search.priors)
    recipe, method = config.learn.recipe, method_of(config, is_simulated=is_simulated)
    if method not in METHODS and method in POLICIES:
        raise UnknownName("method", method, METHODS, hint=f"It is a policy: `--policy {method}`.")
    _ = METHODS[method], POLICIES[recipe.policy], LEARNERS[recipe.learner]
    make_reward(recipe.reward, 1.0)
    GroupingRule.parse(config.grouping)
    has_evaluations, asked = config.evaluations is not None, method_of(config, is_simulated=False)
    has_policy = method in (POLICY, GUIDED) or config.guide is not None
    none_learns = f"none with method {method}, which learns none"
    own_policy = f"It is of the methods `{POLICY}` and `{GUIDED}`; `--guide` names a policy for `{LEARNED}`."
    for is_wrong, field, actual, expected, hint in (
        (
            has_evaluations and not is_simulated,
            "evaluations",
            config.evaluations,
            "none on a host that is measured",
            "A search that measures has a budget of time: `--budget`.",
        ),
        (
            has_evaluations and config.budget_s != TrainConfig.budget_s,
            "evaluations",
            config.evaluations,
            "none beside budget_s",
            "Leave one of the two out.",
        ),
        (
            config.guide is not None and method not in (LEARNED, GUIDED),
            "guide",
            config.search.guide,
            f"none with method {method}",
            f"A policy guides the searches of `{LEARNED}` and `{GUIDED}`.",
        ),
        (
            asked != LEARNED and config.agent != AgentConfig(),
            "agent",
            _changed(config.agent),
            f"none with method {asked}",
            f"The agent is the method `{LEARNED}`.",
        ),
        (
            0 < config.num_calibrated < least_calibrated(config),
            "num_calibrated",
            config.num_calibrated,
            f"at least {least_calibrated(config)}, or 0 for no calibration",
            "Traced steps tell more: without --no-trace, 2 are enough." if not config.is_traced else "",
        ),
        (not has_policy and config.learn.policy is not None, "policy", config.learn.policy, none_learns, own_policy),
        (not has_policy and config.learn.learner is not None, "learner", config.learn.learner, none_learns, own_policy),
        (
            not has_policy and method != SCHEDULE and config.learn != LearnConfig(),
            "learn",
            _changed(config.learn),
            none_learns,
            f"They are of the methods `{POLICY}`, `{GUIDED}` and `{SCHEDULE}`, and of `--guide`.",
        ),
    ):
        refuse_if(is_wrong, field, actual, expected, where="train", hint=hint)
    if has_policy:
        check_fit(config.guide or config.learn)


def _changed(options: AgentConfig | LearnConfig) -> str:
    """Names of the options that are not as by default."""
    default = type(options)()
    names = (field.name for field in dataclasses.fields(options))
    return ", ".join(name for name in names if getattr(options, name) != getattr(default, name))
