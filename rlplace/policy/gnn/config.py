"""`GnnConfig`: options of the policy `gnn`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.decode import check_ranges
from rlplace.policy.sizes import MOST_LAYERS, MOST_WIDTH


@dataclass(frozen=True)
class GnnConfig:
    """The size of a `GnnPolicy`."""

    hidden: int = 64
    """Width of the network."""
    num_layers: int = 2
    """Rounds of messages between groups before devices are looked at."""
    num_rounds: int = 2
    """Rounds in which groups and devices see where groups are likely to be."""
    marks: int = 8
    """Random numbers that tell devices apart that are equal otherwise."""

    def __post_init__(self) -> None:
        ranges = {"hidden": (1, MOST_WIDTH), "num_layers": (0, MOST_LAYERS), "num_rounds": (1, MOST_LAYERS)}
        check_ranges(self, "gnn", ranges | {"marks": (0, MOST_WIDTH)})
