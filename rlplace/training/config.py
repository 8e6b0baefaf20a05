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
    """How a budget is spent."""

    method: str | None = None
    """The method that finds the placement: any of `rlplace compare`; `portfolio` always stands beside it. By default
    policy where a policy or a learner is named and no guide, else learned (on a simulated host, where nothing can be
    measured, guided with a guide and policy without)."""
    guide: str = "none"
    """A policy that suggests starts and moves to the searches of `learned` or `guided`; or none."""
    simulate_share: Annotated[Number, Field(ge=0, le=1)] = 0.6
    """On a real host, the share of the budget for simulated placements; the rest measures the best of them."""
    num_calibrated: Annotated[Whole, Field(ge=0, le=MOST_ROUNDS)] = 12
    """Placements measured before the search, to learn the host from (6 where fewer are given); 0 leaves it as it is."""
    priors: Path | None = None
    """How far hosts are from their figures before anything is measured: a file of `rlplace fit-priors`."""
    table_rounds: Annotated[Whole, Field(ge=1, le=MOST_ROUNDS)] = 25
    """Rounds of the final table."""


@record(frozen=True)
class TrainConfig(ProblemOptions):
    """How a placement is found."""

    budget_s: Spent = 300.0
    """Seconds of search, for the method and `portfolio` together; profiling and the final table come on top."""
    total_s: Spent | None = None
    """Seconds of all of it on this machine: within them profiling, calibration and the final table shrink, and the
    search has the rest, at most `budget_s`; None lets them take as long as they take."""
    evaluations: Annotated[Whole, Field(ge=1, le=MOST_EVALUATIONS)] | None = None
    """Placements that each method scores, on a simulated host, in place of `budget_s`: the same seed finds the same."""
    track: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases: disabled, offline or online."""
    cluster: str = "off"
    """Whose machines measure, or search on a simulated host: off (this one alone), auto (the Ray cluster that runs
    here, else one that is started here), or the address of one."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """How the budget is spent."""
    learn: LearnConfig = field(default_factory=LearnConfig)
    """How the methods `policy` and `guided` learn."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """How the method `learned` explores."""

    @classmethod
    def of(cls, setup: Setup, **options: Any) -> TrainConfig:
        """The options that commands share, with further fields."""
        return cls(**{each.name: getattr(setup, each.name) for each in fields(ProblemOptions)}, **options)

    @property
    def guide(self) -> LearnConfig | None:
        """The policy that guides searches, and how it learns; None where none does."""
        return None if self.search.guide == "none" else dataclasses.replace(self.learn, policy=self.search.guide)

    def __post_init__(self) -> None:
        if self.evaluations is not None and self.total_s is not None:
            raise InvalidValue("total_s", self.total_s, "none beside evaluations, which are no time")
