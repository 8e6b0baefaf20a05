"""`one_line`: how policies print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch.nn import Parameter


class Counted(Protocol):
    """A policy as far as it is counted."""

    @property
    def num_groups(self) -> int: ...

    @property
    def num_devices(self) -> int: ...

    def parameters(self) -> Iterator[Parameter]: ...


def one_line(policy: Counted) -> str:
    """A policy in one line, where a module's own `repr` has one for each layer."""
    count = sum(parameter.numel() for parameter in policy.parameters())
    places = f"{policy.num_groups:,} groups on {policy.num_devices} devices"
    return f"{type(policy).__name__}({places}, {count:,} parameters)"
