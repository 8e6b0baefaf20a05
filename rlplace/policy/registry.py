"""`POLICIES` and `LEARNERS`: by name, what makes a policy for a problem, and what makes a learner for a policy."""

from __future__ import annotations

from collections.abc import Callable

from rlplace.errors import InvalidValue
from rlplace.measure.problem import Problem
from rlplace.policy.config import LearnConfig
from rlplace.policy.learn.clone import CloneLearner
from rlplace.policy.learn.ppo import PlacerPPO
from rlplace.policy.placer.policy import PlacerPolicy, make_policy
from rlplace.policy.protocols import Learner, Policy
from rlplace.policy.schedule.network_file import new_network
from rlplace.policy.schedule.policy import SchedulePolicy
from rlplace.registry import Registry

MakePolicy = Callable[[Problem, LearnConfig, int], Policy]
"""From a problem, the options and a seed to a policy that knows nothing yet."""
MakeLearner = Callable[[Policy, LearnConfig, int], Learner]
"""From a policy, the options and a seed to what makes it better."""


def make_placer(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A graph neural network and a table of logits, every group by itself."""
    return make_policy(problem, config.placer, seed=seed)


def make_schedule(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A network over the partial schedule, that begins as a list scheduler with known weights."""
    return SchedulePolicy(problem, new_network(config.schedule, seed=seed), config.schedule, seed=seed)


def make_ppo(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """Proximal policy optimisation with a ratio for every group, and self-imitation."""
    return PlacerPPO(_placer(policy, "ppo"), config=config.ppo, seed=seed)


def make_clone(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """Cloning of the best placements seen."""
    return CloneLearner(_placer(policy, "clone"), config.clone)


POLICIES: Registry[MakePolicy] = Registry(
    "policy", {"placer": make_placer, "schedule": make_schedule}, group="rlplace.policies"
)
"""Policies by name; installed packages bring more as entry points of `rlplace.policies`."""
LEARNERS: Registry[MakeLearner] = Registry("learner", {"ppo": make_ppo, "clone": make_clone}, group="rlplace.learners")
"""Learners by name; installed packages bring more as entry points of `rlplace.learners`."""


def _placer(policy: Policy, learner: str) -> PlacerPolicy:
    if not isinstance(policy, PlacerPolicy):
        raise InvalidValue(
            "policy",
            type(policy).__name__,
            "`placer`, whose logits it needs",
            where=f"learner {learner}",
            hint="Choose another learner with it.",
        )
    return policy
