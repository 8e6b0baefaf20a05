"""`Layout`: stages, replicas, shards and owners of a step that is in micro-batches or shards, and their placements.

`step_roles`: the position of every op along the step's chain of forward ops, the same for all micro-batches.

Micro-batches are dealt out in contiguous blocks over d replicas, each of which is p devices, one a stage: p = 1 is data
parallelism, d = 1 a pipeline. Ops that all micro-batches share, parameters with the sums of their gradients and their
updates, are owned by one replica of their stage.

Of a step that is split into P shards, a stage of a replica is a *team* of P devices with fast links between them: shard
j of an op runs on device j of it, and a whole op of micro-batch k on device k modulo P (sequence parallelism: the norms
of P micro-batches run at once). Stages and replicas are then dealt out over teams as over devices.

`apart_roles`: roles that people place apart from the rest: experts of a mixture, and embedding tables.

`cut_stages`: a chain of layers cut into stages, by dynamic programming (PipeDream: Narayanan et al. 2019).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import FORWARD, OpGraph
from rlplace.graphs.grouping.merging import mirrored_twins
from rlplace.measure import Problem
from rlplace.measure.simulate.compiled_problem import mean_route
from rlplace.search.groupings import heaviest_first, room_bytes
from rlplace.search.rules.baselines import plain_devices
from rlplace.search.schedule.list_schedule import next_allowed, op_units

SUM = "aten.add.Tensor"
"""The op that adds a micro-batch's gradient to the sum so far."""


@dataclass(frozen=True, eq=False)
class StepRoles:
    """The roles of a step's N ops, laid out along the chain of those that run forward once a micro-batch.

    Attributes:
        role: (N,) int32, as `roles`.
        position: (R,) int32, the place in the chain, 0..P-1, that each role belongs to: a backward role to the forward
            one whose gradient it computes, a parameter with all that lives with it to the first that reads it. Shards
            of one op have one place.
        num_positions: P; 1 where every forward op belongs to a co-location class, 0 where nothing is cut.
        follows: (N,) int32, the micro-batch that each op goes with; -1 for shared ops, and those of co-location
            classes, which are owned by one replica. Where the batch is whole, it is micro-batch 0.
    """

    role: NDArray[np.int32]
    position: NDArray[np.int32]
    num_positions: int
    follows: NDArray[np.int32]

    @property
    def op_position(self) -> NDArray[np.int32]:
        """(N,) int32: the place in the chain that each op belongs to."""
        return self.position[self.role]


def step_roles(graph: OpGraph) -> StepRoles:
    """The roles of `graph`'s ops and their places."""
    role = roles(graph)
    is_owned = graph.colocation >= 0
    follows = np.where(is_owned, -1, micro_batches(graph)).astype(np.int32)
    is_own = (follows >= 0) & ~graph.is_source
    is_link = is_own & (graph.phases == FORWARD)
    first_op, chain = np.unique(role, return_index=True)[1], np.unique(role[is_link])
    position = np.full(len(first_op), -1, dtype=np.int32)
    if not len(chain):
        return StepRoles(role, np.zeros_like(position), int(graph.is_in_parts), follows)
    position[chain] = np.unique(roles(graph, are_apart=False)[first_op[chain]], return_inverse=True)[1]
    twin = _twins(graph, is_link, is_own & ~is_link)[first_op]
    has_twin = (position < 0) & (twin >= 0)
    position[has_twin] = position[role[twin[has_twin]]]
    places = position[role]
    class_place = _class_places(graph, places, is_link)
    places[is_owned] = class_place[graph.colocation[is_owned]]
    sums = _sums(graph, is_own & ~is_link)
    places[sums >= 0] = class_place[sums[sums >= 0]]
    _settle(graph, places)
    return StepRoles(role, places[first_op].astype(np.int32), int(position[chain].max()) + 1, follows)


def micro_batches(graph: OpGraph) -> NDArray[np.int32]:
    """(N,) int32: the micro-batch of each op, -1 for shared ones.

    In a step with shards whose batch is whole, ops without a co-location class belong to micro-batch 0.
    """
    if graph.num_micro_batches > 1 or graph.num_shards == 1:
        return graph.micro_batch
    return np.where(graph.colocation >= 0, -1, 0).astype(np.int32)


def _twins(graph: OpGraph, is_forward: NDArray[np.bool_], is_backward: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(N,) int64: the forward op of the same module, micro-batch and shard whose gradient a backward op computes; else
    -1."""
    number: dict[Hashable, int] = {}
    labels = zip(graph.modules, graph.micro_batch.tolist(), graph.shard.tolist(), strict=True)
    module = np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)
    return np.asarray(
        mirrored_twins(
            module,
            is_forward,
            is_backward,
            graph.is_source,
            graph.tensor_op,
            graph.input_offsets,
            graph.input_tensors,
            *graph.readers,
            len(number),
        )
    )


def _class_places(graph: OpGraph, places: NDArray[np.int32], is_link: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(C,) int32: the place of the first forward op that reads a co-location class; else the last that it reads."""
    count = int(graph.colocation.max(initial=-1)) + 1
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    nowhere = np.iinfo(np.int32).max
    found = np.full(count, nowhere, dtype=np.int32)
    out = (graph.colocation[producer] >= 0) & is_link[reader]
    np.minimum.at(found, graph.colocation[producer[out]], places[reader[out]])
    last = np.full(count, -1, dtype=np.int32)
    into = (graph.colocation[reader] >= 0) & (places[producer] >= 0)
    np.maximum.at(last, graph.colocation[reader[into]], places[producer[into]])
    return np.where(found < nowhere, found, np.maximum(last, 0)).astype(np.int32)


def _sums(graph: OpGraph, is_backward: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(N,) int32: the class into which a partial sum of gradients goes, directly or through other sums; else -1."""
    found = np.full(graph.num_ops, -1, dtype=np.int32)
    for op in reversed([op for op in np.flatnonzero(is_backward).tolist() if graph.targets[op] == SUM]):
        into = graph.readers_of(op)
        classes = np.maximum(graph.colocation[into], found[into])
        if len(classes) and classes.min() >= 0:
            found[op] = classes[0]
    return found


def _settle(graph: OpGraph, places: NDArray[np.int32]) -> None:
    """Gives the ops without a place that of the last op that they read, or else of the first that reads them."""
    inputs, producers = graph.input_offsets, graph.tensor_op[graph.input_tensors]
    lost = np.flatnonzero((places < 0) & ~graph.is_source).tolist()
    computed = np.where(graph.is_source & (graph.colocation < 0), -1, places)
    for op in lost:
        computed[op] = places[op] = computed[producers[inputs[op] : inputs[op + 1]]].max(initial=-1)
    for op in np.flatnonzero(places < 0).tolist()[::-1]:
        into = places[graph.readers_of(op)]
        places[op] = into[into >= 0].min(initial=np.iinfo(np.int32).max) if np.any(into >= 0) else 0


Owners = Literal["spread", "with-stage"]
CUTS = ("work", "crossing", "memory")
"""The load that stages are cut by: equal work; equal work and sending over the cut; equal bytes."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which device every role of a step has, for every micro-batch and shard.

    Attributes:
        devices: (p, d) int32, the device of each stage of each replica; the team, where there are `teams`.
        role_stage: (R,) int32, the stage of each role (`StepRoles.role`).
        replica: (K,) int32, the replica of each micro-batch.
        owners: what owns the parameters of a stage: all replicas, and whole ones all devices of their teams, with even
            shares of the bytes; or the first replica, and whole ones the first device of its team.
        role_device: (R,) int32, the device of roles that are apart from stages and replicas, -1 for others; empty where
            none is.
        name: in words.
        teams: (T, P) int32, the device of each shard in each team; empty where nothing is split, or shards are across.
        is_across: shard j is not at its stage, but on the device of stage j modulo p.
        shift: (R,) int32, how many places further on in their team the whole ops of each role are; empty where none is.
    """

    devices: NDArray[np.int32]
    role_stage: NDArray[np.int32]
    replica: NDArray[np.int32]
    owners: Owners = "spread"
    role_device: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    name: str = ""
    teams: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 1), dtype=np.int32))
    is_across: bool = False
    shift: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def members(self, stage: NDArray[np.int32] | int) -> NDArray[np.int32]:
        """(..., d, P) int32: the devices of a stage, by replica and shard."""
        own = self.devices[stage]
        return np.asarray(self.teams[own] if len(self.teams) else own[..., None])


def placement_of(problem: Problem, layout: Layout, step: StepRoles | None = None) -> NDArray[np.int32]:
    """(N,) int32: the device of each op under `layout`; ops that may not be there on the next device where they may.

    Args:
        problem: whose graph is cut into micro-batches.
        layout: of its roles.
        step: `step_roles` of its graph, where the caller has them.
    """
    graph = problem.graph
    step = step_roles(graph) if step is None else step
    stage = layout.role_stage[step.role]
    if layout.is_across:
        stage = np.where(graph.shard >= 0, graph.shard % len(layout.devices), stage).astype(np.int32)
    replica = np.where(step.follows >= 0, layout.replica[np.maximum(step.follows, 0)], 0)
    whole = np.maximum(step.follows, 0) + (layout.shift[step.role] if len(layout.shift) else 0)
    slot = np.where(graph.shard >= 0, graph.shard, whole) % layout.teams.shape[1]
    is_owned = graph.colocation >= 0
    if layout.owners == "spread":
        replica[is_owned], slot[is_owned] = _spread(problem, stage, layout)[:, graph.colocation[is_owned]]
    devices = np.asarray(layout.members(stage)[np.arange(graph.num_ops), replica, slot], dtype=np.int32)
    if len(layout.role_device):
        own = layout.role_device[step.role]
        devices = np.where(own >= 0, own, devices).astype(np.int32)
    if problem.allowed is None:
        return devices
    units = op_units(problem)
    return next_allowed(units, devices[np.unique(units.label, return_index=True)[1]])[units.label]


def _spread(problem: Problem, stage: NDArray[np.int32], layout: Layout) -> NDArray[np.int64]:
    """(2, C) int64: the replica that owns each co-location class and the place in its team, so that those of a stage
    hold the same bytes; shards have their places."""
    graph, slots = problem.graph, layout.teams.shape[1]
    members = np.flatnonzero(graph.colocation >= 0)
    classes = graph.colocation[members]
    held = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
    count = int(classes.max(initial=-1)) + 1
    size = np.bincount(classes, weights=held[members], minlength=count)
    home = np.zeros(count, dtype=np.int64)
    home[classes] = stage[members]
    shard = np.full(count, -1, dtype=np.int64)
    np.maximum.at(shard, classes, graph.shard[members])
    owner = np.zeros((2, count), dtype=np.int64)
    filled = np.zeros((int(stage.max(initial=0)) + 1, slots, layout.devices.shape[1]))
    for one in np.lexsort((np.arange(count), -size, shard < 0)).tolist():  # whole ones fill up what shards leave
        free = filled[home[one]]
        slot = int(shard[one] % slots if shard[one] >= 0 else free.min(axis=1).argmin())
        owner[:, one] = free[slot].argmin(), slot
        free[slot, owner[0, one]] += size[one]
    return owner


def layouts(problem: Problem, step: StepRoles | None = None) -> Iterator[Layout]:
    """Every layout p x d with p d <= D, those with all devices first; nothing where the step is in one part.

    Each in both orders of devices, which differ where some routes are faster than others, with the stages cut by each
    of `CUTS` and parameters owned both ways, as far as there is a difference; then those with experts, or embedding
    tables, apart and the rest data-parallel. Faster devices get larger stages and more micro-batches. Of a step with P
    shards they are p x d x P, of teams of P devices; then stages of whole ops on single devices, with shards across
    all stages of a replica: a vocabulary, which no cut makes even with layers, is so a part of every stage.

    Args:
        problem: whose graph is cut into micro-batches or split.
        step: `step_roles` of its graph, where the caller has them.
    """
    graph = problem.graph
    if not graph.is_in_parts:
        return
    step = step_roles(graph) if step is None else step
    chain = Chain.of(problem, step)
    plain, is_split = chain.line, len(chain.teams) > 0
    fastest = sorted(plain, key=lambda device: (-chain.speed[device], device))
    lines = [plain] if fastest == plain else [plain, fastest, fastest[::-1]]
    grids = shapes(len(plain), graph.num_micro_batches)
    if is_split and (1, 1) not in grids:  # alone on a team is best where nothing else is in parts
        grids.insert(0 if graph.num_micro_batches == 1 else len(grids), (1, 1))
    for stages, replicas in grids:
        seen: set[bytes] = set()
        for line, is_turned in itertools.product(lines, (False, True)):
            used = np.array(line[: stages * replicas], dtype=np.int32)
            devices = used.reshape(replicas, stages).T.copy() if is_turned else used.reshape(stages, replicas)
            for cut in CUTS if stages > 1 else CUTS[:1]:
                layout = chain.layout(devices, cut)
                key = devices.tobytes() + layout.role_stage.tobytes()
                if key not in seen:
                    seen.add(key)
                    yield layout
                    if replicas > 1 or is_split:
                        yield replace(layout, owners="with-stage", name=f"{layout.name}, owned by the first replica")
            if stages == 1 and not is_turned:
                homes = np.array(plain_devices(problem), dtype=np.int32) if is_split else devices[0]
                for what, role_device in apart_roles(problem, step, homes):
                    apart = replace(chain.layout(devices, "work"), role_device=role_device, name=f"{what} apart")
                    yield from [apart, replace(apart, owners="with-stage")][: 1 + is_split]
                if is_split and graph.num_micro_batches < chain.teams.shape[1]:
                    yield from _shifted(problem, step, chain.layout(devices))
        if is_split and (stages, replicas) == grids[0]:
            yield from _across(problem, step)


def _shifted(problem: Problem, step: StepRoles, layout: Layout) -> Iterator[Layout]:
    """The layout with whole ops on all devices of a team in turn, where micro-batches are too few for all.

    One device with all norms and sums of shards has more to do than the others, which then wait for it. So the chain is
    cut into equal parts of whole ops, and each part is on the next device.
    """
    whole, size = Chain.of(problem, step, are_shards_across=True), layout.teams.shape[1]
    part = cut_stages(whole.work_s, np.ones(size))[step.position]
    shifted = replace(layout, shift=part, name=f"{layout.name}, whole ops in turn")
    yield from (shifted, replace(shifted, owners="with-stage"))


MOST_ACROSS = 4
"""Stages that shards are across at most."""


def _across(problem: Problem, step: StepRoles) -> Iterator[Layout]:
    """Layouts of whole ops on devices, stages first, with shards across the stages of a replica."""
    chain = Chain.of(problem, step, are_shards_across=True)
    for stages, replicas in sorted(shapes(len(chain.line), problem.graph.num_micro_batches), reverse=True):
        if 1 < stages <= MOST_ACROSS and stages * replicas == len(chain.line):
            used = np.array(chain.line, dtype=np.int32)
            for cut in CUTS[:2]:
                for devices in (used.reshape(stages, replicas), used.reshape(replicas, stages).T.copy()):
                    layout = chain.layout(devices, cut)
                    yield replace(layout, is_across=True, name=f"{layout.name}, shards across stages")


def shapes(num_devices: int, num_micro_batches: int) -> list[tuple[int, int]]:
    """(p, d): stages and replicas on at most `num_devices`, those with most devices first, then with most replicas."""
    found = [
        (stages, replicas)
        for stages in range(1, num_devices + 1)
        for replicas in range(1, min(num_devices // stages, num_micro_batches) + 1)
        if stages * replicas > 1 or num_devices == 1
    ]
    return sorted(found, key=lambda shape: (-shape[0] * shape[1], shape[0]))


@dataclass(frozen=True, eq=False)
class Chain:
    """The chain of roles as loads that stages are cut by.

    Attributes:
        step: the roles.
        num_micro_batches: K.
        work_s: (P,) mean seconds of all that belongs to each place.
        fixed_bytes: (P,) parameters, gradients and optimizer state.
        saved_bytes: (P,) outputs of forward ops, of all micro-batches.
        crossing_s: (P + 1,) mean seconds of the transfers over a cut before each place, of all micro-batches.
        speed: (D,) of each device: 1 for the mean; (T,) of each team where there are some.
        room: (D,) bytes of each device beside its context; (T,) of those of each team.
        line: devices that are no gangs, or all teams.
        teams: as of `Layout`.
    """

    step: StepRoles
    num_micro_batches: int
    work_s: NDArray[np.float64]
    fixed_bytes: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    crossing_s: NDArray[np.float64]
    speed: NDArray[np.float64]
    room: NDArray[np.float64]
    line: list[int]
    teams: NDArray[np.int32]

    @classmethod
    def of(cls, problem: Problem, step: StepRoles, *, are_shards_across: bool = False) -> Chain:
        """The chain of a problem's roles.

        Args:
            problem: the problem to place.
            step: its roles.
            are_shards_across: a chain of whole ops on devices, not of all ops on teams.
        """
        graph, place, count = problem.graph, step.op_position, step.num_positions
        time_s = np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s)
        mean_s = np.where(are_shards_across & (graph.shard >= 0), 0.0, time_s.mean(axis=1))
        whole_s = np.maximum(time_s.sum(axis=0), 1e-30)
        fixed = (graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes).astype(np.float64)
        saved = np.where((graph.phases == FORWARD) & (graph.colocation < 0), graph.output_bytes, 0).astype(np.float64)
        speed, room, teams = whole_s.mean() / whole_s, room_bytes(problem), teams_of(problem)
        teams = teams[:0, :1] if are_shards_across else teams
        return cls(
            step=step,
            num_micro_batches=graph.num_micro_batches,
            work_s=np.bincount(place, weights=mean_s, minlength=count).astype(np.float64),
            fixed_bytes=np.bincount(place, weights=fixed, minlength=count).astype(np.float64),
            saved_bytes=np.bincount(place, weights=saved, minlength=count).astype(np.float64),
            crossing_s=_crossing_s(problem, place, count),
            speed=speed[teams].mean(axis=1) if len(teams) else speed,
            room=room[teams].sum(axis=1) if len(teams) else room,
            line=list(range(len(teams))) if len(teams) else plain_devices(problem),
            teams=teams,
        )

    def layout(self, devices: NDArray[np.int32], cut: str = "work") -> Layout:
        """Stages and replicas on `devices` (p, d), parameters spread.

        Args:
            devices: of each stage of each replica.
            cut: one of `CUTS`.
        """
        stages, replicas = devices.shape
        speed = self.speed[devices]
        held, room = self.fixed_bytes + self.saved_bytes / replicas, self.room[devices].min(axis=1)
        stage_of = cut_by(cut, self.work_s, self.crossing_s / replicas, speed.sum(axis=1), held, room)
        share = np.bincount(stage_of, weights=self.work_s, minlength=stages)
        slowest_s = (share[:, None] / speed).max(axis=0)
        return Layout(
            devices=devices,
            role_stage=stage_of[self.step.position],
            replica=deal(self.num_micro_batches, slowest_s),
            name=f"{stages} stages x {replicas} replicas"
            + (f" x {self.teams.shape[1]} shards" if len(self.teams) else "")
            + (f", stages cut by {cut}" if stages > 1 else ""),
            teams=self.teams,
        )


def teams_of(problem: Problem) -> NDArray[np.int32]:
    """(T, P) int32: devices in teams of as many as there are shards, by fast links; empty where nothing is split.

    A team is the next device, with those that it reaches soonest; within it, the shards with most work are on the
    fastest devices. Devices that are left are in no team; where there are too few for one, shards share them.
    """
    graph, size = problem.graph, problem.graph.num_shards
    left = plain_devices(problem)
    if size == 1:
        return np.empty((0, 1), dtype=np.int32)
    left = [left[index % len(left)] for index in range(max(size, len(left)))]
    time_s = np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s)
    work_s = np.bincount(graph.shard + 1, weights=time_s.mean(axis=1), minlength=size + 1)[1:]
    most = np.argsort(-np.rint(work_s / max(work_s.max(), 1e-30) * 100), kind="stable")
    whole_s = time_s.sum(axis=0)
    found = []
    while len(left) >= size:
        reach_s = problem.transfer_latency_s[left[0]] + MEGABYTE * problem.transfer_s_per_byte[left[0]]
        near = sorted(left[1:], key=lambda device: (float(reach_s[device]), device))[: size - 1]
        team = np.array(sorted([left[0], *near], key=lambda device: (float(whole_s[device]), device)), dtype=np.int32)
        left = left[size:] if len(set(left)) < len(left) else [device for device in left if device not in team]
        found.append(team[np.argsort(most)])
    return np.stack(found)


MEGABYTE = 1e6
"""Bytes of a transfer by which devices are near each other."""


def deal(num_micro_batches: int, replica_s: NDArray[np.float64]) -> NDArray[np.int32]:
    """(K,) int32: micro-batches in contiguous blocks, one or more a replica, so that the last is done soonest.

    Args:
        num_micro_batches: K, at least as many as replicas.
        replica_s: (d,) time of each replica for a micro-batch, in any unit.
    """
    counts = np.ones(len(replica_s), dtype=np.int64)
    for _ in range(num_micro_batches - len(replica_s)):
        counts[int(np.argmin((counts + 1) * replica_s))] += 1
    return np.repeat(np.arange(len(replica_s), dtype=np.int32), counts)


def _crossing_s(problem: Problem, place: NDArray[np.int32], count: int) -> NDArray[np.float64]:
    """(P + 1,) float64: mean seconds to send, over a cut before each place, the tensors that ops on the other side
    read.

    Parameters, and ops co-located with them, stay with their stage. A tensor is sent once, however many read it.
    """
    graph = problem.graph
    latency_s, s_per_byte = mean_route(problem.transfer_latency_s), mean_route(problem.transfer_s_per_byte)
    counts = graph.colocation[graph.tensor_op[graph.input_tensors]] < 0
    tensors, ends = graph.input_tensors[counts], place[graph.edge_op[counts]]
    home = place[graph.tensor_op]
    low, high = home.copy(), home.copy()
    np.minimum.at(low, tensors, ends)
    np.maximum.at(high, tensors, ends)
    send_s = latency_s + graph.tensor_bytes * s_per_byte
    far = np.flatnonzero(high > low)
    change = np.zeros(count + 1)
    np.add.at(change, low[far] + 1, send_s[far])
    np.subtract.at(change, high[far] + 1, send_s[far])
    return np.maximum(np.cumsum(change), 0.0)


EXPERT = re.compile(r"(?:^|\.)experts\.([0-9]+)(?:\.|$)")
"""The path of a module within an expert: a numbered child of a module with this name."""
LOOKUP = "aten.embedding"
"""How the targets of ops that look rows up in a table begin."""


def apart_roles(problem: Problem, step: StepRoles, devices: NDArray[np.int32]) -> list[tuple[str, NDArray[np.int32]]]:
    """Roles that may be apart, in words, and (R,) int32 the device of each of its roles, -1 for all others.

    Expert n of every layer has the same device, for all micro-batches; tables, largest first, go where the fewest bytes
    of tables are.

    Args:
        problem: the problem to place.
        step: its roles.
        devices: (D',) where they are dealt out.
    """
    places = {"experts": _experts(problem, step, devices), "tables": _tables(problem, step, devices)}
    shard = problem.graph.shard[np.unique(step.role, return_index=True)[1]]
    return [(what, device_at[step.position, shard + 1]) for what, device_at in places.items() if np.any(device_at >= 0)]


def _experts(problem: Problem, step: StepRoles, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """(P, 1 + shards) int32: the device of each place of the chain that belongs to an expert, else -1."""
    found = np.full((step.num_positions, problem.graph.num_shards + 1), -1, dtype=np.int32)
    numbers = {path: EXPERT.search(path) for path in set(problem.graph.modules)}
    expert = np.array([int(match[1]) if (match := numbers[path]) else -1 for path in problem.graph.modules])
    inside = np.flatnonzero((expert >= 0) & (step.follows >= 0) & (problem.graph.phases == FORWARD))
    count = int(expert.max(initial=-1)) + 1
    if count > 1:
        found[step.op_position[inside]] = devices[expert[inside] * len(devices) // count, None]
    return found


def _tables(problem: Problem, step: StepRoles, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """(P, 1 + shards) int32: the device of whole ops and of each shard at each place of the chain that looks up a
    table, with that table or its shard; else -1."""
    graph = problem.graph
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    looks = np.array([target.startswith(LOOKUP) for target in graph.targets]) & (graph.phases == FORWARD)
    edges = looks[reader] & (graph.parameter_bytes[producer] > 0) & (step.follows[reader] >= 0)
    found = np.full((step.num_positions, graph.num_shards + 1), -1, dtype=np.int32)
    tables = np.unique(producer[edges])
    if len(tables) > 1:
        share = heaviest_first(graph.parameter_bytes[tables].astype(np.float64), np.ones(len(devices)))
        found[step.op_position[tables], graph.shard[tables] + 1] = devices[share]
    return found


MOST_PLACES = 256
"""Places where a chain may be cut: of more, the thinnest in each of as many equal shares of the load."""


def cut_by(
    cut: str,
    work_s: NDArray[np.float64],
    crossing_s: NDArray[np.float64],
    speed: NDArray[np.float64],
    held: NDArray[np.float64],
    room: NDArray[np.float64],
) -> NDArray[np.int32]:
    """(P,) int32: the stage of every link of a chain by one of `CUTS`.

    Args:
        cut: which load is even: work by speed, the same with transfers over cuts, or bytes by room.
        work_s, held: (P,) seconds and bytes of each link.
        crossing_s: (P + 1,) seconds of the transfers over a cut before each link.
        speed, room: (S,) of each stage.
    """
    if cut == "memory":
        return cut_stages(held, room)
    return cut_stages(work_s, speed, crossing_s if cut == "crossing" else None)


def cut_stages(
    load: NDArray[np.float64], rate: NDArray[np.float64], crossing: NDArray[np.float64] | None = None
) -> NDArray[np.int32]:
    """(P,) int32: the stage, 0..S-1, of every link of a chain, so that the stage with the most to do has least.

    A stage is not empty where there are as many links as stages. Of equally good cuts it is the first.

    Args:
        load: (P,) the load of each link: seconds or bytes.
        rate: (S,) how much of it each stage takes in one unit.
        crossing: (P + 1,) the cost of a cut before each link for the stages on both of its sides, in units; nothing by
            default.
    """
    count, stages = len(load), len(rate)
    crossing = np.zeros(count + 1) if crossing is None else crossing
    before = np.concatenate(([0.0], np.cumsum(load, dtype=np.float64)))
    cuts = thinnest_cuts(before, crossing, max(MOST_PLACES, 4 * stages))
    at, extra = before[cuts], crossing[cuts].copy()
    extra[0] = extra[-1] = 0.0
    best = np.where(np.arange(len(cuts)) == 0, 0.0, np.inf)  # of the chain up to each cut, over the stages so far
    chosen = np.zeros((stages, len(cuts)), dtype=np.int64)
    for stage in range(stages):
        took = (at[None, :] - at[:, None]) / rate[stage] + extra[None, :] + extra[:, None]  # from cut, to cut
        took[np.tril_indices(len(cuts), -1 if count < stages else 0)] = np.inf
        worst = np.maximum(best[:, None], took)
        chosen[stage] = worst.argmin(axis=0)
        best = worst.min(axis=0)
    stage_of = np.zeros(count, dtype=np.int32)
    cut = len(cuts) - 1
    for stage in range(stages - 1, -1, -1):
        first = int(chosen[stage, cut])
        stage_of[cuts[first] : cuts[cut]] = stage
        cut = first
    return stage_of


def thinnest_cuts(before: NDArray[np.float64], crossing: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Ascending places where a chain may be cut, both ends among them."""
    count = len(before) - 1
    if count <= most:
        return np.arange(count + 1)
    share = np.minimum(before / max(before[-1], 1e-300) * most, most - 1).astype(np.int64)
    inner = np.arange(1, count)
    by_share = inner[np.lexsort((inner, crossing[inner], share[inner]))]
    thinnest = by_share[np.unique(share[by_share], return_index=True)[1]]
    return np.unique(np.concatenate(([0], thinnest, [count]))).astype(np.int64)


def roles(graph: OpGraph, *, are_apart: bool = True) -> NDArray[np.int32]:
    """(N,) int32: ops that do the same for different micro-batches have the same role, 0..R-1; others each their own.

    Copies keep their order, so the r-th op of one micro-batch answers to the r-th of another with the same target,
    module, phase and shard. Roles are numbered by the first op that has them.

    Args:
        graph: of the step.
        are_apart: whether shards of one op have different roles.
    """
    number: dict[Hashable, int] = {}
    found = np.empty(graph.num_ops, dtype=np.int32)
    nth: dict[Hashable, Iterator[int]] = defaultdict(itertools.count)
    columns = (micro_batches(graph).tolist(), graph.shard.tolist(), graph.targets, graph.modules, graph.phases.tolist())
    for op, (micro_batch, shard, *kind) in enumerate(zip(*columns, strict=True)):
        own = shard if are_apart else min(shard, 0)
        key = op if micro_batch < 0 else (own, *kind, next(nth[micro_batch, shard, *kind]))
        found[op] = number.setdefault(key, len(number))
    return found
