"""`METHODS` as the face knows them: those of `rlplace.search`, and those that learn."""

from __future__ import annotations

from rlplace.search.registry import METHODS, Method, register_method

LEARNED, POLICY, SCHEDULE = "learned", "policy", "schedule"

for _method in (
    Method(LEARNED, "rlplace.training.agent.on_host:solve", "search", "learns the host from measured steps"),
    Method(SCHEDULE, "rlplace.training.schedule_search:solve", "search", "a pretrained policy, zero-shot: GO, DOPPLER"),
    Method(POLICY, "rlplace.training.policy_search:solve", "search", "a policy and annealing learn from each other"),
):
    if _method.name not in METHODS:
        register_method(_method)

__all__ = ["LEARNED", "METHODS", "POLICY", "SCHEDULE"]
