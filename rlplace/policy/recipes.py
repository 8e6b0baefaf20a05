"""`Recipe`: which policy, learner, reward and start go together where the user leaves them open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How a policy learns, with nothing left open; the fields are those of `LearnConfig`."""

    policy: str = "placer"
    learner: str = "ppo"
    reward: str = "log_speedup"
    init: str = "starts"
    share: float = 0.05
    screened: int = 8


_OF_POLICY: Mapping[str, Mapping[str, Any]] = {
    "seq2seq": {"learner": "reinforce", "init": "none", "share": 1.0},
    "gnn": {"share": 1.0},
    "improver": {"share": 1.0},
    "schedule": {"init": "pretrained", "share": 1.0},
}
_OF_LEARNER: Mapping[str, Mapping[str, Any]] = {"reinforce": {"reward": "sqrt", "screened": 1}}


def complete(policy: str | None, learner: str | None, **chosen: Any) -> Recipe:
    """The recipe of a policy and a learner, with what was chosen (what is not None) in the place of its own.

    A policy decides on its learner, its start and its share of the search, a learner on what it takes for rewards and
    on which samples are measured. Policies and learners of other packages go by the defaults of `Recipe`.

    Example:
        >>> complete("seq2seq", None)
        Recipe(policy='seq2seq', learner='reinforce', reward='sqrt', init='none', share=1.0, screened=1)
        >>> complete(None, None, share=0.5)
        Recipe(policy='placer', learner='ppo', reward='log_speedup', init='starts', share=0.5, screened=8)
    """
    recipe = Recipe() if policy is None else Recipe(policy)
    recipe = replace(recipe, **_OF_POLICY.get(recipe.policy, {}))
    if learner is not None:
        recipe = replace(recipe, learner=learner)
    recipe = replace(recipe, **_OF_LEARNER.get(recipe.learner, {}))
    return replace(recipe, **{name: value for name, value in chosen.items() if value is not None})
