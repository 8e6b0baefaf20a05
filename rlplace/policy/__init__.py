"""Policies that place groups, and how they learn."""

from rlplace.policy.checkpoint import load_policy, save_policy
from rlplace.policy.learn.elites import Elites
from rlplace.policy.learn.imitate import imitate
from rlplace.policy.learn.ppo import PlacerPPO
from rlplace.policy.learn.rollout_buffer import PlacementRolloutBuffer
from rlplace.policy.placer.distribution import GroupCategorical
from rlplace.policy.placer.gnn import GraphEncoder
from rlplace.policy.placer.policy import PlacerArchitecture, PlacerPolicy, make_policy

__all__ = [
    "Elites",
    "GraphEncoder",
    "GroupCategorical",
    "PlacementRolloutBuffer",
    "PlacerArchitecture",
    "PlacerPPO",
    "PlacerPolicy",
    "imitate",
    "load_policy",
    "make_policy",
    "save_policy",
]
