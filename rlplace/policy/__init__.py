"""Policies that place groups, and how they learn."""

from rlplace.policy.checkpoint import load_policy, save_policy
from rlplace.policy.distribution import GroupCategorical
from rlplace.policy.elites import Elites
from rlplace.policy.gnn import GraphEncoder
from rlplace.policy.imitate import imitate
from rlplace.policy.placer_policy import PlacerArchitecture, PlacerPolicy, make_policy
from rlplace.policy.ppo import PlacerPPO
from rlplace.policy.rollout_buffer import PlacementRolloutBuffer

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
