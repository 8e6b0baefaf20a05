"""`TrainConfig`: everything that decides how a placement is found; importing it imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlplace.errors import InvalidValue
from rlplace.policy import LearnConfig
from rlplace.records import Number, Whole, record
from rlplace.session.setup import ProblemOptions, Setup
from rlplace.training.agent.agent_config import MOST_EVALUATIONS, AgentConfig

MOST_S, MOST_ROUNDS = 30 * 24 * 3600, 10_000
"""Of a run: seconds; placements measured before the search, and rounds of its final table."""

Spent = Annotated[Number, Field(gt=0, le=MOST_S)]


@record(frozen=True)
class SearchConfig:
    """Options of the search."""

    method: str | None = None
    """The method that finds the placement: any method of `rlplace compare`; `portfolio` always runs, too. By default
    policy if a policy or a learner is named without a guide, else learned. A simulated host cannot be measured, so
    there the default is guided with a guide, and policy without one."""
    guide: str = "none"
    """A policy that suggests starts and moves to the searches of `learned` or `guided`; or none."""
    simulate_share: Annotated[Number, Field(ge=0, le=1)] = 0.6
    """On a real host, the share of the budget for simulated placements; the rest measures the best of them."""
    num_calibrated: Annotated[Whole, Field(ge=0, le=MOST_ROUNDS)] = 12
    """Placements measured before the search, to calibrate the host (at least 6); 0 means no calibration."""
    priors: Path | None = None
    """The usual error of given costs: a file of `rlplace fit-priors`."""
    table_rounds: Annotated[Whole, Field(ge=1, le=MOST_ROUNDS)] = 25
    """Rounds of the final table."""


@record(frozen=True)
class TrainConfig(ProblemOptions):
    """The options of a search for a placement."""

    budget_s: Spent = 300.0
    """Seconds of search, for the method and `portfolio` together; profiling and the final table take additional
    time."""
    total_s: Spent | None = None
    """Limit of the whole run on this machine, in seconds: profiling, calibration and the final table shrink to fit, and
    the search gets the rest, at most `budget_s`; None sets no limit."""
    evaluations: Annotated[Whole, Field(ge=1, le=MOST_EVALUATIONS)] | None = None
    """On a simulated host: placements that each method scores, instead of `budget_s`; results are then
    deterministic."""
    track: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases: disabled, offline or online."""
    cluster: str = "off"
    """The machines that measure, or for a simulated host search: off (only this machine), auto (the Ray cluster that
    runs here, else a new one), or the address of a cluster."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """Options of the search."""
    learn: LearnConfig = field(default_factory=LearnConfig)
    """Options of the methods `policy` and `guided`."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Options of the method `learned`."""

    @classmethod
    def of(cls, setup: Setup, **options: Any) -> TrainConfig:
        """A configuration from the options that commands share, and further fields."""
        return cls(**{each.name: getattr(setup, each.name) for each in fields(ProblemOptions)}, **options)

    @property
    def guide(self) -> LearnConfig | None:
        """The policy that guides searches, with its options; None without a guide."""
        return None if self.search.guide == "none" else dataclasses.replace(self.learn, policy=self.search.guide)

    def __post_init__(self) -> None:
        if self.evaluations is not None and self.total_s is not None:
            raise InvalidValue("total_s", self.total_s, "none beside evaluations, which are no time")
