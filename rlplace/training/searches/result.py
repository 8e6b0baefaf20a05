"""`LoopResult`: what a method came to within its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlplace.measure.plan import Plan
from rlplace.search.task import BestSoFar, Failure, Saveable
from rlplace.training.resume.state import MethodState


@dataclass(frozen=True)
class LoopResult:
    """What a method came to within its budget.

    Attributes:
        plan: the best placement; None if there was none.
        num_scored: placements simulated.
        num_measured: placements run, each as often as it was, the last race aside.
        seconds: wall time that it took.
        history: the best measured step time so far wherever it improved, the last race included; the best simulated
            one where nothing is measured.
        single_s: step time on the best single device, which those of `history` are to be set against.
        learned: what the method learned, if it learns.
        learning: what it told of every update, figures by name.
        tried: simulated and measured step times of every placement that ran, in seconds, in order; in measured ones a
            drift of the machine is taken out by the reference of their race.
        failure: what the method raised; the rest is then what it had come to. None for all others.
    """

    plan: Plan | None
    num_scored: int
    num_measured: int
    seconds: float = 0.0
    history: tuple[BestSoFar, ...] = ()
    single_s: float = float("nan")
    learned: Saveable | None = None
    learning: tuple[Mapping[str, float], ...] = ()
    tried: tuple[tuple[float, float], ...] = ()
    failure: Failure | None = None

    @classmethod
    def of(cls, state: MethodState) -> LoopResult:
        """What a method came to that had ended before an interruption."""
        return cls(
            state.plan,
            state.num_scored,
            state.num_measured,
            state.seconds,
            state.history,
            state.single_s,
            None,
            state.learning,
            state.tried,
            state.failure,
        )
