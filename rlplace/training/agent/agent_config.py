"""`AgentConfig`: the options of the agent; importing it imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field

from rlplace.records import Number, Whole, record

MOST_EVALUATIONS, MOST_KEPT = 10**9, 10_000
"""Placements that are simulated; plans, draws and candidates that are held at once."""
LEAST_COMPARED = 6
"""Candidates for each plan of a batch below which comparing them would take more from searches than it gives."""

Kept = Annotated[Whole, Field(ge=1, le=MOST_KEPT)]
Evaluations = Annotated[Whole, Field(ge=1, le=MOST_EVALUATIONS)]
Share = Annotated[Number, Field(ge=0, le=1)]
Weight = Annotated[Number, Field(gt=0)]


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
    first_weight: Weight = 2.0
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
    compared_share: Share = 0.2
    """Share of a batch's simulated placements for comparing candidates."""
    most_compared: Kept = 64
    """Largest number of candidates."""
    averaged: Kept = 4
    """Number of posterior draws of the search for a plan that is fast on average."""
    mean_weight: Weight = 3.0
    """Simulated placements of that search, relative to a search with a single draw."""

    def on(self, *, is_known: bool) -> AgentConfig:
        """The value for a host that is known from other workloads, or for an unknown host."""
        return (
            dataclasses.replace(self, batch=min(self.batch, self.known_batch)) if is_known and self.is_prior else self
        )

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
