"""`Problem`: the facts of a graph on a host for measurers, heuristics and policies; `Plan`: a placement in its order.

The checks of given placements, and the latency and seconds per byte of a transfer between each two devices.

`Timeline`: when each op and transfer of a step ran. `single_device_plan` runs everything on one device;
`single_device_peak_bytes` tells the memory that this takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, refuse_if
from rlplace.graphs import Constraints, Grouping, OpGraph, group_ops
from rlplace.graphs.grouping.groups import DEVICE_MAP, LATENCY_S, S_PER_BYTE, GroupingRule
from rlplace.graphs.grouping.module_classes import tied_as_modules
from rlplace.graphs.opgraph import read_only
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host, allocated
from rlplace.measure.hosts.resolve import check_runs_here, resolve_host
from rlplace.say import Say, counted, sayer

OP_ORDERS = ("rank", "tilt", "backward-first")
"""Which op comes first where several are ready: by upward rank; the same, earlier micro-batches before later ones;
backward before forward, so that activations are freed early (1F1B)."""
MEMORY_SHARE = 0.25
"""Part of the smallest device's memory that the bytes of a group may take."""


@dataclass(frozen=True, eq=False)
class Problem:
    """An `OpGraph` and a `Host`, with `Costs` and a `Grouping`.

    Attributes:
        graph: N ops.
        host: D devices.
        costs: (N, D) seconds.
        grouping: G groups of ops that move together.
        allowed: (N, D) bool, devices where each op may run (the user's pins and exclusions, ops that a device does not
            support); None allows every op everywhere.
        op_order: default priorities of ops, one of `OP_ORDERS`; they differ only for micro-batches.
    """

    graph: OpGraph
    host: Host
    costs: Costs
    grouping: Grouping
    allowed: NDArray[np.bool_] | None = None
    op_order: str = "rank"

    def __post_init__(self) -> None:
        n, d = self.graph.num_ops, self.host.num_devices
        for name, array, shape in (
            ("op_time_s", self.costs.op_time_s, (n, d)),
            ("op_group", self.grouping.op_group, (n,)),
        ):
            refuse_if(array.shape != shape, name, array.shape, f"shape {shape}", where="problem")
        refuse_if(
            self.op_order not in OP_ORDERS, "op_order", self.op_order, f"one of {', '.join(OP_ORDERS)}", where="problem"
        )
        if self.allowed is not None:
            object.__setattr__(self, "allowed", read_only(self.allowed, np.bool_))
            refuse_if(self.allowed.shape != (n, d), "allowed", self.allowed.shape, f"shape {(n, d)}", where="problem")
            lost = ~self.group_allowed.any(axis=1)
            if np.any(lost):
                group = int(np.argmax(lost))
                op = int(np.argmax(self.grouping.op_group == group))
                raise InvalidValue(
                    "allowed",
                    f"no device for group {group} (op {self.graph.names[op]!r} and those that move with it)",
                    "at least one device where all of them may run",
                    where="problem",
                    hint="Pins and exclusions contradict each other, or tie together ops that no device can hold.",
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle it: its graph without a program, and nothing that was worked out meanwhile."""
        return Problem, (self.graph, self.host, self.costs, self.grouping, self.allowed, self.op_order)

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        of, on = counted(self.grouping.num_groups, "group"), counted(self.host.num_devices, "device")
        return f"Problem({self.graph!r}, {of} on {self.host.name} ({on}), {self.costs.source} costs)"

    @property
    def workspace_bytes(self) -> NDArray[np.int64]:
        """(N, D) int64: scratch memory of each op on each device, measured or else from the graph."""
        if self.costs.workspace_bytes is not None:
            return self.costs.workspace_bytes
        return np.repeat(self.graph.workspace_bytes[:, None], self.host.num_devices, axis=1)

    @cached_property
    def group_allowed(self) -> NDArray[np.bool_]:
        """(G, D) bool: devices that are allowed for all ops of a group; every group has at least one."""
        table = np.ones((self.grouping.num_groups, self.host.num_devices), dtype=np.bool_)
        if self.allowed is not None:
            np.logical_and.at(table, self.grouping.op_group, self.allowed)
        return table

    def draw_groups(self, generator: np.random.Generator, count: int) -> NDArray[np.int32]:
        """(count, G) int32: for every group one of its allowed devices, drawn uniformly."""
        shape = (count, self.grouping.num_groups)
        if self.allowed is None:
            return generator.integers(0, self.host.num_devices, shape, dtype=np.int32)
        chosen = generator.integers(0, self.group_allowed.sum(axis=1), shape)
        listed = np.argsort(~self.group_allowed, axis=1, kind="stable")  # devices of each group, those allowed first
        return listed[np.arange(shape[1]), chosen].astype(np.int32)

    def nearest_groups(self, group_devices: NDArray[np.integer]) -> NDArray[np.int32]:
        """`group_devices` (..., G), with each forbidden device replaced by the next allowed one."""
        groups = np.asarray(group_devices, dtype=np.int32)
        if self.allowed is None:
            return groups
        devices = np.arange(self.host.num_devices)
        following = (devices[:, None] + devices[None, :]) % self.host.num_devices  # (D, D): from device, after steps
        steps = self.group_allowed[:, following].argmax(axis=2)  # (G, D): steps to the next allowed device
        return np.asarray(following[groups, steps[np.arange(self.grouping.num_groups), groups]], dtype=np.int32)

    @classmethod
    def profile(
        cls,
        graph: OpGraph,
        host: Host | str,
        *,
        num_groups: int = 256,
        grouping: str = "heavy-edge",
        acyclic: bool = False,
        constraints: Constraints | None = None,
        progress: Say | bool | None = None,
        profiler: Callable[[OpGraph, Host, Say], Costs] | None = None,
    ) -> Problem:
        """A problem with costs and link speeds that are measured on this machine, with real steps and copies.

        Args:
            graph: a graph with its program.
            host: a host of this machine, or a HOST word for it (`auto`, `cores`, ...).
            num_groups: number of groups to aim at.
            grouping: the rule of the groups, a word of `GroupingRule`.
            acyclic: keep the graph of groups without cycles.
            constraints: pins, exclusions, and ops that stay together.
            progress: called with the part that is being profiled; True prints to stderr, False prints nothing, None
                prints only to a terminal.
            profiler: makes the costs; by default `profile_costs`, which runs steps in this process.

        Raises:
            UserError: a rule or constraint that does not fit, a simulated host, or a device that this machine lacks.
        """
        from rlplace.measure.profiling.profile import profile_costs, profile_links

        host = resolve_host(host)
        GroupingRule.parse(grouping)  # a mistyped word is refused before anything is measured
        (constraints or Constraints()).resolve(graph, *_names(host))
        check_runs_here(host, where="profile", instead="estimate its costs with `Problem.estimate`")
        host = profile_links(host)
        say = sayer(progress)
        costs = profile_costs(graph, host, on_progress=say) if profiler is None else profiler(graph, host, say)
        return cls.grouped(graph, host, costs, num_groups, grouping, acyclic=acyclic, constraints=constraints)

    @classmethod
    def estimate(
        cls,
        graph: OpGraph,
        host: Host | str,
        *,
        num_groups: int = 256,
        grouping: str = "heavy-edge",
        acyclic: bool = False,
        constraints: Constraints | None = None,
        by_size: bool = False,
    ) -> Problem:
        """A problem with roofline costs, also for a host that is not this machine; arguments as in `profile`.

        With `by_size`, small ops run below the roofline (`estimate_costs`).

        Raises:
            UserError: a rule or constraint that does not fit, or a device without the figures that an estimate needs.
        """
        from rlplace.measure.costs.costs import estimate_costs

        host = resolve_host(host)
        costs = estimate_costs(graph, host, by_size=by_size)
        return cls.grouped(graph, host, costs, num_groups, grouping, acyclic=acyclic, constraints=constraints)

    @classmethod
    def grouped(
        cls,
        graph: OpGraph,
        host: Host | str,
        costs: Costs,
        num_groups: int = 256,
        grouping: str = "heavy-edge",
        *,
        acyclic: bool = False,
        constraints: Constraints | None = None,
    ) -> Problem:
        """A problem with given costs; a rule makes its groups for the routes and memory of this host.

        Raises:
            UserError: a rule or constraint that does not fit.
        """
        host = resolve_host(host)
        latency_s, s_per_byte = mean_transfer(host)
        allowed = None
        if constraints:
            allowed, colocation = constraints.resolve(graph, *_names(host))
            # what is together is a co-location class: every search keeps those
            graph = dataclasses.replace(graph, colocation=colocation)
        if GroupingRule.parse(grouping).name == DEVICE_MAP:  # a constraint: searches that move single ops keep it, too
            refuse_if(
                graph.num_micro_batches > 1,
                "micro_batches",
                graph.num_micro_batches,
                "1",
                where=f"grouping {grouping}",
                hint="A device map places modules for whole batches: capture with `micro_batches=1`.",
            )
            graph = tied_as_modules(graph)
            allowed = None if allowed is None else _shared(allowed, graph.colocation)
        made = group_ops(
            graph,
            costs.op_time_s.mean(axis=1),
            num_groups,
            grouping,
            acyclic=acyclic,
            latency_s=latency_s,
            s_per_byte=s_per_byte,
            cap_bytes=MEMORY_SHARE * min(device.memory_bytes for device in host.devices),
            allowed=allowed,
        )
        return cls(graph, host, costs, made, allowed)

    @cached_property
    def transfer_latency_s(self) -> NDArray[np.float64]:
        """(D, D) float64: latency of each route; 0 on the diagonal and for hand-overs."""
        return over_routes(self.host, "latency_s", max, 0.0)

    @cached_property
    def transfer_s_per_byte(self) -> NDArray[np.float64]:
        """(D, D) float64: seconds per byte of each route; 0 on the diagonal and for hand-overs."""
        return 1.0 / over_routes(self.host, "bandwidth_bytes_per_s", min, np.inf)

    @cached_property
    def _together(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ops of co-location classes but for the first of each, and that first one."""
        classes = self.graph.colocation
        members = np.flatnonzero(classes >= 0)
        _, firsts, place = np.unique(classes[members], return_index=True, return_inverse=True)
        leaders = members[firsts][place]
        return members[leaders != members], leaders[leaders != members]

    def check_groups(
        self, group_devices: NDArray[np.integer], *, where: str = "placement of groups"
    ) -> NDArray[np.int32]:
        """`group_devices` (..., G) as int32, checked; pins are not checked.

        Args:
            group_devices: devices of groups.
            where: their source, for messages.

        Raises:
            InvalidValue: wrong length, no integers, or a device out of range.
        """
        checked = check_range(group_devices, self.grouping.num_groups, self.host.num_devices, one="group", where=where)
        return checked.astype(np.int32, copy=False)

    def check_placement(self, devices: NDArray[np.int32]) -> NDArray[np.int32]:
        """`devices` (..., N) as int32, checked.

        Raises:
            InvalidValue: wrong length, no integers, a device out of range, or a violated co-location rule.
        """
        devices = check_range(devices, self.graph.num_ops, self.host.num_devices, one="op", where="placement")
        check_together(devices, self.graph, *self._together)
        if self.allowed is not None:
            check_allowed(devices, self.graph, self.host, self.allowed)
        return np.ascontiguousarray(devices, dtype=np.int32)


def _shared(allowed: NDArray[np.bool_], colocation: NDArray[np.int32]) -> NDArray[np.bool_]:
    """(N, D) bool: devices where an op may be, and all that it shares a class with."""
    members = np.flatnonzero(colocation >= 0)
    shared = np.ones((int(colocation.max(initial=-1)) + 1, allowed.shape[1]), dtype=np.bool_)
    np.logical_and.at(shared, colocation[members], allowed[members])
    result = allowed.copy()
    result[members] = shared[colocation[members]]
    return result


def _names(host: Host) -> tuple[list[str], list[str]]:
    """Names and kinds of the devices."""
    return [device.name for device in host.devices], [device.kind for device in host.devices]


def check_range(devices: NDArray[Any], length: int, num_devices: int, *, one: str, where: str) -> NDArray[Any]:
    """`devices` (..., length) as an array of integers that name devices of a host.

    Args:
        devices: as given.
        length: of the last axis.
        num_devices: of the host.
        one: the kind of their entries, for messages.
        where: their source, for messages.

    Raises:
        InvalidValue: wrong length, no integers, or a device out of range.
    """
    devices = np.asarray(devices)
    refuse_if(
        devices.shape[-1:] != (length,), "length", devices.shape, f"{length} devices, one for each {one}", where=where
    )
    if not np.issubdtype(devices.dtype, np.integer):
        raise InvalidValue("dtype", str(devices.dtype), "integers, indices of devices", where=where)
    if devices.size and (devices.min() < 0 or devices.max() >= num_devices):
        raise InvalidValue(
            "device",
            int(devices.min()) if devices.min() < 0 else int(devices.max()),
            f"0..{num_devices - 1}",
            where=where,
        )
    return devices


def check_together(
    devices: NDArray[np.integer], graph: OpGraph, members: NDArray[np.int64], leaders: NDArray[np.int64]
) -> None:
    """Refuses a placement that parts ops of one co-location class.

    Args:
        devices: (..., N).
        graph: names them.
        members: ops of classes, but for the first of each.
        leaders: that first one.

    Raises:
        InvalidValue: one is elsewhere than its leader.
    """
    wrong = devices[..., members] != devices[..., leaders]
    if np.any(wrong):
        place = int(np.argmax(wrong.reshape(-1, len(members)).any(axis=0)))
        op, partner = int(members[place]), int(leaders[place])
        raise InvalidValue(
            "device",
            f"op {graph.names[op]!r} away from {graph.names[partner]!r}",
            "one device for ops that live together (a parameter, its gradient and its update)",
            where="placement",
        )


def check_allowed(devices: NDArray[np.integer], graph: OpGraph, host: Host, allowed: NDArray[np.bool_]) -> None:
    """Refuses a placement with an op where it may not run.

    Args:
        devices: (..., N).
        graph: names ops.
        host: names devices.
        allowed: (N, D) bool.

    Raises:
        InvalidValue: one is barred from its device.
    """
    barred = ~allowed[np.arange(graph.num_ops), devices]
    if np.any(barred):
        rows = barred.reshape(-1, graph.num_ops)
        op = int(np.argmax(rows.any(axis=0)))
        found = int(devices.reshape(-1, graph.num_ops)[:, op][rows[:, op]][0])
        may = [device.name for device, is_allowed in zip(host.devices, allowed[op], strict=True) if is_allowed]
        raise InvalidValue(
            "device",
            f"op {graph.names[op]!r} on {host.devices[found].name!r}",
            f"one where it may run: {', '.join(may)}",
            where="placement",
        )


def mean_transfer(host: Host) -> tuple[float, float]:
    """Mean latency, and seconds per byte, of the routes that copy; those of two GPUs where no route does."""
    links = {link.name: link for link in host.links}
    routes = [[links[name] for name in route.links] for route in host.routes if route.links]
    if not routes:
        return LATENCY_S, S_PER_BYTE
    latency_s = [max(link.latency_s for link in route) for route in routes]
    s_per_byte = [1.0 / min(link.bandwidth_bytes_per_s for link in route) for route in routes]
    return float(np.mean(latency_s)), float(np.mean(s_per_byte))


def over_routes(
    host: Host, field: str, reduce: Callable[[Iterator[float]], float], neutral: float
) -> NDArray[np.float64]:
    """(D, D) float64: a figure of the links of each route, reduced; `neutral` on the diagonal and for hand-overs."""
    links = {link.name: float(getattr(link, field)) for link in host.links}
    table = np.full((host.num_devices, host.num_devices), neutral)
    for route in host.routes:
        if route.links:
            source, destination = host.device_index[route.source], host.device_index[route.destination]
            table[source, destination] = reduce(links[name] for name in route.links)
    return table


@dataclass(frozen=True, eq=False)
class Plan:
    """One global sequence of ops and transfers. It determines the order on every device and link.

    The orders of ops on a device, of transfers on a link and of launches on a dispatcher are sub-sequences of
    `sequence`. Because `sequence` is a topological order, threads that follow it cannot deadlock.

    Attributes:
        devices: (N,) int32, device of each op.
        transfer_tensor: (K,) int32, tensor that each transfer carries ...
        transfer_destination: (K,) int32, ... and the device it goes to; `transfer_sources` says where it starts.
        sequence: (N + K,) int32, op i as `i`, transfer k as `N + k`, in order of planned start.
    """

    devices: NDArray[np.int32]
    transfer_tensor: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    sequence: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("devices", "transfer_tensor", "transfer_destination", "sequence"):
            object.__setattr__(self, name, read_only(getattr(self, name), np.int32))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of devices, transfers and all orders: plans with equal fingerprints run in the same way."""
        digest = hashlib.sha256()
        for array in (self.devices, self.transfer_tensor, self.transfer_destination, self.sequence):
            digest.update(len(array).to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()[:32]

    @property
    def num_transfers(self) -> int:
        return len(self.transfer_tensor)

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        on = f"{counted(len(self.devices), 'op')} on {counted(len(np.unique(self.devices)), 'device')}"
        return f"Plan({on}, {counted(self.num_transfers, 'transfer')})"


def transfer_sources(graph: OpGraph, host: Host, plan: Plan) -> NDArray[np.int32]:
    """(K,) int32: the device at which each transfer of a plan starts: that of the op which makes its tensor.

    On a host of several machines, only the first transfer of a tensor to another machine, in the plan's sequence,
    starts there. Its destination is the relay: later ones to this machine start at the relay, which sends on what it
    received. So a tensor that is read everywhere goes to each other machine once, and from there on within it.
    """
    sources, machine_of = plan.devices[graph.tensor_op[plan.transfer_tensor]], host.machine_of
    if machine_of.any():
        sent = plan.sequence[plan.sequence >= graph.num_ops] - graph.num_ops
        machine = machine_of[plan.transfer_destination[sent]]
        keys = plan.transfer_tensor[sent].astype(np.int64) * host.num_devices + machine
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        relayed = (machine != machine_of[sources[sent]]) & (first[which] != np.arange(len(sent)))
        sources[sent[relayed]] = plan.transfer_destination[sent[first[which[relayed]]]]
    return sources


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every op and transfer of one step, in seconds from its start.

    Attributes:
        op_device: (N,) int32.
        op_start_s, op_end_s: (N,) float64.
        transfer_tensor, transfer_source, transfer_destination: (K,) int32.
        transfer_start_s, transfer_end_s: (K,) float64.
        memory_time_s, memory_device, memory_bytes: (P,) float64, int32, int64: allocated bytes of a device from each
            instant on; empty if memory was not recorded.
        source: `simulated` or `measured`.
        traced_op_s: seconds that recording adds to the duration of an op; 0 where that is not known.
    """

    op_device: NDArray[np.int32]
    op_start_s: NDArray[np.float64]
    op_end_s: NDArray[np.float64]
    transfer_tensor: NDArray[np.int32]
    transfer_source: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    transfer_start_s: NDArray[np.float64]
    transfer_end_s: NDArray[np.float64]
    memory_time_s: NDArray[np.float64]
    memory_device: NDArray[np.int32]
    memory_bytes: NDArray[np.int64]
    source: Literal["simulated", "measured"]
    traced_op_s: float = 0.0

    @classmethod
    def empty(cls, num_ops: int) -> Timeline:
        """A simulated step of zero length, with every op on device 0 and without transfers."""
        ops, none, no_times = np.zeros(num_ops), np.zeros(0, dtype=np.int32), np.zeros(0)
        return cls(
            op_device=np.zeros(num_ops, dtype=np.int32),
            op_start_s=ops,
            op_end_s=ops,
            transfer_tensor=none,
            transfer_source=none,
            transfer_destination=none,
            transfer_start_s=no_times,
            transfer_end_s=no_times,
            memory_time_s=no_times,
            memory_device=none,
            memory_bytes=np.zeros(0, dtype=np.int64),
            source="simulated",
        )

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last op or transfer; 0 without any."""
        return float(max(self.op_end_s.max(initial=0.0), self.transfer_end_s.max(initial=0.0)))

    def slowed(self, factor: float) -> Timeline:
        """The same step on a machine on which everything takes `factor` times as long."""
        names = ("op_start_s", "op_end_s", "transfer_start_s", "transfer_end_s", "memory_time_s", "traced_op_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        count = f"{counted(len(self.op_device), 'op')}, {counted(len(self.transfer_tensor), 'transfer')}"
        return f"Timeline({self.source}, {self.step_s * 1e3:.4g} ms, {count})"


def single_device_plan(graph: OpGraph, device: int) -> Plan:
    """Everything on one device, in index order."""
    n = graph.num_ops
    none = np.zeros(0, dtype=np.int32)
    return Plan(np.full(n, device, dtype=np.int32), none, none, np.arange(n, dtype=np.int32))


def single_device_peak_bytes(
    graph: OpGraph, host: Host, device: int, workspace_bytes: NDArray[np.int64] | None = None
) -> int:
    """Peak bytes of `single_device_plan`, context included, as the simulator counts (docs/step-time-model.md).

    Args:
        graph: whose step it is.
        host: of the device.
        device: where everything is.
        workspace_bytes: (N,) scratch of each op there; by default as the graph says.
    """
    described, granularity = host.devices[device], host.devices[device].memory_granularity_bytes
    scratch = graph.workspace_bytes if workspace_bytes is None else workspace_bytes
    sizes, is_resident = allocated(graph.tensor_bytes, granularity), graph.is_source[graph.tensor_op]
    held = described.context_bytes + int(sizes[is_resident].sum() + allocated(graph.state_bytes, granularity).sum())
    last = graph.tensor_op.astype(np.int64)  # the op after whose end each tensor is freed
    np.maximum.at(last, graph.input_tensors, graph.edge_op)
    last[graph.output_tensors] = graph.num_ops
    changes = np.zeros(graph.num_ops + 2, dtype=np.int64)
    np.add.at(changes, graph.tensor_op[~is_resident], sizes[~is_resident])
    np.subtract.at(changes, last[~is_resident] + 1, sizes[~is_resident])
    levels = np.cumsum(changes)[: graph.num_ops] + allocated(scratch, granularity)
    return held + int(levels.max(initial=0))


def capacity_bytes(host: Host, device: int) -> int:
    """The largest peak of a plan on one device: of a pool, its memory less the contexts of its other devices."""
    described = host.devices[device]
    others = [
        other
        for other in host.devices
        if other is not described and described.memory_pool and other.memory_pool == described.memory_pool
    ]
    return min(each.memory_bytes for each in (described, *others)) - sum(other.context_bytes for other in others)
