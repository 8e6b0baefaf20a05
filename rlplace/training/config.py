"""`TrainConfig`: everything that decides how a placement is found; importing it imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from rlplace.errors import InvalidValue, UnknownName
from rlplace.policy.options import LearnConfig
from rlplace.runs.tracking import TRACKING_MODES
from rlplace.seeds import check_seed, is_whole
from rlplace.training.agent.config import MOST_EVALUATIONS, AgentConfig

if TYPE_CHECKING:
    from rlplace.graphs.grouping.constraints import Constraints


MOST_S, MOST_ROUNDS = 30 * 24 * 3600, 10_000
"""Of a run: seconds; placements measured before the search, and rounds of its final table."""


@dataclass(frozen=True)
class SearchConfig:
    """How a budget is spent."""

    method: str | None = None
    """What finds the placement: any method of `rlplace compare`; `portfolio` always stands beside it. By default policy
    where a policy or a learner is named and no guide, else learned (on a simulated host, where nothing can be
    measured, guided with a guide and policy without)."""
    guide: str = "none"
    """A policy that suggests starts and moves to the searches of `learned` or `guided`; or none."""
    simulate_share: float = 0.6
    """On a real host, the share of the budget for simulated placements; the rest measures the best of them."""
    num_calibrated: int = 12
    """Placements measured before the search, to learn the host from (6 where fewer are given); 0 leaves it as it is."""
    priors: Path | None = None
    """How far hosts are from their figures before anything is measured: a file of `rlplace fit-priors`."""
    table_rounds: int = 25
    """Rounds of the final table."""

    def __post_init__(self) -> None:
        _check_count("num_calibrated", self.num_calibrated, least=0, most=MOST_ROUNDS)
        _check_count("table_rounds", self.table_rounds, least=1, most=MOST_ROUNDS)
        if not is_number(self.simulate_share) or not 0.0 <= self.simulate_share <= 1.0:
            raise InvalidValue("simulate_share", self.simulate_share, "a number in 0..1", where="train")


@dataclass(frozen=True)
class TrainConfig:
    """How a placement is found."""

    budget_s: float = 300.0
    """Seconds of search, for the method and `portfolio` together; profiling and the final table come on top."""
    total_s: float | None = None
    """Seconds of all of it on this machine: within them profiling, calibration and the final table shrink, and the
    search has what is left, at most `budget_s`; None lets them take as long as they take."""
    evaluations: int | None = None
    """Placements that each method scores, on a simulated host, in place of `budget_s`: the same seed finds the same."""
    seed: int = 0
    """Of the policy, of sampling and of random ops."""
    num_groups: int = 256
    """Most groups of ops that are moved."""
    grouping: str = "heavy-edge"
    """The rule that groups are made by, a word of `rlplace.graphs.grouping.groups.GroupingRule`."""
    acyclic: bool = False
    """Keep the graph of groups without cycles, whatever of the rule that costs."""
    constraints: Constraints | None = None
    """The user's pins, exclusions and what stays together."""
    isolated: bool | None = None
    """Whether placements are measured in a worker process, so that one that crashes or hangs costs itself alone; by
    default they are, unless the environment says `RLPLACE_IN_PROCESS=1`."""
    track: str = "disabled"
    """Weights & Biases: disabled, offline or online."""
    cluster: str = "off"
    """Whose machines measure, or search on a simulated host: off (this one alone), auto (the Ray cluster that runs
    here, else one that is started here), or the address of one."""
    store: str = "auto"
    """Where measured step times are kept and looked for: auto (the user's cache folder), off, or a file."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """How the budget is spent."""
    learn: LearnConfig = field(default_factory=LearnConfig)
    """How the methods `policy` and `guided` learn."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """How the method `learned` explores."""

    @property
    def guide(self) -> LearnConfig | None:
        """The policy that guides searches, and how it learns; None where none does."""
        return None if self.search.guide == "none" else dataclasses.replace(self.learn, policy=self.search.guide)

    def __post_init__(self) -> None:
        for name, seconds in (("budget_s", self.budget_s), ("total_s", self.total_s)):
            is_open = name == "total_s" and seconds is None
            if not is_open and not (is_number(seconds) and 0 < seconds <= MOST_S):
                expected = f"a number of seconds, more than 0, and finite: at most {MOST_S:,}, 30 days"
                raise InvalidValue(name, seconds, expected, where="train")
        if self.evaluations is not None:
            _check_count("evaluations", self.evaluations, least=1, most=MOST_EVALUATIONS)
            if self.total_s is not None:
                raise InvalidValue("total_s", self.total_s, "none beside evaluations, which are no time", where="train")
        _check_count("num_groups", self.num_groups, least=1, most=MOST_EVALUATIONS)
        check_seed(self.seed)
        if self.track not in TRACKING_MODES:
            raise UnknownName("tracking mode", self.track, TRACKING_MODES)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's among them; text and truth values are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_count(name: str, value: object, *, least: int, most: int) -> None:
    if not is_whole(value) or not least <= value <= most:
        raise InvalidValue(name, value, f"a whole number, at least {least} and at most {most:,}", where="train")
