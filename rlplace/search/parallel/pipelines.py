"""Orders of a pipeline's micro-batches: GPipe, backward first, and 1F1B, which also bounds how many are under way.

`best_pipeline`: the best pipeline whose stages begin at given places only, which an exported pipeline needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.measure import Plan, Problem, Simulator, upward_ranks
from rlplace.measure.simulate.compiled_problem import default_priorities
from rlplace.search.parallel.layouts import CUTS, SUM, Chain, Layout, StepRoles, cut_by, placement_of, step_roles
from rlplace.search.rules.baselines import plain_devices


def list_priorities(problem: Problem) -> dict[str, NDArray[np.float64]]:
    """(N,) float64 priorities of every order that a list schedule can have, by name."""
    return {
        "gpipe": phase_priorities(problem, first=FORWARD),
        "backward-first": phase_priorities(problem, first=BACKWARD),
        "rank": default_priorities(replace(problem, op_order="rank")),
        "tilt": default_priorities(replace(problem, op_order="tilt")),
    }


def phase_priorities(problem: Problem, first: int) -> NDArray[np.float64]:
    """(N,) float64 priorities by phase, then micro-batch, then upward rank.

    Shared ops and sums of gradients come before all others, as they free memory.

    Args:
        problem: whose graph is cut into micro-batches.
        first: `FORWARD` for GPipe, the forward ops of all micro-batches before any backward op (Huang et al. 2019);
            `BACKWARD` for backward ops as soon as they are ready, those of the earliest micro-batch first.
    """
    graph = problem.graph
    at_once = (graph.micro_batch < 0) | is_gradient_sum(graph)
    order = np.lexsort(
        (-upward_ranks(problem), np.where(at_once, 0, graph.micro_batch), ~at_once & (graph.phases != first), ~at_once)
    )
    return (graph.num_ops - np.argsort(order)).astype(np.float64)


def is_gradient_sum(graph: OpGraph) -> NDArray[np.bool_]:
    """(N,) bool: additions whose result only goes into updates, directly or through others of them."""
    found = np.zeros(graph.num_ops, dtype=np.bool_)
    found_or_update = graph.phases == UPDATE
    is_sum = np.array([target == SUM for target in graph.targets], dtype=np.bool_) & (graph.phases == BACKWARD)
    for op in np.flatnonzero(is_sum)[::-1].tolist():
        into = graph.readers_of(op)
        found[op] = found_or_update[op] = len(into) > 0 and bool(found_or_update[into].all())
    return found


def most_under_way(layout: Layout) -> NDArray[np.int64]:
    """(p,) int64: micro-batches whose backward is awaited on a device of each stage under 1F1B.

    With d replicas everywhere it is p - s of stage s (PipeDream: Narayanan et al. 2019; DAPPLE's policy A: Fan et al.
    2021, section 5.1); else the devices from a stage on, for each of its own.
    """
    replicas = np.array([len(np.unique(row)) for row in layout.devices[:, layout.replica]])
    return np.asarray(-(-np.cumsum(replicas[::-1])[::-1] // replicas), dtype=np.int64)


def one_f_one_b(
    problem: Problem, step: StepRoles, layout: Layout, devices: NDArray[np.int32], limit: NDArray[np.int64]
) -> Plan:
    """The plan of a placement in which no device of stage s begins a micro-batch before fewer than limit[s] await.

    It is the plan, backward ops first, of a graph in which the forward ops of a micro-batch also wait for the backward
    ops of the one that is so many before it.

    Args:
        problem: the problem to place.
        step: its roles.
        layout: whose placement it is.
        devices: (N,) the placement.
        limit: (p,) micro-batches under way.
    """
    bounded = replace(problem, graph=_bounded(problem.graph, step, layout, devices, limit))
    return Simulator(bounded, threads=1).plan(devices, phase_priorities(problem, first=BACKWARD))


def _bounded(
    graph: OpGraph, step: StepRoles, layout: Layout, devices: NDArray[np.int32], limit: NDArray[np.int64]
) -> OpGraph:
    """`graph` with edges, each within a device, from the last backward op of a block to first forward ones of a later.

    A block is the work of a stage on a micro-batch.
    """
    count, stages = graph.num_micro_batches, len(layout.devices)
    is_own = (step.follows >= 0) & ~graph.is_source
    block = layout.role_stage[step.role].astype(np.int64) * count + np.maximum(step.follows, 0)
    is_forward = is_own & (graph.phases == FORWARD)
    is_backward = is_own & (graph.phases == BACKWARD) & ~is_gradient_sum(graph) & (np.diff(graph.output_offsets) > 0)
    last = np.full(stages * count, -1, dtype=np.int64)
    np.maximum.at(last, block[is_backward], np.flatnonzero(is_backward))
    before = _blocks_before(layout, count, limit)
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    inside = is_forward[producer] & is_forward[reader] & (block[producer] == block[reader])
    begins = is_forward.copy()
    begins[reader[inside]] = False
    late = np.flatnonzero(begins)
    awaited = np.where(before[block[late]] >= 0, last[before[block[late]]], -1)
    fits = (awaited >= 0) & (awaited < late) & (devices[awaited] == devices[late])
    late, tensors = late[fits], graph.output_offsets[awaited[fits]]
    pairs = np.concatenate((reader.astype(np.int64), late)) * graph.num_tensors
    pairs = np.unique(pairs + np.concatenate((graph.input_tensors, tensors)))
    readers, read = np.divmod(pairs, max(graph.num_tensors, 1))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(readers, minlength=graph.num_ops))))
    return replace(graph, input_offsets=offsets, input_tensors=read, program=None)


def _blocks_before(layout: Layout, count: int, limit: NDArray[np.int64]) -> NDArray[np.int64]:
    """(p * K,) int64: the block whose backward each waits for; -1 for none."""
    before = np.full(len(layout.devices) * count, -1, dtype=np.int64)
    for stage, most in enumerate(limit.tolist()):
        held = layout.devices[stage, layout.replica]
        for device in np.unique(held):
            blocks = stage * count + np.flatnonzero(held == device)
            before[blocks[most:]] = blocks[: max(len(blocks) - most, 0)]
    return before


Schedule = Literal["gpipe", "1f1b"]
REFINED = 2
"""Numbers of stages, the best, of which other places are tried ..."""
MOST_TRIES = 100
"""... and how many pipelines of each, or a few more."""


@dataclass(frozen=True)
class BoundedPipeline:
    """A pipeline of contiguous stages, each on a device of its own.

    Attributes:
        chosen: indices of the places where the stages but the first begin, ascending.
        devices: of each stage.
        schedule: the order of micro-batches.
        step_s: simulated step time, or a lower bound for stages that wait for all their inputs, if that is larger.
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
    dynamic programming (`cut_stages`) at some of `places`: by work, by work and transfers, and by bytes. Each is
    simulated in GPipe's order and, with as many micro-batches as stages, in that of 1F1B; in the best ones, stages then
    begin earlier or later as long as the simulated step gets shorter.

    Args:
        problem: whose graph is cut into micro-batches.
        places: (C,) ascending places of the chain (`StepRoles.position`), each above 0, where a stage may begin.
        devices: that may have a stage; all that are no gangs by default.
        step: `step_roles` of its graph, where the caller has them.

    Raises:
        InvalidValue: places that are out of order or out of range, or none.
    """
    step = step_roles(problem.graph) if step is None else step
    if not len(places) or places[0] < 1 or places[-1] >= step.num_positions or np.any(np.diff(places) <= 0):
        expected = f"ascending places of 1..{step.num_positions - 1}, one or more"
        raise InvalidValue("places", places.tolist(), expected, where="pipeline")
    trials = _Trials(problem, step, places)
    usable = plain_devices(problem) if devices is None else list(devices)
    found = [
        trials.simulated(tuple(np.flatnonzero(np.diff(stage_of_block)).tolist()), line)
        for stage_of_block, line in _stagings(trials.chain, usable, trials.blocks, places)
    ]
    slowest_first = sorted((one for one in reversed(found) if np.isfinite(one.step_s)), key=lambda one: -one.step_s)
    best_of = {len(one.devices): one for one in slowest_first}  # by number of stages
    ranked = sorted(best_of.values(), key=lambda one: (one.step_s, len(one.devices)))
    refined = [trials.refined(one) for one in ranked[:REFINED]]
    return min(refined, key=lambda one: (one.step_s, len(one.devices)), default=None)


class _Trials:
    """Pipelines of one problem, simulated."""

    def __init__(self, problem: Problem, step: StepRoles, places: NDArray[np.integer]) -> None:
        self.chain = Chain.of(problem, step)
        self.blocks = np.searchsorted(places, np.arange(step.num_positions), side="right")
        self._problem, self._step, self._num_places = problem, step, len(places)
        self._simulator = Simulator(problem, threads=1)
        self._priorities = phase_priorities(problem, first=FORWARD)

    def simulated(
        self, chosen: tuple[int, ...], line: tuple[int, ...], schedules: Sequence[Schedule] = ("gpipe", "1f1b")
    ) -> BoundedPipeline:
        """The pipeline with stages that begin at the places `chosen`, in the better of some schedules."""
        problem, step, count = self._problem, self._step, self.chain.num_micro_batches
        stage = np.searchsorted(np.array(chosen), self.blocks, side="left").astype(np.int32)
        layout = Layout(
            devices=np.array(line, dtype=np.int32)[:, None],
            role_stage=stage[step.position],
            replica=np.zeros(count, dtype=np.int32),
            owners="with-stage",
        )
        placed = placement_of(problem, layout, step)
        times: dict[Schedule, float] = {}
        if "gpipe" in schedules:
            times["gpipe"] = float(self._simulator.step_times(placed[None], self._priorities)[0])
        if "1f1b" in schedules and count >= len(line):
            limit = most_under_way(layout)
            times["1f1b"] = self._simulator.retime(one_f_one_b(problem, step, layout, placed, limit)).step_time_s
        best = min(times, key=lambda name: times[name])
        op_stage = layout.role_stage[step.role]
        op_s = problem.costs.op_time_s[np.arange(len(op_stage)), layout.devices[op_stage, 0]]
        op_s = np.where(problem.graph.is_source, 0.0, op_s)
        least_s = _least_s(op_stage, np.where(problem.graph.micro_batch >= 0, op_s, 0.0), count)
        work_s = np.bincount(op_stage, weights=op_s, minlength=len(line))
        return BoundedPipeline(chosen, line, best, max(times[best], least_s), tuple(work_s.tolist()))

    def refined(self, one: BoundedPipeline) -> BoundedPipeline:
        """A pipeline with stages that begin elsewhere: one at a time is moved, ever less far, while it gets faster."""
        far, tries = max(self._num_places // 8, 1), 0
        while far and tries < MOST_TRIES:
            for chosen in one_moved(one.chosen, (-far, far), (-1, self._num_places)):
                tries += 1
                other = self.simulated(chosen, one.devices, (one.schedule,))
                if other.step_s < one.step_s:
                    one = other
                    break
            else:
                far //= 2
        return one


def one_moved(places: tuple[int, ...], steps: tuple[int, ...], bounds: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """`places` with one of them moved by one of `steps`, where they still ascend between `bounds`."""
    for (index, place), step in itertools.product(enumerate(places), steps):
        moved = (*places[:index], place + step, *places[index + 1 :])
        if all(a < b for a, b in itertools.pairwise((bounds[0], *moved, bounds[1]))):
            yield moved


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
                stage_of = cut_by(cut, work_s, crossing_s, chain.speed[line], fixed + saved, chain.room[line])
                key = tuple(line), stage_of.tobytes()
                if key not in seen:
                    seen.add(key)
                    yield stage_of, key[0]


def _least_s(stage: NDArray[np.int32], op_s: NDArray[np.float64], num_micro_batches: int) -> float:
    """Lower bound of the step time in seconds, for stages that begin after the end of the stage before.

    In the simulator, a branch without inputs from an earlier stage begins at once. Here the first micro-batch passes
    all earlier stages before it reaches a stage, and the last one goes back through them: K times the work of the
    stage, and once that of each earlier stage.
    """
    all_s = np.bincount(stage, weights=op_s)
    each_s = all_s / num_micro_batches
    return float((all_s + np.cumsum(each_s) - each_s).max())
