"""`best_pipeline`: a pipeline of a step that is cut into micro-batches, whose stages begin at given places only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.layouts import CUTS, Chain, Layout, placement_of
from rlplace.search.parallel.micro_batch_orders import gpipe_priorities, most_under_way, one_f_one_b
from rlplace.search.parallel.stages import cut_stages
from rlplace.search.parallel.step_roles import StepRoles, step_roles
from rlplace.search.rules.baselines import plain_devices

Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class BoundedPipeline:
    """A pipeline of contiguous stages, each on a device of its own.

    Attributes:
        chosen: indices of the places where the stages but the first begin, ascending.
        devices: of each stage.
        schedule: the order of micro-batches.
        step_s: simulated step time.
        work_s: seconds of each stage on its device, all micro-batches together.
    """

    chosen: tuple[int, ...]
    devices: tuple[int, ...]
    schedule: Schedule
    step_s: float
    work_s: tuple[float, ...]


def best_pipeline(
    problem: Problem,
    places: NDArray[np.integer],
    devices: Sequence[int] | None = None,
    step: StepRoles | None = None,
) -> BoundedPipeline | None:
    """The pipeline of two or more stages with the shortest simulated step; None where none fits into memory.

    For every number of stages up to that of devices, in the order of the devices and by speed, the chain is cut by
    dynamic programming (`cut_stages`) at some of `places`: by work, by work and what is sent, and by bytes. Each is
    simulated in GPipe's order and, with as many micro-batches as stages, in that of 1F1B.

    Args:
        problem: whose graph is cut into micro-batches.
        places: (C,) ascending places of the chain (`StepRoles.position`), each above 0, where a stage may begin.
        devices: that may have a stage; all that are no gangs by default.
        step: `step_roles` of its graph, where the caller has them.

    Raises:
        InvalidValue: places that are out of order or out of range, or none.
    """
    step = step_roles(problem.graph) if step is None else step
    _check_places(places, step.num_positions)
    chain, simulator = Chain.of(problem, step), Simulator(problem, threads=1)
    blocks = np.searchsorted(places, np.arange(step.num_positions), side="right")
    priorities = gpipe_priorities(problem)
    best: BoundedPipeline | None = None
    usable = plain_devices(problem) if devices is None else list(devices)
    for stage_of_block, line in _stagings(chain, usable, blocks, places):
        layout = Layout(
            devices=np.array(line, dtype=np.int32)[:, None],
            role_stage=stage_of_block[blocks][step.position],
            replica=np.zeros(chain.num_micro_batches, dtype=np.int32),
            owners="with-stage",
        )
        placed = placement_of(problem, layout, step)
        times: dict[Schedule, float] = {"gpipe": float(simulator.step_times(placed[None], priorities)[0])}
        if chain.num_micro_batches >= len(line):
            limit = most_under_way(layout, chain.num_micro_batches)
            times["1f1b"] = simulator.retime(one_f_one_b(problem, step, layout, placed, limit)).step_time_s
        schedule = min(times, key=lambda name: times[name])
        if times[schedule] < (np.inf if best is None else best.step_s):
            chosen = tuple(np.flatnonzero(np.diff(stage_of_block)).tolist())
            work_s = _work_s(problem, layout.role_stage[step.role], line)
            best = BoundedPipeline(chosen, line, schedule, times[schedule], work_s)
    return best


def _stagings(
    chain: Chain, usable: list[int], blocks: NDArray[np.int64], places: NDArray[np.integer]
) -> Iterator[tuple[NDArray[np.int32], tuple[int, ...]]]:
    """(C + 1,) int32, the stage of each block between two places, with the device of each stage; none comes twice."""
    count = len(places) + 1
    work_s, fixed, saved = (
        np.bincount(blocks, weights=load, minlength=count).astype(np.float64)
        for load in (chain.work_s, chain.fixed_bytes, chain.saved_bytes)
    )
    crossing_s = chain.crossing_s[np.concatenate(([0], places, [len(blocks)]))]
    fastest = sorted(usable, key=lambda device: (-chain.speed[device], device))
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    for stages in range(2, min(len(usable), count) + 1):
        for line in (usable[:stages], fastest[:stages], fastest[:stages][::-1]):
            for cut in CUTS:
                if cut == "memory":
                    stage_of = cut_stages(fixed + saved, chain.room[line])
                else:
                    stage_of = cut_stages(work_s, chain.speed[line], crossing_s if cut == "crossing" else None)
                key = tuple(line), stage_of.tobytes()
                if key not in seen:
                    seen.add(key)
                    yield stage_of, key[0]


def _work_s(problem: Problem, stage: NDArray[np.int32], devices: tuple[int, ...]) -> tuple[float, ...]:
    """Seconds of each stage on its device."""
    time_s = np.where(problem.graph.is_source[:, None], 0.0, problem.costs.op_time_s)
    own_s = time_s[np.arange(len(stage)), np.array(devices)[stage]]
    return tuple(np.bincount(stage, weights=own_s, minlength=len(devices)).tolist())


def _check_places(places: NDArray[np.integer], num_positions: int) -> None:
    if not len(places) or places[0] < 1 or places[-1] >= num_positions or np.any(np.diff(places) <= 0):
        expected = f"ascending places of 1..{num_positions - 1}, one or more"
        raise InvalidValue("places", places.tolist(), expected, where="pipeline")
