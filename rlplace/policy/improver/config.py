"""`ImproverConfig`: options of the policy `improver`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.decode import check_ranges
from rlplace.errors import InvalidValue
from rlplace.policy.sizes import MOST_LAYERS, MOST_WIDTH


@dataclass(frozen=True)
class ImproverConfig:
    """The size of an `ImproverPolicy`, and how far it goes."""

    hidden: int = 32
    """Width of the network."""
    num_layers: int = 2
    """Rounds of messages between groups."""
    moves: float = 2.0
    """Groups that a pass moves on average before a learner says otherwise."""
    explore: float = 0.5
    """Share of the moves that are drawn at random, however much was learned: without them the same few moves that do
    no harm would be tried for ever."""

    def __post_init__(self) -> None:
        check_ranges(self, "improver", {"hidden": (1, MOST_WIDTH), "num_layers": (0, MOST_LAYERS)})
        if not 0.0 < self.explore <= 1.0:
            raise InvalidValue("explore", self.explore, "more than 0, at most 1", where="improver")
        if not self.moves > 0:
            raise InvalidValue("moves", self.moves, "more than 0", where="improver")
