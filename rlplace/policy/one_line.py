"""`one_line`: how policies print."""

from __future__ import annotations

from rlplace.policy.protocols import LearnedPolicy


def one_line(policy: LearnedPolicy) -> str:
    """A policy in one line, where a module's own `repr` has one for each layer."""
    count = sum(parameter.numel() for parameter in policy.parameters())
    places = f"{policy.num_groups:,} groups on {policy.num_devices} devices"
    return f"{type(policy).__name__}({places}, {count:,} parameters)"
