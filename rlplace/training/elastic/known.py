"""`KnownRun`: what a run folder says of its workload, host, costs, and best placement."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rlplace.decode import decode_record
from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs, CostSource, read_workspaces
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.host_model.learned_host import LearnedHost, load_learned_host
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.placement import Placement, load_placement
from rlplace.measure.problem import OP_ORDERS
from rlplace.records import described
from rlplace.session.cut import CutOptions, read_asked
from rlplace.session.folder import RunFolder
from rlplace.workloads import SIZES, Size, WorkloadSpec, parse_kept_workload


@dataclass(frozen=True)
class Choices:
    """What of a run's options a problem depends on, as `config.json` keeps them."""

    seed: int = 0
    workload_seed: int | None = None
    num_groups: int = 256
    grouping: str = "heavy-edge"
    acyclic: bool = False
    constraints: Constraints | None = None

    @property
    def built_with(self) -> int:
        """The seed of the workload; in runs of versions that had one seed for all, that one."""
        return self.seed if self.workload_seed is None else self.workload_seed


@dataclass(frozen=True, eq=False)
class KnownRun:
    """What a run knows.

    Attributes:
        folder: where it is kept.
        config: what `config.json` holds.
        spec: its workload, with the size that it had.
        choices: options that its problem depends on.
        count: micro-batches of its step.
        asked: how these were cut.
        graph_fingerprint: of its step.
        op_order: of its problem.
        host: with the link figures that were measured or given.
        costs: (N, D) as profiled, estimated or given.
        placement: its best one; None where it stopped before there was one.
        learned: what its measured steps taught of the host; None where they taught nothing.
    """

    folder: Path
    config: Mapping[str, Any]
    spec: WorkloadSpec
    choices: Choices
    count: int
    asked: CutOptions
    graph_fingerprint: str
    op_order: str
    host: Host
    costs: Costs
    placement: Placement | None
    learned: LearnedHost | None

    def require_graph(self, graph: OpGraph) -> None:
        """Checks that `graph` is the run's step.

        Raises:
            FingerprintMismatch: it is another.
        """
        if graph.fingerprint != self.graph_fingerprint:
            error = FingerprintMismatch("graph", self.graph_fingerprint, graph.fingerprint)
            error.add_note("The model, PyTorch or rlplace is another since the run: train again.")
            raise error


def read_known(run: RunFolder, workload: str | None = None) -> KnownRun:
    """What the run in a folder knows; nothing is built, captured or run.

    Args:
        run: its folder.
        workload: the workload again, where the run is of a user's function or file.

    Raises:
        FileProblem: a file that is missing or cannot be read.
        InvalidValue, UnknownName: a malformed file; or the run is of a user's function or file, and `workload` does not
            name it again.
        FingerprintMismatch: its placement is of another graph or host.
    """
    config, problem = run.read_json("config.json"), run.read_json("problem.json")
    where = str(run.path("config.json"))
    count, asked = read_asked(_mapping_or_none(config.get("micro_batches"), "micro_batches", where))
    fingerprint, op_order, host, costs = _read_problem(problem, str(run.path("problem.json")))
    placement = load_placement(run.path("placement.json")) if run.has("placement.json") else None
    if placement is not None:
        for kind, actual, expected in (
            ("graph", placement.graph_fingerprint, fingerprint),
            ("host", placement.host_fingerprint, host.fingerprint),
        ):
            if actual != expected:
                raise FingerprintMismatch(kind, actual, expected)
        if len(placement.devices) != len(costs.op_time_s) or len(placement.device_names) != host.num_devices:
            actual = f"{len(placement.devices)} ops on {len(placement.device_names)} devices"
            expected = f"{len(costs.op_time_s)} ops on {host.num_devices} devices, as in problem.json"
            raise InvalidValue("op_device", actual, expected, where=str(run.path("placement.json")))
    return KnownRun(
        run.root,
        config,
        sized(_spec(config, workload, where), _size(config, where)),
        _choices(config, where),
        count,
        asked,
        fingerprint,
        op_order,
        host,
        costs,
        placement,
        load_learned_host(run.path(HOST_MODEL)) if run.has(HOST_MODEL) else None,
    )


def sized(spec: WorkloadSpec, size: Size) -> WorkloadSpec:
    """The workload with a size, where it is a name without one; parts of several likewise.

    Another host may have another default size, and the step is to stay the same.
    """
    from dataclasses import replace

    if spec.is_file or spec.is_function:
        return spec
    if spec.is_multi:
        return replace(spec, parts=tuple(replace(part, spec=sized(part.spec, size)) for part in spec.parts))
    return spec if spec.size else replace(spec, size=size)


def _spec(config: Mapping[str, Any], again: str | None, where: str) -> WorkloadSpec:
    named = config.get("workload")
    if not isinstance(named, str):
        raise InvalidValue("workload", described(named), "text", where=where)
    return parse_kept_workload(named, again, where=where, command=shlex.join(["--workload", named]))


def _size(config: Mapping[str, Any], where: str) -> Size:
    size = config.get("default_size", "small")
    for known in SIZES:
        if size == known:
            return known
    raise UnknownName(f"default_size in {where}", str(described(size)), SIZES)


def _choices(config: Mapping[str, Any], where: str) -> Choices:
    train = config.get("train", {})
    if not isinstance(train, Mapping):
        raise InvalidValue("train", described(train), "a mapping of fields", where=where)
    names = Choices.__dataclass_fields__
    kept = {name: train[name] for name in names if name in train}
    choices = decode_record(Choices, kept | {"workload_seed": config.get("workload_seed")}, where, "train")
    if choices.constraints is not None:
        for pair in (*choices.constraints.pins, *choices.constraints.exclusions):
            if len(pair) != 2:
                raise InvalidValue("train.constraints", described(pair), "pairs of a pattern and a device", where=where)
    return choices


def _read_problem(problem: Mapping[str, Any], where: str) -> tuple[str, str, Host, Costs]:
    graph = _mapping_or_none(problem.get("graph"), "graph", where) or {}
    given = _mapping_or_none(problem.get("costs"), "costs", where) or {}
    fingerprint, order = graph.get("fingerprint"), problem.get("op_order", "rank")
    if not isinstance(fingerprint, str):
        raise InvalidValue("graph.fingerprint", described(fingerprint), "text", where=where)
    if order not in OP_ORDERS:
        raise InvalidValue("op_order", described(order), f"one of {', '.join(OP_ORDERS)}", where=where)
    host = host_from_dict(problem.get("host"), where)
    source = given.get("source")
    for known in get_args(CostSource):
        if source == known:
            times_s = _seconds(given.get("op_time_s"), host, where)
            seen = read_workspaces(given.get("workspace_bytes"), times_s.shape, where)
            return fingerprint, str(order), host, Costs(times_s, known, seen)
    raise UnknownName(f"costs.source in {where}", str(described(source)), get_args(CostSource))


def _seconds(rows: object, host: Host, where: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(N, D) float64 from nested lists."""
    expected = f"a list of rows of {host.num_devices} seconds, one for each device"
    if not isinstance(rows, list):
        raise InvalidValue("costs.op_time_s", described(rows), expected, where=where)
    for row in rows:
        if not isinstance(row, list) or len(row) != host.num_devices:
            raise InvalidValue("costs.op_time_s", described(row), expected, where=where)
        for value in row:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
                raise InvalidValue("costs.op_time_s", described(value), "finite seconds >= 0", where=where)
    return np.array(rows, dtype=np.float64).reshape(len(rows), host.num_devices)


def _mapping_or_none(value: object, field: str, where: str) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidValue(field, described(value), "a mapping of fields", where=where)
    return value
