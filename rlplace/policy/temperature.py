"""How sharp a distribution over groups must be for its samples to stay near its mode, and what it is without that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from rlplace.policy.protocols import Tempered

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
BISECTIONS = 30


def temperature_for(logits_GD: Tensor, flips: float) -> float:
    """What to divide logits by, so that a sample differs from the mode in `flips` groups on average.

    Which groups are flipped, and to what, stays the policy's to say: those it is least sure of. A policy sure of
    everything would propose one placement for ever; an unsure one would change too much at once to tell what made a
    placement better.

    Args:
        logits_GD: (G, D), minus infinity where a group may not be.
        flips: more than 0; where no temperature gives as many, or as few, the nearest of the range is taken.
    """
    logits_GD = logits_GD.double()
    low, high = LEAST_TEMPERATURE, MOST_TEMPERATURE
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        expected = (1 - torch.softmax(logits_GD / middle, dim=-1).amax(dim=-1)).sum()
        low, high = (low, middle) if expected > flips else (middle, high)
    return low


@contextlib.contextmanager
def at_temperature_1(policy: object) -> Iterator[None]:
    """While active, a policy that has a temperature has that of 1: what it is taught holds however it is sampled."""
    if not isinstance(policy, Tempered):
        yield
        return
    before = policy.temperature
    policy.temperature = torch.ones(())
    try:
        yield
    finally:
        policy.temperature = before
