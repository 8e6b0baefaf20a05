"""Policies that place groups, and how they learn.

`base` defines policies and learners, and has base classes of policies; `policies` has them by name, `options` their
options. `gnn` (with the policy `placer`), `improver`, `seq2seq` and `schedule` (on `schedule_network`) are policies,
and `learn/` holds learners.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.policy.base import GroupPolicy, IndependentPolicy, Learner, Policy, PolicyModule
    from rlplace.policy.gnn import GnnPolicy, GraphEncoder, PlacerPolicy, make_policy
    from rlplace.policy.improver import ImproverPolicy
    from rlplace.policy.learn.learners import (
        CloneLearner,
        EliteLearner,
        Elites,
        Reinforce,
        imitate,
        resume_learner,
        save_learner,
    )
    from rlplace.policy.learn.ppo import GroupPPO, learn_many
    from rlplace.policy.options import (
        CloneConfig,
        GnnConfig,
        ImproverConfig,
        LearnConfig,
        PlacerArchitecture,
        PPOConfig,
        ReinforceConfig,
        Seq2SeqConfig,
    )
    from rlplace.policy.policies import LEARNERS, POLICIES
    from rlplace.policy.seq2seq import Seq2SeqPolicy

__all__ = [
    "LEARNERS",
    "POLICIES",
    "CloneConfig",
    "CloneLearner",
    "EliteLearner",
    "Elites",
    "GnnConfig",
    "GnnPolicy",
    "GraphEncoder",
    "GroupPPO",
    "GroupPolicy",
    "ImproverConfig",
    "ImproverPolicy",
    "IndependentPolicy",
    "LearnConfig",
    "Learner",
    "PPOConfig",
    "PlacerArchitecture",
    "PlacerPolicy",
    "Policy",
    "PolicyModule",
    "Reinforce",
    "ReinforceConfig",
    "Seq2SeqConfig",
    "Seq2SeqPolicy",
    "imitate",
    "learn_many",
    "make_policy",
    "resume_learner",
    "save_learner",
]

__getattr__ = lazy(__name__, __file__)
