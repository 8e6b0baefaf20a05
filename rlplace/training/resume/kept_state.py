"""A `MethodState` as records and arrays of a file, and back, checked."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UserError
from rlplace.measure.measurement import Measurement
from rlplace.measure.placement import check_plan
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.search.task import BestSoFar
from rlplace.session.method import MethodState, Race, Unmeasured
from rlplace.training.resume.kept import Arrays, KeptMethod, KeptOutcome, KeptRace, whole_numbers

PLAN = ("devices", "transfer_tensor", "transfer_destination", "sequence")
NARROW_DEVICES = 256
"""Up to so many devices fit into a byte."""

PlanOf = Callable[[str], Plan | None]


def kept_method(state: MethodState) -> KeptMethod:
    """What a file holds of a method, without its arrays."""
    races = (
        KeptRace(
            tuple(plan.fingerprint for plan in race.plans),
            tuple(KeptOutcome.of(outcome) for outcome in race.outcomes),
            race.is_final,
        )
        for race in state.races
    )
    return KeptMethod(
        state.budget,
        state.seconds,
        state.num_scored,
        state.num_measured,
        state.single_s if math.isfinite(state.single_s) else None,
        tuple(tuple(best.to_list()) for best in state.history),
        tuple(dict(figures) for figures in state.learning),
        state.tried,
        tuple(races),
        state.is_searched,
        state.is_done,
        state.failure,
    )


def arrays_of(name: str, state: MethodState, num_devices: int) -> dict[str, NDArray[np.generic]]:
    """The arrays of a method, by names that begin with its own."""
    narrow = np.uint8 if num_devices <= NARROW_DEVICES else np.int32
    arrays: dict[str, NDArray[np.generic]] = {}
    if state.plan is not None:
        arrays |= {f"{name}.plan.{part}": getattr(state.plan, part) for part in PLAN}
    if state.start is not None:
        arrays[f"{name}.start"] = state.start.astype(narrow)
    if state.unmeasured is not None:
        arrays[f"{name}.candidates"] = state.unmeasured.devices.astype(narrow)
        arrays[f"{name}.simulated_s"] = state.unmeasured.simulated_s
    return arrays


def state_of(
    name: str,
    kept: KeptMethod,
    arrays: Arrays,
    problem: Problem,
    plan_of: PlanOf,
    where: str,
) -> MethodState:
    """The state in a file; measurements whose plans nobody knows any more are left out.

    Args:
        name: of the method.
        kept: what the file holds of it.
        arrays: of the file.
        problem: that it is of.
        plan_of: gives a plan that was measured by its fingerprint; None for one that is not known.
        where: the file, for messages.

    Raises:
        InvalidValue: an array is missing, malformed, or does not fit the problem.
    """
    races = (_race(race, problem, plan_of, where) for race in kept.races)
    history = (BestSoFar(int(row[0]), int(row[1]), row[2], row[3]) for row in kept.history)
    learning = (
        {key: math.nan if value is None else value for key, value in figures.items()} for figures in kept.learning
    )
    start = None
    if f"{name}.start" in arrays:
        start = problem.check_placement(whole_numbers(arrays, f"{name}.start", problem.host.num_devices, where))
    return MethodState(
        kept.budget,
        kept.seconds,
        kept.num_scored,
        kept.num_measured,
        math.nan if kept.single_s is None else kept.single_s,
        tuple(history),
        tuple(learning),
        tuple((simulated_s, measured_s) for simulated_s, measured_s in kept.tried),
        tuple(race for race in races if race.plans),
        _plan(name, arrays, problem, where),
        start,
        _unmeasured(name, arrays, problem, where),
        kept.is_searched,
        kept.is_done,
        kept.failure,
    )


def _race(kept: KeptRace, problem: Problem, plan_of: PlanOf, where: str) -> Race:
    plans, outcomes = list[Plan](), list[Measurement]()
    for fingerprint, outcome in zip(kept.plans, kept.outcomes, strict=True):
        try:
            plan = plan_of(fingerprint)
            if plan is None:
                continue
            plans.append(_checked(problem, plan, where))
        except UserError:
            continue
        outcomes.append(outcome.measurement)
    return Race(tuple(plans), tuple(outcomes), kept.is_final)


def _plan(name: str, arrays: Arrays, problem: Problem, where: str) -> Plan | None:
    if f"{name}.plan.devices" not in arrays:
        return None
    graph = problem.graph
    most_transfers = max(graph.num_tensors * problem.host.num_devices, 1)
    num_devices = problem.host.num_devices
    bounds = dict(zip(PLAN, (num_devices, max(graph.num_tensors, 1), num_devices, graph.num_ops + most_transfers)))
    parts = {part: whole_numbers(arrays, f"{name}.plan.{part}", bound, where) for part, bound in bounds.items()}
    return _checked(problem, Plan(**parts), where)


def _checked(problem: Problem, plan: Plan, where: str) -> Plan:
    """The plan, if it can be run: what a stranger's file says goes into compiled code that checks nothing."""
    for part in PLAN:
        if getattr(plan, part).ndim != 1:
            raise InvalidValue(part, f"{getattr(plan, part).ndim} dimensions", "1", where=where)
    if len(plan.transfer_tensor) != len(plan.transfer_destination):
        raise InvalidValue("transfer_destination", len(plan.transfer_destination), "one a transfer", where=where)
    total = len(plan.devices) + plan.num_transfers
    for part, bound in (("transfer_tensor", problem.graph.num_tensors), ("sequence", total)):
        numbers = getattr(plan, part)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < bound:
            raise InvalidValue(part, f"{int(numbers.min())}..{int(numbers.max())}", f"0..{bound - 1}", where=where)
    check_plan(problem.graph, problem.host.num_devices, plan, where=where)
    problem.check_placement(plan.devices)
    return plan


def _unmeasured(name: str, arrays: Arrays, problem: Problem, where: str) -> Unmeasured | None:
    if f"{name}.candidates" not in arrays:
        return None
    devices = whole_numbers(arrays, f"{name}.candidates", problem.host.num_devices, where)
    simulated_s = arrays.get(f"{name}.simulated_s")
    if simulated_s is None or simulated_s.dtype != np.float64 or simulated_s.shape != devices.shape[:1]:
        raise InvalidValue("simulated_s", "another array", "seconds for every candidate", where=where)
    return Unmeasured(problem.check_placement(devices), simulated_s.astype(np.float64))
