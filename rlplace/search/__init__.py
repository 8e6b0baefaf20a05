"""Search: heuristics over a `Problem`; each returns the devices of ops, (N,) int32."""

from rlplace.search.improve.anneal import AnnealConfig, anneal
from rlplace.search.rules.baselines import blocks, random, round_robin, single
from rlplace.search.schedule.eft import eft

__all__ = ["AnnealConfig", "anneal", "blocks", "eft", "random", "round_robin", "single"]
