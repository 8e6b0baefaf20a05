"""`TrainConfig`: everything that decides how a placement is found; importing it imports no torch.

`SearchConfig`: how its budget is spent. `AgentConfig`: how the agent of `learned` explores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlplace.errors import refuse_if
from rlplace.policy import LearnConfig
from rlplace.records import Number, Positive, Share, Whole, record
from rlplace.session.setup import ProblemOptions, Setup

NUM_TRACED, NUM_TIMED = 4, 12
"""Placements that a host is calibrated on, traced ones and others."""
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
    simulate_share: Share = 0.6
    """On a real host, the share of the budget for simulated placements; the rest measures the best of them."""
    num_calibrated: Annotated[Whole, Field(ge=0, le=MOST_ROUNDS)] | None = None
    """Placements measured before the search, to calibrate the host: by default 4, or 12 without traced steps (at least
    2, or 6 without); 0 means no calibration."""
    priors: Path | None = None
    """The usual error of given costs: a file of `benchmarks/fit_priors.py`."""
    table_rounds: Annotated[Whole, Field(ge=1, le=MOST_ROUNDS)] = 25
    """Rounds of the final table."""


MOST_EVALUATIONS, MOST_KEPT = 10**9, 10_000
"""Placements that are simulated; plans, draws and candidates that are held at once."""
LEAST_COMPARED = 6
"""Candidates for each plan of a batch below which comparing them would take more from searches than it gives."""

Kept = Annotated[Whole, Field(ge=1, le=MOST_KEPT)]
Evaluations = Annotated[Whole, Field(ge=1, le=MOST_EVALUATIONS)]


@record(frozen=True)
class AgentConfig:
    """How the agent chooses plans to measure."""

    batch: Kept = 4
    """Plans measured between two fits of the host model."""
    known_batch: Kept = 2
    """Like `batch`, for a host that is known from other workloads."""
    known_share: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    """On a host that is known from other workloads: share of the first batch's simulated placements for one search from
    scratch."""
    traced_share: Annotated[Number, Field(gt=0, lt=1)] = 0.3
    """With traced steps: share of all simulated placements but those of the last search for the first batch that is
    searched."""
    last_share: Annotated[Share, Field(lt=1)] = 0.4
    """With traced steps: share of all simulated placements, at least, for one last search, when the host is known; 0
    for none."""
    least_gain: Share = 0.002
    """With traced steps, measuring ends if the best of a batch is expected to be less than this share faster than the
    best measured plan: what a batch of 7 seconds must give to a training of an hour. With 0, measuring never ends
    early."""
    evaluations: Evaluations = 2000
    """Placements simulated for each proposed plan, if neither evaluations nor seconds are given."""
    scratch_share: Share = 0.1
    """Share of a batch's simulated placements for one search from scratch; the other searches start from the best known
    placement."""
    mean_share: Share = 0.25
    """Share of a batch that is searched with the most probable factors; the other plans are searched with draws of the
    posterior."""
    later_evaluations: Evaluations = 400
    """Like `evaluations`, for plans after the first `early` ones; other budgets are divided in this proportion."""
    first_weight: Positive = 2.0
    """Weight of plans of the first batch, relative to `evaluations`: later searches start from good placements, so the
    first one should be good."""
    early: Kept = 16
    """Number of first plans, from which the agent learns most."""
    pool: Kept = 64
    """Number of placements that are stored as starts of searches."""
    is_prior: bool = True
    """Whether the prior is used; without it the factors are almost unconstrained."""
    is_thompson: bool = True
    """Whether factors are drawn from the posterior; otherwise the most probable factors are used."""
    is_permuted: bool = True
    """Whether placements are also tried with devices of the same kind exchanged."""
    draws: Annotated[Whole, Field(ge=0, le=MOST_KEPT)] = 16
    """Number of posterior draws for comparing the candidates for a batch; with 0, the best placement of each search is
    measured."""
    traced_draws: Annotated[Whole, Field(ge=0, le=MOST_KEPT)] = 8
    """Like `draws`, with traced steps. They leave little unknown: a batch is searched and compared with these draws
    alone."""
    compared_share: Share = 0.2
    """Share of a batch's simulated placements for comparing candidates."""
    most_compared: Kept = 64
    """Candidates at most."""
    averaged: Kept = 4
    """Number of posterior draws of the search for a plan that is fast on average. With 1, as with traced steps, the
    most probable factors are used."""
    mean_weight: Positive = 3.0
    """Simulated placements of that search, relative to a search with a single draw."""

    def on(self, *, is_known: bool) -> AgentConfig:
        """The value for a host that is known from other workloads, or for an unknown host."""
        return (
            dataclasses.replace(self, batch=min(self.batch, self.known_batch)) if is_known and self.is_prior else self
        )

    def traced(self) -> AgentConfig:
        """The value for steps with timelines, which leave little unknown."""
        return dataclasses.replace(self, draws=min(self.draws, self.traced_draws), averaged=1)

    def share(self, place: int, count: int) -> float:
        """The share of the plan at `place` in the budget of all `count` plans."""
        each: float = self.evaluations if place < self.early else self.later_evaluations
        if place < self.batch:
            each = self.evaluations * self.first_weight
        return each / self.whole_evaluations(count)

    def whole_evaluations(self, count: int) -> int:
        """Placements simulated for `count` plans without another budget."""
        first, early = min(count, self.batch), min(count, self.early)
        whole = early * self.evaluations + (count - early) * self.later_evaluations
        return round(whole + first * (self.first_weight - 1) * self.evaluations)

    def num_compared(self, evaluations: float) -> int:
        """Number of candidates to compare for this number of evaluations per batch; 0 if the evaluations are too
        few."""
        if not self.draws or not self.is_thompson:
            return 0
        share = evaluations * self.compared_share / self.draws
        return int(min(share, self.most_compared)) if share >= LEAST_COMPARED * self.batch else 0

    def weight(self, is_mean: bool, num_mean: int, count: int) -> float:
        """The weight of one of `count` searches of a batch, relative to an even share of the simulated placements;
        `num_mean` searches use the most probable factors."""
        whole = num_mean * self.mean_weight + count - num_mean
        return count * (self.mean_weight if is_mean else 1.0) / whole if whole > 0 else 1.0


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
    is_traced: bool = True
    """Whether plans that `learned` measures on a real host also run a traced step, from whose timeline it learns."""
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
    def num_calibrated(self) -> int:
        """Placements measured before the search on a real host; 0 for no calibration."""
        default = NUM_TRACED if self.is_traced else NUM_TIMED
        return default if self.search.num_calibrated is None else self.search.num_calibrated

    @property
    def guide(self) -> LearnConfig | None:
        """The policy that guides searches, with its options; None without a guide."""
        return None if self.search.guide == "none" else dataclasses.replace(self.learn, policy=self.search.guide)

    def __post_init__(self) -> None:
        refuse_if(
            self.evaluations is not None and self.total_s is not None,
            "total_s",
            self.total_s,
            "none beside evaluations, which are no time",
        )
