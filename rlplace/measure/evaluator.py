"""`Evaluator`: step times of plans, measured on this machine, or simulated where the host is simulated.

`Plausibility`: which measured ratios cannot be true; a race of few rounds on a disturbed machine gives such ratios.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure.bounds import even_weights, figures, work_of_labels_s
from rlplace.measure.isolate.isolated_runner import IsolatedRunner, Runner, make_runner
from rlplace.measure.measurement import (
    Measurement,
    MeasurementKey,
    MeasurementLog,
    placement_fingerprint,
    versions_line,
)
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.eager_step import EagerRecipe, Other
from rlplace.measure.timing.host_runner import error_of
from rlplace.measure.timing.race import RaceProtocol, idle_share
from rlplace.measure.timing.verdict import SpeedVerdict, disturbance, judge, judged_rounds
from rlplace.say import Say


class Evaluator:
    """The only door to the host runner: races plans on the host, or re-times them where the host is simulated.

    Every measurement carries the key under which it is stored and found again. One that is found answers as a ratio to
    its reference, times the reference's time now: step times of another day are not comparable, ratios are.

    A ratio that cannot be true, or that comes from a race in which the reference was not itself, is measured again,
    once (`Plausibility`), unless the race drops no contender: then all of them had the same rounds. The log keeps
    none that is not believed or confirmed.

    Attributes:
        num_recalled: measurements that the log answered.
        num_repeated: measurements that were not believed and made again.

    Args:
        problem: the problem to place.
        simulator: plans, and re-times on a simulated host.
        reference: (N,) placement that every measured plan is timed beside; none by default.
        seed: of random ops.
        log: keeps measurements, and answers with earlier ones; none by default.
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
        log: MeasurementLog | None = None,
        isolated: bool | None = None,
    ) -> None:
        self.num_recalled = 0
        self.num_repeated = 0
        self._runner: Runner | None = None
        self._versions, self._log = "", None
        if not problem.host.is_simulated:
            self._runner = make_runner(problem, simulator, reference=reference, seed=seed, isolated=isolated)
            self._versions, self._log = versions_line(), log
        self._know(problem, simulator, reference)

    def _know(self, problem: Problem, simulator: Simulator, reference: NDArray[np.int32] | None) -> None:
        self.problem, self.simulator, self._reference = problem, simulator, reference
        self._reference_name = "" if reference is None else placement_fingerprint(reference)
        self._reference_s = math.nan
        if self._runner is not None:
            self._plausibility = Plausibility.of(problem, simulator, reference)

    def turn_to(self, problem: Problem, simulator: Simulator, reference: NDArray[np.int32]) -> None:
        """From here on, with other figures of the same host and another reference; the worker stays.

        Args:
            problem: the same graph on the same devices, calibrated.
            simulator: of it.
            reference: (N,) placement that every measured plan is timed beside.
        """
        self._know(problem, simulator, reference)
        if self._runner is not None:
            self._runner.turn_to(problem, simulator, reference)

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
        is_recalled: bool = False,
    ) -> list[Measurement]:
        """A measurement for each plan, all in one race, then one for each of `others` where the host is real.

        Args:
            plans: exactly the plans that run.
            protocol: rounds of the race.
            others: recipes, or timers, of contenders that are no plans, in the same race.
            deadline_s: on `time.monotonic`; the race ends after the round in which it passes.
            is_recalled: whether the log may answer; those that it has an answer for are not run.

        Raises:
            DeviceLost: a device is not there any more; nothing of the race is kept.
            RunnerError: the reference failed, or nothing can be measured.
        """
        if self._runner is None:
            return [self._keyed(plan, self.simulator.retime(plan), "simulated") for plan in plans]
        known = [self._recall(plan, protocol) if is_recalled else None for plan in plans]
        fresh = [plan for plan, before in zip(plans, known, strict=True) if before is None]
        outcomes = self._run(fresh, protocol, others, deadline_s) if fresh or others or not plans else []
        if any(before is not None for before in known):
            self._time_reference(protocol, deadline_s)
        ran = iter(outcomes)
        return [next(ran) if before is None else before.beside(self._reference_s) for before in known] + list(ran)

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Timelines of steps of `plan`, in order of step time; a single one where the host is simulated.

        Raises:
            RunnerError: an op failed.
        """
        if self._runner is None:
            return [self.simulator.timeline(plan)]
        timelines = self._runner.trace(plan, num_steps=num_steps, warmup=warmup)
        if self._log is not None and timelines:
            self._log.keep_trace(self.problem, plan, timelines[len(timelines) // 2])
        return timelines

    def timeline(self, plan: Plan, *, is_hurried: bool = False) -> Timeline:
        """The timeline of a typical step of `plan`; of the second that runs, where it is hurried."""
        timelines = self.trace(plan, num_steps=1, warmup=1) if is_hurried else self.trace(plan)
        return timelines[len(timelines) // 2]

    def time_step_s(self) -> float:
        """Seconds of a step of the reference, busy as the machine is now; 0 if it does not run."""
        once = RaceProtocol(warmup=1, min_rounds=1, max_rounds=1, is_beside_reference=False)
        assert self._reference is not None
        (outcome,) = self._raced([self.simulator.plan(self._reference)], once, (), math.inf)
        return outcome.step_time_s if outcome.ok else 0.0

    def judge(
        self,
        plan: Plan,
        simple: Mapping[str, Plan],
        others: Mapping[str, EagerRecipe],
        *,
        step_s: float,
        most_s: float,
        say: Say = lambda _: None,
    ) -> tuple[str, SpeedVerdict]:
        """The verdict on a plan, from a race that did not choose it; on a simulated host from the exact step times.

        Where the plan is not clearly faster than each simple one, the verdict is that on the quickest of these.

        Args:
            plan: whose step is judged.
            simple: plans with everything on one device, or gang, by name.
            others: plain PyTorch, by name; one that is compiled is left out where no worker can be ended if that takes
                too long.
            step_s: seconds of a step, about.
            most_s: seconds of the race, about; see `judged_rounds`.
            say: told which of `others` failed.

        Returns:
            The name of the simple plan that the verdict is on, empty if it is that of `plan`; and the verdict.

        Raises:
            DeviceLost: a device is not there any more.
            RunnerError: neither the plan nor a simple one ran.
        """
        if self._runner is None:
            exact = {name: self.simulator.retime(each) for name, each in {"": plan, **simple}.items()}
            return _judged(exact, simple, is_exact=True)
        if not isinstance(self._runner, IsolatedRunner):
            others = {name: recipe for name, recipe in others.items() if not recipe.is_compiled}
        round_s = step_s * (1 + len(simple) + len(others))
        rounds = judged_rounds(most_s, round_s)
        # the order of each round is another than in the race that chose
        protocol = RaceProtocol(
            warmup=1, min_rounds=rounds, max_rounds=rounds, hopeless=math.inf, seed=1, is_beside_reference=False
        )
        late_s = LATE * (rounds + 1) * round_s
        late_s += sum(recipe.making_s for recipe in others.values() if recipe.is_compiled)
        idle, deadline_s = idle_share(), time.monotonic() + late_s
        outcomes = self._raced([plan, *simple.values()], protocol, [*others.values()], deadline_s)
        idle = min(idle, idle_share())
        found = dict(zip(("", *simple, *others), outcomes, strict=True))
        for name in others:
            if not found[name].ok:
                say(f"{name} is left out of the verdict: {found[name].why or found[name].status}")
        first = next((name for name in (*simple, *others) if found[name].ok), "")
        why = disturbance(idle, found[first].spread_s / found[first].step_time_s, first)
        return _judged(found, simple, why=why, time_s=time.time())

    def close(self) -> None:
        """Ends the runner's threads, and its worker."""
        if self._runner is not None:
            self._runner.close()

    def _raced(
        self, plans: list[Plan], protocol: RaceProtocol, others: Sequence[Other], deadline_s: float
    ) -> list[Measurement]:
        """Measurements of plans, then of `others`, all in one race."""
        assert self._runner is not None
        outcomes = self._runner.measure_plans(plans, protocol=protocol, others=others, deadline_s=deadline_s)
        for outcome in outcomes:
            if outcome.status == "lost":
                raise error_of(self.problem.host, outcome)
        return outcomes

    def _run(
        self, plans: list[Plan], protocol: RaceProtocol, others: Sequence[Other], deadline_s: float
    ) -> list[Measurement]:
        """Measurements of plans, then of `others`, all in one race; those of plans are kept."""
        outcomes = self._raced(plans, protocol, others, deadline_s)
        is_late = time.monotonic() > deadline_s
        keyed = [self._keyed(plan, outcome, repr(protocol)) for plan, outcome in zip(plans, outcomes)]
        believed = self._plausibility.judge(keyed)
        if protocol.is_dropping and not all(believed):
            keyed, believed = self._repeat(plans, keyed, believed, protocol, deadline_s)
        if references := [outcome.reference_s for outcome in keyed if outcome.ok and outcome.reference_s > 0]:
            self._reference_s = float(np.median(references))
        if self._log is not None:
            for plan, outcome, is_kept in zip(plans, keyed, believed, strict=True):
                is_whole = not is_late or not outcome.ok or len(outcome.samples_s) >= protocol.min_rounds
                if is_kept:
                    self._log.keep(plan, outcome, self._reference_name, is_whole=is_whole)
        return keyed + outcomes[len(plans) :]

    def _repeat(
        self,
        plans: list[Plan],
        outcomes: list[Measurement],
        believed: list[bool],
        protocol: RaceProtocol,
        deadline_s: float,
    ) -> tuple[list[Measurement], list[bool]]:
        """Outcomes after a second race of the unbelieved ones, and which are believed now; if late, as `careful`."""
        assert self._runner is not None
        known, doubtful = self._plausibility, [k for k, is_one in enumerate(believed) if not is_one]
        outcomes, believed = list(outcomes), list(believed)
        if time.monotonic() > deadline_s:
            for k in doubtful:
                outcomes[k] = known.careful(outcomes[k])
            return outcomes, believed
        self.num_repeated += len(doubtful)
        again = self._runner.measure_plans([plans[k] for k in doubtful], protocol=protocol, deadline_s=deadline_s)
        is_late = time.monotonic() > deadline_s
        for k, other in zip(doubtful, again, strict=True):
            outcomes[k], believed[k] = known.settle(outcomes[k], self._keyed(plans[k], other, repr(protocol)))
            if is_late and outcomes[k].ok and len(outcomes[k].samples_s) < protocol.min_rounds:
                believed[k] = False
        known.note(again)
        return outcomes, believed

    def _recall(self, plan: Plan, protocol: RaceProtocol) -> Measurement | None:
        """An earlier measurement of a plan; None where it is to be run."""
        if self._log is None or self._reference is None:
            return None
        key = self._key(plan, repr(protocol))
        found = self._log.recall(key, self._reference_name, plan, self.problem)
        if found is None or (found.ok and not found.reference_s > 0) or not self._plausibility.is_possible(found):
            return None
        self.num_recalled += 1
        return found

    def _time_reference(self, protocol: RaceProtocol, deadline_s: float) -> None:
        """Runs the reference alone, if nothing has been timed beside it yet."""
        if math.isnan(self._reference_s) and self._reference is not None:
            untraced = dataclasses.replace(protocol, num_traced=0)
            (outcome,) = self._run([self.simulator.plan(self._reference)], untraced, (), deadline_s)
            if outcome.ok and math.isnan(self._reference_s):
                self._reference_s = outcome.step_time_s

    def _keyed(self, plan: Plan, outcome: Measurement, protocol: str) -> Measurement:
        return dataclasses.replace(outcome, key=self._key(plan, protocol))

    def _key(self, plan: Plan, protocol: str) -> MeasurementKey:
        graph, host = self.problem.graph.fingerprint, self.problem.host.fingerprint
        return MeasurementKey(graph, host, plan.fingerprint, protocol, self._versions)


LATE = 1.5
"""Times the expected seconds after which such a race ends: the machine became busy."""


def _judged(
    found: Mapping[str, Measurement],
    simple: Collection[str],
    *,
    is_exact: bool = False,
    why: str = "",
    time_s: float = 0.0,
) -> tuple[str, SpeedVerdict]:
    """As `Evaluator.judge`, of measurements by name; a disturbance does not count where a plan is named."""
    times = {name: outcome.rounds_s for name, outcome in found.items() if outcome.ok}
    rivals, named = {name: times[name] for name in simple if name in times}, ""
    if rivals and not ("" in times and judge(times[""], rivals, is_exact=is_exact).outcome == "faster"):
        named = min(rivals, key=lambda name: float(np.median(rivals[name])))
    if named not in times:
        raise RunnerError("neither the placement nor everything on one device ran")
    others = {name: each for name, each in times.items() if name not in ("", named)}
    return named, judge(times[named], others, is_exact=is_exact, why=why, time_s=time_s, name=named or "placed")


BELOW = 3.0
"""The figures that a bound is made of are measured too: a ratio is impossible where it is so many times below it."""
OFF = 2.0
"""A reference that took so many times its usual time, or as much less, was not timed on the same machine."""
AGREES = 1.25
"""Two ratios of one plan that differ by no more than this factor confirm each other, against any expectation."""
REMEMBERED = 9
"""Races whose references give the usual time: a machine may also change for good."""


class Plausibility:
    """Plausible ratios to the reference, and the reference's usual time.

    Attributes:
        least_ratio: below it no ratio is believed; 0 where nothing is known.

    Args:
        least_ratio: see there.
    """

    def __init__(self, least_ratio: float = 0.0) -> None:
        self.least_ratio = least_ratio
        self._references: deque[float] = deque(maxlen=REMEMBERED)

    @classmethod
    def of(cls, problem: Problem, simulator: Simulator, reference: NDArray[np.int32] | None) -> Plausibility:
        """Of the placements of a problem: no device does more than a second of work a second.

        Args:
            problem: with the figures that are known of the host.
            simulator: of it.
            reference: (N,) placement that ratios are to; None for none.
        """
        if reference is None:
            return cls()
        reference_s = float(simulator.step_times(reference[None])[0])
        known = figures(problem)
        work_s = float(work_of_labels_s(known, even_weights(known)).sum())
        is_known = math.isfinite(reference_s) and math.isfinite(work_s) and reference_s > 0
        return cls(work_s / reference_s / BELOW if is_known else 0.0)

    @property
    def usual_s(self) -> float:
        """Median time of the reference in the latest races; NaN before the first."""
        return float(np.median(self._references)) if self._references else math.nan

    def note(self, outcomes: Iterable[Measurement]) -> None:
        """Notes the reference's time in a race: that of the contender that ran the most rounds counts."""
        timed = [outcome for outcome in outcomes if outcome.ok and outcome.reference_s > 0]
        if timed:
            self._references.append(max(timed, key=lambda outcome: len(outcome.samples_s)).reference_s)

    def judge(self, outcomes: Sequence[Measurement]) -> list[bool]:
        """Which outcomes of a race are believed, by the references of earlier races; of the first, by its own.

        Takes note of the reference, unless none is believed: then it is that of the race that is run again that counts.
        """
        if not self._references:
            self.note(outcomes)
            return [*map(self.is_believed, outcomes)]
        believed = [self.is_believed(outcome) for outcome in outcomes]
        self.note(outcome for outcome, is_one in zip(outcomes, believed, strict=True) if is_one)
        return believed

    def is_possible(self, outcome: Measurement) -> bool:
        """Whether its ratio can be true; a failure, and a step time beside no reference, can."""
        return not outcome.ok or not outcome.reference_s > 0 or outcome.ratio >= self.least_ratio

    def is_believed(self, outcome: Measurement) -> bool:
        """Whether its ratio can be true, and the reference beside it took about as long as usual."""
        if not outcome.ok or not outcome.reference_s > 0 or math.isnan(self.usual_s):
            return self.is_possible(outcome)
        return self.is_possible(outcome) and 1.0 / OFF <= outcome.reference_s / self.usual_s <= OFF

    def settle(self, first: Measurement, again: Measurement) -> tuple[Measurement, bool]:
        """The outcome of two measurements of one plan, and whether it is confirmed.

        The second counts if it is believed or has about the same ratio; otherwise the slower of the two, as `careful`
        makes it: a placement that is taken for too slow loses its own chance, one taken for too fast everybody's.

        Args:
            first: not believed.
            again: of the same plan, later.
        """
        if self.is_believed(again) or max(first.ratio, again.ratio) <= AGREES * min(first.ratio, again.ratio):
            return again, True
        return self.careful(max(first, again, key=lambda outcome: outcome.ratio)), False

    def careful(self, outcome: Measurement) -> Measurement:
        """An outcome that nothing confirms: beside the usual reference if that makes it slower, else as it is.

        Where its ratio still cannot be true, an `error` that says so.
        """
        if outcome.reference_s > self.usual_s:
            outcome = dataclasses.replace(outcome, reference_s=self.usual_s)
        if self.is_possible(outcome):
            return outcome
        why = (
            f"{outcome.ratio:.3g} of the reference's step time was measured, but no placement can take less than "
            f"{self.least_ratio:.3g} of it: something disturbed the machine"
        )
        return dataclasses.replace(outcome, status="error", step_time_s=math.inf, why=why, timeline=None)
