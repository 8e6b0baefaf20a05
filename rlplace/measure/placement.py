"""`Placement`: which device each op runs on, with the orders that were planned, as a file people keep."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlplace.errors import FingerprintMismatch, InvalidValue, refuse_if
from rlplace.files import MOST_GRAPH_VALUES, read_json, write_json_atomic
from rlplace.graphs import OpGraph
from rlplace.graphs.grouping.coarsen import distinct
from rlplace.graphs.program import SPLITTABLE, LossKind, SplitPlan
from rlplace.measure.hosts.host import Host, Printable
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import OP_ORDERS, Plan, Problem
from rlplace.measure.timing.verdict import SpeedVerdict
from rlplace.records import AtLeastOne, FirstSchema, read_record, record
from rlplace.say import counted

SCHEMA: Final = 1
Index = Annotated[int, Field(ge=0, lt=2**31)]


@record(frozen=True)
class PlacedCut:
    """How the batch of a placed step was cut."""

    count: AtLeastOne
    """Micro-batches, K; 1 for a whole batch."""
    loss: str = ""
    """How they make the loss, a `LossKind`; empty for a whole batch, and where the graph came from a file."""
    op_order: str = "rank"
    """The order of ops that the plan was made with, one of `OP_ORDERS`."""

    def __post_init__(self) -> None:
        for name, known in (("loss", ("", *get_args(LossKind))), ("op_order", OP_ORDERS)):
            refuse_if(
                getattr(self, name) not in known, name, getattr(self, name), f"one of {', '.join(map(repr, known))}"
            )

    def __str__(self) -> str:
        if self.count == 1:
            return "a whole batch"
        return f"{self.count} micro-batches{f' of {self.loss} loss' if self.loss else ''}"


@record(frozen=True)
class PlacedSplit:
    """How the ops of a placed step were split into shards, in the words of `SplitPlan.parse`."""

    classes: str
    """As `attention,mlp`."""
    parts: str
    """Number of shards, or the share of each, as `3:1`; with `/chunks` behind it, sums are made in chunks."""

    def __post_init__(self) -> None:
        refuse_if(self.plan is None, "classes", self.classes, f"some of {', '.join(SPLITTABLE)}", where="split")

    @property
    def plan(self) -> SplitPlan | None:
        """The plan."""
        return SplitPlan.parse(self.classes, self.parts)

    @classmethod
    def of(cls, graph: OpGraph) -> PlacedSplit | None:
        """Of a graph; None for one that is not split, or without its program."""
        plan = None if graph.program is None else graph.program.origin.split
        return None if plan is None else cls(**plan.words)

    def __str__(self) -> str:
        parts, _, chunks = self.parts.partition("/")
        shards = f"shards {parts}" if ":" in parts else f"{parts} shards"
        return f"{self.classes} in {shards}{', sums in chunks' * bool(chunks)}"


@record(frozen=True)
class PlacementFile:
    """The content of `placement.json`, before it is known to be a plan."""

    schema: FirstSchema
    graph_fingerprint: Printable
    host_fingerprint: Printable
    devices: Annotated[tuple[Annotated[Printable, Field(min_length=1)], ...], Field(min_length=1)]
    """Names of the host's devices."""
    op_device: tuple[Index, ...]
    transfers: tuple[tuple[Index, Index], ...]
    """Pairs of a tensor and the device that it goes to."""
    sequence: tuple[Index, ...]
    method: Printable = ""
    micro_batches: PlacedCut | None = None
    split: PlacedSplit | None = None
    verdict: SpeedVerdict | None = None

    def __post_init__(self) -> None:
        num_devices, total = len(self.devices), len(self.op_device) + len(self.transfers)
        for name, used in (("op_device", self.op_device), ("transfers", [device for _, device in self.transfers])):
            if max(used, default=0) >= num_devices:
                raise InvalidValue(name, max(used), f"devices in 0..{num_devices - 1}")
        refuse_if(
            sorted(self.sequence) != list(range(total)),
            "sequence",
            f"{len(self.sequence)} entries",
            f"each of {total} items once",
        )


@dataclass(frozen=True)
class Placement:
    """A plan, with the fingerprints of its graph and host.

    Attributes:
        plan: devices of ops, transfers, and the sequence that determines all orders.
        graph_fingerprint: of its graph.
        host_fingerprint: of its host.
        device_names: (D,) names of the host's devices, for display.
        method: the method that found it.
        cut: how the batch of its step was cut; None in files of older versions.
        split_words: how the ops of its step were split into shards; None for a step that was not.
        verdict: its step time and those of one device and plain PyTorch, and whether it is faster; None where it was
            not judged, and in files of older versions.
    """

    plan: Plan
    graph_fingerprint: str
    host_fingerprint: str
    device_names: tuple[str, ...]
    method: str = ""
    cut: PlacedCut | None = None
    split_words: PlacedSplit | None = None
    verdict: SpeedVerdict | None = None

    @classmethod
    def of(cls, problem: Problem, plan: Plan | None, method: str = "") -> Placement:
        """The placement of `plan` on `problem`.

        Raises:
            InvalidValue: `plan` is not a plan, but None (from a search without a result) or an array of devices.
        """
        if not isinstance(plan, Plan):
            raise InvalidValue(
                "plan",
                None if plan is None else f"of type {type(plan).__name__}",
                "a Plan",
                where="placement",
                hint="A search that found nothing has none; `Simulator(problem).plan(devices)` plans an array of "
                "devices.",
            )
        names = tuple(device.name for device in problem.host.devices)
        program = problem.graph.program
        micro = None if program is None else program.origin.micro
        cut = PlacedCut(problem.graph.num_micro_batches, "" if micro is None else micro.verdict.kind, problem.op_order)
        prints = problem.graph.fingerprint, problem.host.fingerprint
        return cls(plan, *prints, names, method, cut, PlacedSplit.of(problem.graph))

    @property
    def split(self) -> SplitPlan | None:
        """How the ops of its step were split, as `capture` takes it."""
        return None if self.split_words is None else self.split_words.plan

    @property
    def devices(self) -> NDArray[np.int32]:
        """(N,) int32 device of each op."""
        return self.plan.devices

    def __repr__(self) -> str:
        """In one line: how many ops are where, and the method that found it."""
        counts = np.bincount(self.devices, minlength=len(self.device_names)).tolist()
        where = ", ".join(
            f"{counted(count, 'op')} on {name}" for count, name in zip(counts, self.device_names) if count
        )
        by = self.method and f", by {self.method}"
        return f"Placement({where}; {counted(self.plan.num_transfers, 'transfer')}{by})"

    def require(self, graph: OpGraph, host: Host | str) -> Placement:
        """Returns this placement, if it was made for `graph` and `host` (a host or a HOST word).

        Raises:
            FingerprintMismatch: it was made for another graph or host.
            InvalidValue: its number of devices differs from that of the host.
        """
        host = resolve_host(host)
        self.require_graph(graph)
        if self.host_fingerprint != host.fingerprint:
            raise FingerprintMismatch("host", self.host_fingerprint, host.fingerprint, hint=self._other_host(host))
        if len(self.device_names) != host.num_devices:
            names, expected = f"{len(self.device_names)} names", f"those of the host's {host.num_devices}"
            raise InvalidValue("devices", names, expected, where="placement")
        return self

    def _other_host(self, host: Host) -> str:
        """The advice where it was made for the same devices as processes, and they are threads; or the reverse."""
        if host.processes:
            other, *words = replace(host, processes=False), "threads", "processes", "cores", "without"
        elif any(device.members for device in host.devices):
            return ""
        else:
            other, *words = host.as_processes(host.name), "processes", "threads", "procs", "with"
        if self.host_fingerprint != other.fingerprint:
            return ""
        made, yours, kind, sign = words
        num_cores = len(host.devices[0].cores)
        word = f"{kind}:{host.num_devices}{f'x{num_cores}' if num_cores > 1 else ''}"
        is_core = host.devices[0].backend == "cpu"
        use = f"`{word}` (`--host {word}`)" if is_core else f"whose name is that of yours {sign} `-procs`"
        return f"It was made for the same devices as {made}, and yours are {yours}: use the host {use}."

    def require_graph(self, graph: OpGraph) -> None:
        """Checks that this placement was made for `graph`.

        Raises:
            FingerprintMismatch: it was not.
        """
        if self.graph_fingerprint != graph.fingerprint:
            raise FingerprintMismatch("graph", self.graph_fingerprint, graph.fingerprint)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in `placement.json`."""
        plan = self.plan
        return {
            "schema": SCHEMA,
            "graph_fingerprint": self.graph_fingerprint,
            "host_fingerprint": self.host_fingerprint,
            "method": self.method,
            **({} if self.cut is None else {"micro_batches": asdict(self.cut)}),
            **({} if self.split_words is None else {"split": asdict(self.split_words)}),
            **({} if self.verdict is None else {"verdict": asdict(self.verdict)}),
            "devices": list(self.device_names),
            "op_device": plan.devices.tolist(),
            "transfers": np.stack((plan.transfer_tensor, plan.transfer_destination), axis=1).tolist(),
            "sequence": plan.sequence.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Placement:
        """The placement from plain data, after a consistency check.

        Args:
            data: content of a placement file.
            where: name of the file, for messages.

        Raises:
            InvalidValue: a missing, mistyped or inconsistent field.
            UnknownName: an unknown field.
        """
        file = read_record(PlacementFile, data, where)
        transfers = np.array(file.transfers, dtype=np.int32).reshape(-1, 2)
        plan = Plan(np.array(file.op_device), transfers[:, 0], transfers[:, 1], np.array(file.sequence))
        prints = file.graph_fingerprint, file.host_fingerprint
        return cls(plan, *prints, file.devices, file.method, file.micro_batches, file.split, file.verdict)


def save_placement(placement: Placement, path: str | os.PathLike[str]) -> None:
    """Writes `placement` as JSON, atomically."""
    write_json_atomic(path, placement.to_dict(), indent=None)


def load_placement(path: str | os.PathLike[str]) -> Placement:
    """The placement in a JSON file.

    Raises:
        FileProblem: no such file, or not JSON.
        InvalidValue, UnknownName: a malformed field.
    """
    return Placement.from_dict(
        read_json(path, most_values=MOST_GRAPH_VALUES, hint="Expected a placement, as `rlplace train` writes it."),
        str(path),
    )


def check_is_placement(placement: object, where: str) -> None:
    """Checks that a user gave `where` a placement, and not, say, the devices of ops that an environment tells.

    Raises:
        InvalidValue: it is something else; names the function that makes a placement of an array.
    """
    if not isinstance(placement, Placement):
        raise InvalidValue(
            "placement",
            f"of type {type(placement).__name__}",
            "a `Placement`",
            where=where,
            hint="Of an array of devices: `Placement.of(problem, Simulator(problem).plan(devices))`.",
        )


def check_plan(graph: OpGraph, num_devices: int, plan: Plan, *, where: str = "placement") -> Plan:
    """`plan`, if it is a complete and executable plan of `graph`.

    Raises:
        InvalidValue: wrong length, a device out of range, a transfer missing or needless, or an order in which an item
            runs before its inputs.
    """
    n, t = graph.num_ops, graph.num_tensors
    refuse_if(len(plan.devices) != n, "op_device", f"{len(plan.devices)} entries", f"{n}, one for each op", where=where)
    for field, values, bound, what in (
        ("op_device", plan.devices, num_devices, "devices"),
        ("transfers", plan.transfer_tensor, t, "tensors"),
        ("transfers", plan.transfer_destination, num_devices, "devices"),
    ):
        wrong = values[(values < 0) | (values >= bound)]
        if wrong.size:
            raise InvalidValue(field, int(wrong[0]), f"{what} in 0..{bound - 1}", where=where)
    reader_device = plan.devices[graph.edge_op]
    crossing = reader_device != plan.devices[graph.tensor_op[graph.input_tensors]]
    needed = distinct(graph.input_tensors[crossing].astype(np.int64) * num_devices + reader_device[crossing])
    keys = plan.transfer_tensor.astype(np.int64) * num_devices + plan.transfer_destination
    refuse_if(
        not np.array_equal(np.sort(keys), needed),
        "transfers",
        f"{len(keys)} of them",
        f"the {len(needed)} that are needed",
        where=where,
    )
    position = np.empty(n + plan.num_transfers, dtype=np.int64)
    refuse_if(
        not np.array_equal(np.sort(plan.sequence), np.arange(len(position))),
        "sequence",
        f"{len(plan.sequence)} entries",
        f"each of {len(position)} items once",
        where=where,
    )
    position[plan.sequence] = np.arange(len(position))
    order = np.argsort(keys)
    edge_keys = graph.input_tensors.astype(np.int64) * num_devices + reader_device
    source = graph.tensor_op[graph.input_tensors].astype(np.int64)
    if len(keys):
        found = order[np.minimum(np.searchsorted(keys[order], edge_keys), len(keys) - 1)]
        source = np.where(crossing, n + found, source)
    late = position[source] > position[graph.edge_op]
    refuse_if(
        np.any(late) or np.any(position[graph.tensor_op[plan.transfer_tensor]] > position[n:]),
        "sequence",
        "out of order",
        "every op after what it reads",
        where=where,
    )
    return plan
