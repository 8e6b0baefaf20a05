"""`Evaluator`: how long plans take: by running them on this machine, or by simulation where the host is simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.isolate.choice import Runner, make_runner
from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.eager_recipe import Other
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timeline import Timeline


class Evaluator:
    """The only door to the host runner: races plans on the host, or re-times them where the host is simulated.

    Every measurement carries the key under which it could be stored and found again.

    Args:
        problem: what is placed.
        simulator: plans, and re-times on a simulated host.
        reference: (N,) placement that every measured plan is timed beside; none by default.
        seed: of random ops.
        isolated: whether plans run in a worker process, so that one that crashes or hangs costs itself alone; by
            default they do, unless the environment says `RLPLACE_IN_PROCESS=1`.
    """

    def __init__(
        self,
        problem: Problem,
        simulator: Simulator,
        reference: NDArray[np.int32] | None = None,
        *,
        seed: int = 0,
        isolated: bool | None = None,
    ) -> None:
        self.problem = problem
        self.simulator = simulator
        self._runner: Runner | None = None
        if not problem.host.is_simulated:
            self._runner = make_runner(problem, simulator, reference=reference, seed=seed, isolated=isolated)

    @property
    def is_measured(self) -> bool:
        """Whether step times come from running."""
        return self._runner is not None

    def measure_plans(
        self,
        plans: Sequence[Plan],
        protocol: RaceProtocol,
        *,
        others: Sequence[Other] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """A measurement for each plan, all in one race, then one for each of `others` where the host is real.

        Args:
            plans: exactly what runs.
            protocol: rounds of the race.
            others: recipes, or timers, of what is no plan, in the same race.
            deadline_s: on `time.monotonic`; the race ends after the round in which it passes.
        """
        if self._runner is None:
            return [self._keyed(plan, self.simulator.retime(plan), "simulated") for plan in plans]
        outcomes = self._runner.measure_plans(plans, protocol=protocol, others=others, deadline_s=deadline_s)
        keyed = [self._keyed(plan, outcome, repr(protocol)) for plan, outcome in zip(plans, outcomes)]
        return keyed + outcomes[len(plans) :]

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Timelines of steps of `plan`, in order of step time; a single one where the host is simulated.

        Raises:
            RunnerError: an op failed.
        """
        if self._runner is None:
            return [self.simulator.timeline(plan)]
        return self._runner.trace(plan, num_steps=num_steps, warmup=warmup)

    def timeline(self, plan: Plan) -> Timeline:
        """The timeline of a typical step of `plan`."""
        timelines = self.trace(plan)
        return timelines[len(timelines) // 2]

    def close(self) -> None:
        """Ends the runner's threads, and its worker."""
        if self._runner is not None:
            self._runner.close()

    def _keyed(self, plan: Plan, outcome: Measurement, protocol: str) -> Measurement:
        graph, host = self.problem.graph.fingerprint, self.problem.host.fingerprint
        return dataclasses.replace(outcome, key=MeasurementKey(graph, host, plan.fingerprint, protocol))
