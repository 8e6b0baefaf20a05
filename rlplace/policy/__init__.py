"""Policies that place groups, and how they learn.

`protocols` says what a policy and a learner are, `registry` has them by name, `config` their options. `placer`, `gnn`,
`improver`, `seq2seq` and `schedule/` are policies, `learn/` holds learners and what they share, `checkpoint` the files.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.faces import lazy

if TYPE_CHECKING:
    from rlplace.policy.base import GroupPolicy, Learner, Policy
    from rlplace.policy.gnn import GnnPolicy
    from rlplace.policy.improver import ImproverPolicy
    from rlplace.policy.learn.imitation import CloneLearner, Elites, imitate
    from rlplace.policy.learn.ppo import GroupPPO, PlacerPPO, learn_many
    from rlplace.policy.learn.reinforce import Reinforce
    from rlplace.policy.learn.state import resume_learner, save_learner
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
    from rlplace.policy.placer import GraphEncoder, GroupCategorical, PlacerPolicy, load_policy, make_policy
    from rlplace.policy.policies import LEARNERS, POLICIES
    from rlplace.policy.seq2seq import Seq2SeqPolicy

__all__ = [
    "LEARNERS",
    "POLICIES",
    "CloneConfig",
    "CloneLearner",
    "Elites",
    "GnnConfig",
    "GnnPolicy",
    "GraphEncoder",
    "GroupCategorical",
    "GroupPPO",
    "GroupPolicy",
    "ImproverConfig",
    "ImproverPolicy",
    "LearnConfig",
    "Learner",
    "PPOConfig",
    "PlacerArchitecture",
    "PlacerPPO",
    "PlacerPolicy",
    "Policy",
    "Reinforce",
    "ReinforceConfig",
    "Seq2SeqConfig",
    "Seq2SeqPolicy",
    "imitate",
    "learn_many",
    "load_policy",
    "make_policy",
    "resume_learner",
    "save_learner",
]

__getattr__ = lazy(__name__, __file__)
