"""`torchrec`: where a placement has its embedding tables, as a sharding plan of torchrec.

The words are those of torchrec 1.x (`torchrec/distributed/types.py`: `ShardingPlan`, `EmbeddingModuleShardingPlan`,
`ParameterSharding`, `ShardingType`; `embedding_types.py`: `EmbeddingComputeKernel`), which is not needed to write them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.export.formats import CapturedRun, Exported, ExportFormat, ExportRequest, rank_devices
from rlplace.graphs import FORWARD, OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.measure import Host
from rlplace.say import say

WHERE = "export torchrec"
LOOKUPS = ("aten.embedding", "aten._embedding_bag")
"""How the targets of ops that look rows up in a table begin."""
KERNELS = {"table_wise": "fused", "data_parallel": "dense"}
"""The kernel that torchrec has for a way of sharding: updates within the backward, or by the model's own optimizer."""


@dataclass(frozen=True)
class Table:
    """An embedding table of a placement.

    Attributes:
        path: of the module that looks it up; its parameter is `weight`.
        shape: rows and columns.
        sharding: whole on one device, or a copy on each.
        device: where the table and its update are.
        lookup_devices: where it is looked up, ascending.
        is_tied: whether it is read otherwise in the forward, which torchrec's collections of tables cannot do.
    """

    path: str
    shape: tuple[int, int]
    sharding: Literal["table_wise", "data_parallel"]
    device: int
    lookup_devices: tuple[int, ...]
    is_tied: bool = False


def tables_of(graph: OpGraph, devices: NDArray[np.int32]) -> list[Table]:
    """The tables of a placement, in the order of the graph.

    One whose lookups are dealt out over devices by micro-batch is data-parallel: the placement sends a copy of it to
    each of them, and adds its gradients. Any other is whole where its update is.

    Args:
        graph: with its program.
        devices: (N,) of its ops.
    """
    sources = require_program(graph).sources
    looks = np.array([target.startswith(LOOKUPS) for target in graph.targets]) & (graph.phases == FORWARD)
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    found = []
    for op in np.unique(producer[looks[reader] & (graph.parameter_bytes[producer] > 0)]).tolist():
        shape = graph.tensor_shapes[int(graph.output_offsets[op])]
        lookups = reader[looks[reader] & (producer == op)]
        by_slice: dict[int, set[int]] = defaultdict(set)
        for lookup in lookups.tolist():
            by_slice[int(graph.micro_batch[lookup])].add(int(devices[lookup]))
        where = tuple(sorted(set(devices[lookups].tolist())))
        is_dealt = len({frozenset(used) for used in by_slice.values()}) > 1
        path = sources[op].key.removesuffix(".weight")
        sharding: Literal["table_wise", "data_parallel"] = "data_parallel" if is_dealt else "table_wise"
        others = (producer == op) & ~looks[reader] & (graph.phases[reader] == FORWARD)
        found.append(Table(path, (shape[0], shape[1]), sharding, int(devices[op]), where, bool(others.any())))
    return found


def plan_of(tables: Sequence[Table], host: Host) -> dict[str, Any]:
    """The sharding plan as plain data: by path of the module that holds tables, by name of the table.

    Ranks are those of `rank_devices`. As in plans of torchrec's own planner, a data-parallel table has every rank in
    `ranks`, and no `sharding_spec`.

    Args:
        tables: of the placement.
        host: that it is of.

    Raises:
        InvalidValue: a table is on a device that is no rank.
    """
    places = rank_devices(host, WHERE)
    ranks = {index: rank for rank, index in enumerate(places)}
    plan: dict[str, dict[str, Any]] = {}
    for table in tables:
        if table.device not in ranks:
            known = ", ".join(host.devices[index].name for index in places)
            raise InvalidValue(
                "table",
                f"{table.path} on {host.devices[table.device].name}",
                f"on a device with a process: {known}",
                where=WHERE,
                hint="Train again with `--pin` or `--exclude`, so that no table is there.",
            )
        rank = ranks[table.device]
        is_whole = table.sharding == "table_wise"
        shard = {
            "shard_offsets": [0, 0],
            "shard_sizes": list(table.shape),
            "placement": f"rank:{rank}/{places[table.device]}",
        }
        module, _, name = table.path.rpartition(".")
        plan.setdefault(module, {})[name] = {
            "sharding_type": table.sharding,
            "compute_kernel": KERNELS[table.sharding],
            "ranks": [rank] if is_whole else sorted(ranks.values()),
            "sharding_spec": {"shards": [shard]} if is_whole else None,
        }
    return plan


def torchrec_plan(request: ExportRequest) -> Exported:
    """The text of `torchrec.json` for a run; says on stderr where the tables are.

    Raises:
        InvalidValue: the model looks up no embedding table.
        UserError: the run lacks a file or is malformed, or its workload cannot be built.
    """
    run = CapturedRun.of(request)
    tables = tables_of(run.graph, request.placement.devices)
    if not tables:
        raise InvalidValue(
            "workload",
            str(request.spec),
            "a model that looks up embedding tables",
            where=WHERE,
            hint="`--format csv` and `--format script` are for any model.",
        )
    plan = plan_of(tables, run.host)
    names = [run.host.devices[index].name for index in rank_devices(run.host, WHERE)]
    for line in _said(tables, run.host):
        say(line)
    text = json.dumps({"schema": 1, "world_size": len(names), "devices": names, "plan": plan}, indent=2) + "\n"
    return Exported(text, {"world_size": len(names), "num_tables": len(tables), "plan": plan})


def _said(tables: Sequence[Table], host: Host) -> Iterator[str]:
    whole = [table for table in tables if table.sharding == "table_wise"]
    for device in sorted({table.device for table in whole}):
        own = [table for table in whole if table.device == device]
        cells = sum(math.prod(table.shape) for table in own)
        yield f"{host.devices[device].name}: {len(own)} tables, {cells:,} numbers"
    if copied := len(tables) - len(whole):
        yield f"every device: a copy of {copied} tables"
    if away := [table.path for table in whole if set(table.lookup_devices) != {table.device}]:
        yield (
            f"{len(away)} tables are looked up on another device than theirs in the placement; torchrec looks a table "
            f"up where it is: {', '.join(away[:5])}{', ...' if len(away) > 5 else ''}"
        )
    if tied := [table.path for table in tables if table.is_tied]:
        yield f"read by other ops too, which torchrec's tables are not: {', '.join(tied)}"


TABLES = ExportFormat("torchrec.json", "where the embedding tables are, as a sharding plan of torchrec", torchrec_plan)
