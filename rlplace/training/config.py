"""`TrainConfig`: everything that decides how a placement is learned."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.grouping.rule import GroupingRule
from rlplace.runs.tracking import TRACKING_MODES

REWARDS = ("log_speedup", "sqrt")
TEACHERS = ("eft", "none")


@dataclass(frozen=True)
class TrainConfig:
    """How a placement is learned; the budget counts search alone."""

    budget_s: float = 300.0
    """Seconds of search; profiling and the final table come on top, and `random` gets as much again."""
    seed: int = 0
    """Of the policy, of sampling and of random ops."""
    num_groups: int = 256
    """Most groups of ops that the policy places."""
    grouping: str = "heavy-edge"
    """The rule that groups are made by, a word of `rlplace.graphs.grouping.rule.GroupingRule`."""
    acyclic: bool = False
    """Keep the graph of groups without cycles, whatever of the rule that costs."""
    constraints: Constraints = field(default_factory=Constraints)
    """The user's pins, exclusions and what stays together."""
    reward: str = "log_speedup"
    """`log_speedup`, or `sqrt` as in the 2017 paper."""
    init: str = "eft"
    """The heuristic that the policy starts by imitating, or `none`."""
    simulate_share: float = 0.6
    """Share of the budget spent on simulated placements; the rest goes to measured ones."""
    num_envs: int = 64
    """Simulated placements a batch."""
    num_measured: int = 6
    """Measured placements a batch."""
    num_calibrated: int = 12
    """Placements measured before the search, to calibrate the simulator on; 0 leaves it as profiled."""
    table_rounds: int = 25
    """Rounds of the final table."""
    track: str = "disabled"
    """Weights & Biases."""

    def __post_init__(self) -> None:
        for name, least in (
            ("budget_s", 0.0),
            ("num_groups", 1),
            ("num_envs", 1),
            ("num_measured", 1),
            ("table_rounds", 1),
        ):
            if not getattr(self, name) >= least:
                raise InvalidValue(name, getattr(self, name), f"at least {least}", where="train")
        GroupingRule.parse(self.grouping)
        if not 0.0 <= self.simulate_share <= 1.0:
            raise InvalidValue("simulate_share", self.simulate_share, "0..1", where="train")
        for kind, value, known in (
            ("reward", self.reward, REWARDS),
            ("init", self.init, TEACHERS),
            ("tracking mode", self.track, TRACKING_MODES),
        ):
            if value not in known:
                raise UnknownName(kind, value, known)
