"""`ScheduleConfig`: options of the policy `schedule`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.decode import check_ranges
from rlplace.errors import InvalidValue
from rlplace.policy.sizes import MOST_WIDTH


@dataclass(frozen=True)
class ScheduleConfig:
    """The size of the policy `schedule`, and how far its samples leave its best guess."""

    hidden: int = 32
    """Width of its networks; pretrained weights bring their own."""
    flips: float = 2.0
    """Groups in which a first sample differs from the mode, on average."""

    def __post_init__(self) -> None:
        check_ranges(self, "policy schedule", {"hidden": (1, MOST_WIDTH)})
        if not self.flips > 0:
            raise InvalidValue("flips", self.flips, "more than 0", where="policy schedule")
