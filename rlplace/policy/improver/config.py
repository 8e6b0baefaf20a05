"""`ImproverConfig`: options of the policy `improver`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.errors import InvalidValue


@dataclass(frozen=True)
class ImproverConfig:
    """The size of an `ImproverPolicy`, and how far it goes."""

    hidden: int = 32
    """Width of the network."""
    num_layers: int = 2
    """Rounds of messages between groups."""
    moves: float = 2.0
    """Groups that a pass moves on average before a learner says otherwise."""

    def __post_init__(self) -> None:
        for name, least in (("hidden", 1), ("num_layers", 0)):
            if getattr(self, name) < least:
                raise InvalidValue(name, getattr(self, name), f"at least {least}", where="improver")
        if not self.moves > 0:
            raise InvalidValue("moves", self.moves, "more than 0", where="improver")
