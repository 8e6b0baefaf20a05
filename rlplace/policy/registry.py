"""`POLICIES` and `LEARNERS`: by name, what makes a policy for a problem, and what makes a learner for a policy."""

from __future__ import annotations

from collections.abc import Callable

from rlplace.errors import InvalidValue
from rlplace.measure.problem import Problem
from rlplace.policy.config import LearnConfig
from rlplace.policy.gnn import GnnPolicy
from rlplace.policy.improver import ImproverPolicy
from rlplace.policy.learn.clone import CloneLearner
from rlplace.policy.learn.ppo import GroupPPO
from rlplace.policy.learn.reinforce import Reinforce
from rlplace.policy.placer import make_policy
from rlplace.policy.protocols import GroupPolicy, Learner, Policy
from rlplace.policy.schedule.network import new_network
from rlplace.policy.schedule.policy import SchedulePolicy
from rlplace.policy.seq2seq import Seq2SeqPolicy, seq2seq_inputs
from rlplace.registry import Registry

MakePolicy = Callable[[Problem, LearnConfig, int], Policy]
"""From a problem, the options and a seed to a policy that knows nothing yet."""
MakeLearner = Callable[[Policy, LearnConfig, int], Learner]
"""From a policy, the options and a seed to what makes it better."""


def make_placer(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A graph neural network and a table of logits, every group by itself."""
    return make_policy(problem, config.placer, seed=seed)


def make_gnn(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A graph network over groups and devices that fits any problem, every group by itself."""
    return GnnPolicy(problem, config.gnn, seed=seed)


def make_improver(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """Passes over the best placement known that move a group here and there; the network fits any problem."""
    return ImproverPolicy(problem, config.improver, seed=seed)


def make_seq2seq(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """The sequence-to-sequence network of Mirhoseini et al. 2017, for one problem."""
    return Seq2SeqPolicy(seq2seq_inputs(problem), config.seq2seq, seed=seed)


def make_schedule(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A network over the partial schedule, that begins as a list scheduler with known weights."""
    return SchedulePolicy(problem, new_network(config.schedule, seed=seed), config.schedule, seed=seed)


def make_ppo(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """Proximal policy optimisation with a ratio for every group, and self-imitation."""
    return GroupPPO(_by_group(policy, "ppo"), config.ppo, seed=seed)


def make_clone(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """Cloning of the best placements seen."""
    return CloneLearner(_by_group(policy, "clone"), config.clone)


def make_reinforce(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """REINFORCE with a moving-average baseline, as in Mirhoseini et al. 2017; it draws nothing, so needs no seed."""
    return Reinforce(policy, config.reinforce)


POLICIES: Registry[MakePolicy] = Registry(
    "policy",
    {
        "placer": make_placer,
        "gnn": make_gnn,
        "improver": make_improver,
        "schedule": make_schedule,
        "seq2seq": make_seq2seq,
    },
    group="rlplace.policies",
)
"""Policies by name; installed packages bring more as entry points of `rlplace.policies`."""
LEARNERS: Registry[MakeLearner] = Registry(
    "learner", {"ppo": make_ppo, "reinforce": make_reinforce, "clone": make_clone}, group="rlplace.learners"
)
"""Learners by name; installed packages bring more as entry points of `rlplace.learners`."""


def _by_group(policy: Policy, learner: str) -> GroupPolicy:
    if not isinstance(policy, GroupPolicy):
        raise InvalidValue(
            "policy",
            type(policy).__name__,
            "one with `evaluate`, log-probabilities by group, and `parameters`",
            where=f"learner {learner}",
            hint="Choose another learner with it.",
        )
    return policy
