"""`METHODS` as the face knows them: those of `rlplace.search`, and those that learn."""

from __future__ import annotations

from rlplace.search.registry import METHODS, Method, register_method

LEARNED, POLICY, GUIDED = "learned", "policy", "guided"

for _method in (
    Method(LEARNED, "rlplace.training.agent.on_host:solve", "search", "learns the host from measured steps"),
    Method(POLICY, "rlplace.training.policy_search:solve", "search", "a policy and annealing learn from each other"),
    Method(GUIDED, "rlplace.training.guide:solve", "search", "portfolio, with starts and moves of a policy"),
):
    if _method.name not in METHODS:
        register_method(_method)

__all__ = ["GUIDED", "LEARNED", "METHODS", "POLICY"]
