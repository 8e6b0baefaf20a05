"""`Judge`: says how long placements really take: by running them here, or by simulation where the host is simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.run.runner import HostRunner
from rlplace.measure.run.workers import Worker
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timeline import Timeline


class Judge:
    """The host's own word where there is one, else the simulator's.

    Args:
        problem: what is placed.
        simulator: plans, and judges on a simulated host.
        reference: (N,) placement that every measured one is timed beside.
        seed: of random ops.
    """

    def __init__(self, problem: Problem, simulator: Simulator, reference: NDArray[np.int32], *, seed: int) -> None:
        self.problem = problem
        self.simulator = simulator
        self.runner = None
        if not problem.host.is_simulated:
            self.runner = HostRunner(problem, simulator, reference=reference, seed=seed)

    @property
    def is_measured(self) -> bool:
        """Whether step times come from running."""
        return self.runner is not None

    def judge(
        self,
        plans: Sequence[Plan],
        protocol: RaceProtocol,
        *,
        others: Sequence[Callable[[], float]] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """A measurement for each plan, all in one race, then one for each of `others`."""
        if self.runner is None:
            return [self.simulator.retime(plan) for plan in plans]
        return self.runner.measure_plans(plans, protocol=protocol, others=others, deadline_s=deadline_s)

    def timeline(self, plan: Plan) -> Timeline:
        """The timeline of a typical step of `plan`."""
        if self.runner is None:
            return self.simulator.timeline(plan)
        timelines = self.runner.trace(plan)
        return timelines[len(timelines) // 2]

    def widest_worker(self) -> Worker | None:
        """The runner's thread that has all cores, if there is one."""
        return None if self.runner is None else self.runner.widest_worker()

    def close(self) -> None:
        """Ends the runner's threads."""
        if self.runner is not None:
            self.runner.close()
