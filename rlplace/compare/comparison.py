"""`Row` and `Comparison`: the report of `rlplace compare`.

Ratios over a suite of problems: their geometric mean and its confidence interval.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, MissingExtra, UserError, refuse_if
from rlplace.measure import Plan
from rlplace.measure.timing.verdict import SpeedVerdict
from rlplace.report.console import as_html, as_text, compare_table
from rlplace.search.task import BestSoFar, Failure

Objective = Literal["latency", "throughput", "max-load", "piece-latency"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "max-load", "piece-latency")
PUBLISHED: tuple[Objective, ...] = ("max-load", "piece-latency")
"""Objectives of the published benchmark: their values are in ms, and no step is simulated."""


RowStatus = Literal["ok", "oom", "error", "timeout", "lost", "skipped"]


@dataclass(frozen=True)
class Row:
    """One method with one seed, or a PyTorch baseline.

    Attributes:
        method: its name.
        seed: of its random draws.
        status: `ok`; `oom`, `error` or `timeout` if its placement failed; `skipped` if the method could not run.
        value_s: the minimised value, in seconds: the step time or the published objective; infinite without a result.
        evaluations: placements scored.
        plan_s: wall time of the method.
        peak_bytes: of each device; empty if memory was not recorded.
        why: the reason if the status is not `ok`, or a remark.
        simulated_s: the simulator's step time, if `value_s` was measured.
        spread_s: half the interquartile range of the measured steps; 0 if nothing was measured.
        is_placement: whether the row has a placement that can be returned.
        proved_s: a lower bound that the method proved; 0 if it proved none.
        history: the improvements of the best scored value; empty if it was not recorded.
        devices: (N,) int32; None if there is no placement.
        plan: the plan of `value_s`; None if there is none.
        measured: number of plans that the method measured; None if it measured none.
        traceback: of a method that raised an exception; else empty.
    """

    method: str
    seed: int
    status: RowStatus
    value_s: float = math.inf
    evaluations: int = 0
    plan_s: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    why: str = ""
    simulated_s: float | None = None
    spread_s: float = 0.0
    is_placement: bool = True
    proved_s: float = 0.0
    history: tuple[BestSoFar, ...] = field(default=(), repr=False)
    devices: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    plan: Plan | None = field(default=None, repr=False, compare=False)
    measured: int | None = None
    traceback: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Comparison:
    """All rows of one comparison.

    Attributes:
        workload: as the user wrote it.
        host: name of the host.
        objective: the minimised value.
        rows: in the order in which they ran.
        lower_bound_s: a proven lower bound of the value.
        lower_bound: the name of its proof.
        budget: the budget of each method, as text.
        is_measured: whether step times are measured.
        is_interrupted: whether Ctrl-C ended it early: only the methods that had finished have rows.
        truth: kind and seed of the hidden truth; empty if there is none.
        is_traced: whether its measurements came with timelines.
        verdict: of the best placement beside one device and plain PyTorch, from a race that did not choose it; None
            where nothing was measured.
    """

    workload: str
    host: str
    objective: Objective
    rows: tuple[Row, ...]
    lower_bound_s: float
    lower_bound: str
    budget: dict[str, float | None]
    is_measured: bool = False
    is_interrupted: bool = False
    truth: str = ""
    is_traced: bool = False
    verdict: SpeedVerdict | None = None

    def __repr__(self) -> str:
        """In one line; `print` shows all of it."""
        best = "nothing feasible" if self.best is None else f"best {self.best.method!r}"
        of = f" of {self.workload}" if self.workload else ""
        return f"Comparison({len(self.rows)} rows{of} on {self.host}, {best})"

    def __str__(self) -> str:
        """The table as `rlplace compare` prints it, without colours."""
        return as_text(compare_table(self.to_dict()))

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return as_html(compare_table(self.to_dict()))

    @property
    def best(self) -> Row | None:
        """The placement with the least value; None if none is feasible."""
        placed = [row for row in self.rows if row.is_placement and row.ok]
        return min(placed, key=lambda row: row.value_s) if placed else None

    def gap(self, row: Row) -> float | None:
        """`value / bound - 1` of a row that is `ok`; None otherwise, or without a bound."""
        return row.value_s / self.lower_bound_s - 1 if row.ok and self.lower_bound_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        is_published, best = self.objective in PUBLISHED, self.best
        return {
            "schema": 1,
            "workload": self.workload,
            "host": self.host,
            "objective": self.objective,
            "measured": self.is_measured,
            "interrupted": self.is_interrupted,
            "budget": self.budget,
            "lower_bound": self.lower_bound,
            "lower_bound_s": None if is_published else self.lower_bound_s,
            "lower_bound_ms": self.lower_bound_s * 1e3 if is_published else None,
            "best": None if best is None else {"method": best.method, "seed": best.seed},
            "rows": [self._row(row, is_published=is_published) for row in self.rows],
            **({"truth": self.truth, "traced": self.is_traced} if self.truth else {}),
            **({} if self.verdict is None else {"verdict": asdict(self.verdict), "summary": str(self.verdict)}),
        }

    def _row(self, row: Row, *, is_published: bool) -> dict[str, Any]:
        value_s = row.value_s if row.ok else None
        facts = {
            "method": row.method,
            "seed": row.seed,
            "placement": row.is_placement,
            "step_time_s": None if is_published else value_s,
            "value_ms": value_s * 1e3 if is_published and value_s is not None else None,
            "gap_to_bound": self.gap(row),
            "evaluations": row.evaluations,
            "plan_s": row.plan_s,
            "peak_bytes": list(row.peak_bytes),
            "history": [best.to_list() for best in row.history],
            "status": row.status,
        }
        optional = (
            ("spread_s", row.spread_s if row.ok else None, self.is_measured),
            ("simulated_s", row.simulated_s, self.is_measured or self.truth),
            ("measured", row.measured, self.truth or row.measured is not None),
            ("why", row.why, row.why),
            ("traceback", row.traceback, row.traceback),
        )
        return facts | {name: value for name, value, is_told in optional if is_told}


DRAWS = 10_000
"""Of the bootstrap."""


def collected(
    rows: Iterator[tuple[int, Row]], found: dict[int, Row], on_row: Callable[[Row], None] | None
) -> tuple[list[Row], bool]:
    """Rows in the order of their numbers, and whether Ctrl-C ended it early.

    Args:
        rows: numbers and rows, as they come.
        found: filled with them on the way.
        on_row: told each row.

    Raises:
        KeyboardInterrupt: before the first row.
    """
    is_interrupted = False
    try:
        for number, row in rows:
            found[number] = row
            if on_row is not None:
                on_row(row)
    except KeyboardInterrupt:
        if not found:
            raise
        is_interrupted = True
    return [found[number] for number in sorted(found)], is_interrupted


def row_or_failure(name: str, seed: int, find: Callable[[], Row]) -> Row:
    """The row that `find` gives; one that says so where the method lacks its extra, or fails."""
    begin = time.monotonic()
    try:
        return find()
    except MissingExtra as error:
        return Row(name, seed, "skipped", why=str(error))
    except UserError:
        raise
    except Exception as error:  # whatever it is: a method that failed is one row, not the table
        failed, spent_s = Failure.of(error), time.monotonic() - begin
        return Row(name, seed, "error", plan_s=spent_s, why=failed.why, traceback=failed.traceback)


@dataclass(frozen=True)
class MeanRatio:
    """A geometric mean with its 95 % interval.

    Attributes:
        mean: geometric mean over problems.
        low: lower end of the interval.
        high: upper end of the interval.
        num_problems: how many ratios went in.
    """

    mean: float
    low: float
    high: float
    num_problems: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_ratio(ratios: Sequence[float], workloads: Sequence[str], *, seed: int = 0) -> MeanRatio:
    """The geometric mean of `ratios`, its interval bootstrapped by workload.

    Problems of one workload are alike, so whole workloads are drawn with replacement (cluster bootstrap, percentile
    interval; Efron & Tibshirani 1993, chapter 13).

    Args:
        ratios: positive, one a problem.
        workloads: of each problem.
        seed: of the draws.

    Raises:
        InvalidValue: no ratio, one that is not positive and finite, or another number of workloads.

    Example:
        >>> print(mean_ratio([1.0, 4.0], ["a", "a"]))
        2.000 [2.000, 2.000]
    """
    logs, sums, counts = _by_workload(ratios, workloads)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (DRAWS, len(sums)))
    low, high = np.percentile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), (2.5, 97.5))
    return MeanRatio(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(logs))


def paired_ratio(ratios: Sequence[float], workloads: Sequence[str]) -> MeanRatio:
    """The geometric mean over workloads of each workload's own geometric mean, with a t-interval over the workloads.

    For ratios of two methods on the same problems: a workload counts once, however many problems it has. With a single
    workload the interval is without end.

    Args:
        ratios: positive, one a problem.
        workloads: of each problem.

    Raises:
        InvalidValue: no ratio, one that is not positive and finite, or another number of workloads.

    Example:
        >>> print(paired_ratio([1.0, 4.0, 2.0], ["a", "a", "b"]))
        2.000 [2.000, 2.000]
    """
    from scipy.stats import t

    logs, sums, counts = _by_workload(ratios, workloads)
    means, half = sums / counts, np.inf
    if len(means) > 1:
        half = t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / np.sqrt(len(means))
    mean, low, high = np.exp(means.mean() + np.array([0.0, -half, half])).tolist()
    return MeanRatio(mean, low, high, len(logs))


def _by_workload(
    ratios: Sequence[float], workloads: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Logarithms (P,), their sum for each workload (W,), and how many each has (W,)."""
    values = np.asarray(ratios, dtype=np.float64)
    refuse_if(
        len(values) == 0 or len(workloads) != len(values),
        "ratios",
        len(values),
        f"one for each of {len(workloads)} problems, at least one",
    )
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise InvalidValue("ratios", values.tolist(), "positive finite numbers")
    logs: NDArray[np.float64] = np.log(values)
    cluster = np.unique(np.asarray(workloads), return_inverse=True)[1]
    return logs, np.bincount(cluster, weights=logs).astype(np.float64), np.bincount(cluster).astype(np.float64)
