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
    num_samples: int = 64


_OF_POLICY: Mapping[str, Mapping[str, Any]] = {
    "seq2seq": {"learner": "reinforce", "init": "none", "share": 1.0, "num_samples": 16},
    "gnn": {"share": 1.0, "num_samples": 16},
    "improver": {"share": 1.0, "num_samples": 16},
    "schedule": {"init": "pretrained", "share": 1.0, "num_samples": 16},
}
_OF_LEARNER: Mapping[str, Mapping[str, Any]] = {"reinforce": {"reward": "sqrt", "screened": 1}}


def complete(policy: str | None, learner: str | None, **chosen: Any) -> Recipe:
    """The recipe of a policy and a learner, with what was chosen (what is not None) in the place of its own.

    A policy decides on its learner, its start, its share of the search and its samples an update, a learner on what it
    takes for rewards and on which samples are measured. Policies and learners of other packages go by the defaults of
    `Recipe`.

    Example:
        >>> paper = complete("seq2seq", None)
        >>> paper.learner, paper.reward, paper.init, paper.share, paper.screened
        ('reinforce', 'sqrt', 'none', 1.0, 1)
        >>> own = complete(None, None, share=0.5)
        >>> own.policy, own.learner, own.init, own.share, own.num_samples
        ('placer', 'ppo', 'starts', 0.5, 64)
    """
    recipe = Recipe() if policy is None else Recipe(policy)
    recipe = replace(recipe, **_OF_POLICY.get(recipe.policy, {}))
    if learner is not None:
        recipe = replace(recipe, learner=learner)
    recipe = replace(recipe, **_OF_LEARNER.get(recipe.learner, {}))
    return replace(recipe, **{name: value for name, value in chosen.items() if value is not None})
