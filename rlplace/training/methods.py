"""`METHODS` as the face knows them: those of `rlplace.search`, and those that learn."""

from __future__ import annotations

from rlplace.measure import Host
from rlplace.search import METHODS, Method, register_method
from rlplace.training.config import TrainConfig

LEARNED, POLICY, GUIDED, SCHEDULE = "learned", "policy", "guided", "schedule"
PORTFOLIO = "portfolio"
"""What searches beside the method that is asked for."""

for _method in (
    Method(LEARNED, "rlplace.training.agent.agent:solve", "search", "learns the host from measured steps"),
    Method(
        SCHEDULE,
        "rlplace.training.policy_methods:search_zero_shot",
        "search",
        "a pretrained policy, zero-shot: GO, DOPPLER",
    ),
    Method(
        POLICY,
        "rlplace.training.policy_methods:search_by_policy",
        "search",
        "a policy and annealing learn from each other",
    ),
    Method(
        GUIDED,
        "rlplace.training.policy_methods:search_guided",
        "search",
        "portfolio, with starts and moves of a policy",
    ),
):
    if _method.name not in METHODS:
        register_method(_method)

__all__ = ["GUIDED", "LEARNED", "METHODS", "POLICY", "PORTFOLIO", "SCHEDULE", "method_of", "methods_of"]


def method_of(config: TrainConfig, *, is_simulated: bool) -> str:
    """The method that `train` runs.

    It is the one that is named; where none is, `policy` if a policy or a learner is named and no guide, else `learned`.
    On a simulated host, where nothing can be measured, `guided` takes the place of `learned` if there is a guide, else
    `policy`.
    """
    method = config.search.method
    if method is None:
        is_policy_named = config.learn.policy is not None or config.learn.learner is not None
        method = POLICY if is_policy_named and config.guide is None else LEARNED
    on_simulated = POLICY if config.guide is None else GUIDED
    return on_simulated if is_simulated and method == LEARNED else method


def methods_of(config: TrainConfig, host: Host) -> tuple[str, ...]:
    """The methods that search, the one that is asked for first."""
    return tuple(dict.fromkeys((method_of(config, is_simulated=host.is_simulated), PORTFOLIO)))
