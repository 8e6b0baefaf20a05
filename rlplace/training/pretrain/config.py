"""`PretrainConfig`: how much weights are trained; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlplace.errors import InvalidValue
from rlplace.seeds import check_seed


@dataclass(frozen=True)
class PretrainConfig:
    """How weights of the policy `schedule` are trained."""

    seed: int = 0
    """Of problems, weights and gradient steps."""
    num_drawn: int = 240
    """Weights of the list scheduler that are drawn, each tried over every grouping."""
    drawn_problems: int = 64
    """Problems that they are tried on."""
    num_bases: int = 24
    """Those of them that do best together, which are varied."""
    num_varied: int = 160
    """Variations of them."""
    varied_problems: int = 120
    """Problems that these are tried on."""
    num_components: int = 128
    """Groupings with weights that the policy knows, of those tried."""
    problems: int = 600
    """Problems that each of them is simulated on, for the networks to learn from."""
    synthetic: float = 0.4
    """Share of problems whose graphs are synthetic; the others are captured models, or `graphs`."""
    captured: bool = True
    """Capture models too; without, all graphs are synthetic or of `graphs`."""
    graphs: tuple[Path, ...] = ()
    """Graph files that are trained on besides."""
    hidden: int = 32
    """Width of the networks."""
    steps: int = 600
    """Gradient steps of each network."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "pretrain")
        for name in (
            *("num_drawn", "drawn_problems", "num_bases", "num_varied", "varied_problems", "num_components"),
            *("hidden", "steps"),
        ):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1", where="pretrain")
        if self.problems < 2:
            raise InvalidValue("problems", self.problems, "at least 2", where="pretrain")
        if not 0.0 <= self.synthetic <= 1.0:
            raise InvalidValue("synthetic", self.synthetic, "0..1", where="pretrain")
