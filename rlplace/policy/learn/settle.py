"""`settle`: what a learner tells its policy after each update."""

from __future__ import annotations

from rlplace.policy.learn.elites import Elites
from rlplace.policy.protocols import StartsSomewhere, Straying


def settle(policy: object, flips: float | None = None, elites: Elites | None = None) -> None:
    """Has the policy propose around the best placement seen, and stay near its best guess, where it can be told.

    Args:
        policy: any; one that is neither `StartsSomewhere` nor `Straying` is left alone.
        flips: groups in which samples differ from the best guess on average; None leaves that as it is.
        elites: the best placements seen.
    """
    if elites is not None and len(elites) and isinstance(policy, StartsSomewhere):
        policy.start_from(elites.group_devices[0])
    if flips is not None and isinstance(policy, Straying):
        policy.set_flips(flips)
