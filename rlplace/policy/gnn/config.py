"""`GnnConfig`: options of the policy `gnn`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.errors import InvalidValue


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
        for name, least in (("hidden", 1), ("num_layers", 0), ("num_rounds", 1), ("marks", 0)):
            if getattr(self, name) < least:
                raise InvalidValue(name, getattr(self, name), f"at least {least}", where="gnn")
