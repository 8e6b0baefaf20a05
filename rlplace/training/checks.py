"""What a run is to be, checked before anything is measured: names, and what goes with what."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlplace.env.rewards import make_reward
from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.grouping.rule import GroupingRule
from rlplace.measure.host_model import load_priors
from rlplace.policy.checks import check_fit
from rlplace.policy.registry import LEARNERS, POLICIES
from rlplace.training.config import TrainConfig
from rlplace.training.methods import GUIDED, LEARNED, METHODS, POLICY, method_of


def completed(config: TrainConfig | None, options: dict[str, Any]) -> TrainConfig:
    """The configuration with `options`, fields of it by name, over its own.

    Raises:
        InvalidValue: an unknown option, or one out of range.
    """
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in options:
        if name not in known:
            raise InvalidValue("option", name, f"one of {', '.join(sorted(known))}", where="train")
    return dataclasses.replace(config or TrainConfig(), **options)


def check_names(config: TrainConfig, *, is_simulated: bool = False) -> None:
    """Looks up everything that `config` names, so that a mistake is refused before anything is measured.

    Args:
        config: what a run is to be.
        is_simulated: whether its host is.

    Raises:
        UnknownName: no such method, policy, learner, reward or rule.
        InvalidValue: evaluations on a host that is measured, a guide, a policy or a learner for a method that takes
            none, the learner cannot teach the policy, or the policy takes no weights.
        FileProblem: the file of priors or of weights cannot be read, or it is of another kind of policy.
    """
    load_priors(config.search.priors)
    if config.evaluations is not None and not is_simulated:
        hint = "A search that measures has a budget of time: `--budget`."
        raise InvalidValue(
            "evaluations", config.evaluations, "none on a host that is measured", where="train", hint=hint
        )
    recipe, method = config.learn.recipe, method_of(config, is_simulated=is_simulated)
    if method not in METHODS and method in POLICIES:
        raise UnknownName("method", method, METHODS, hint=f"It is a policy: `--policy {method}`.")
    _ = METHODS[method], POLICIES[recipe.policy], LEARNERS[recipe.learner]
    make_reward(recipe.reward, 1.0)
    GroupingRule.parse(config.grouping)
    if config.guide is not None and method not in (LEARNED, GUIDED):
        hint = f"A policy guides the searches of `{LEARNED}` and `{GUIDED}`."
        raise InvalidValue("guide", config.search.guide, f"none with method {method}", where="train", hint=hint)
    if method in (POLICY, GUIDED) or config.guide is not None:
        check_fit(config.guide or config.learn)
        return
    for option, named in (("policy", config.learn.policy), ("learner", config.learn.learner)):
        if named is not None:
            hint = f"It is of the methods `{POLICY}` and `{GUIDED}`; `--guide` names a policy for `{LEARNED}`."
            raise InvalidValue(option, named, f"none with method {method}, which learns none", where="train", hint=hint)
