"""Placements as other libraries' maps to devices: Hugging Face's device map and torchrec's sharding plan.

`DEVICE_MAP`: the format of device maps. `project` makes a placement of ops one of modules, `device_map` writes it with
the names of `map_places`. `device_memory` is the memory of a step under it on each device, part by part, with
`cache_by_module`, the keys and values that a model of `transformers` keeps while it generates.

`TABLES`: the format of sharding plans, which say where the embedding tables are. Its words are those of torchrec 1.x
(`torchrec/distributed/types.py`: `ShardingPlan`, `EmbeddingModuleShardingPlan`, `ParameterSharding`, `ShardingType`;
`embedding_types.py`: `EmbeddingComputeKernel`), which is not needed to write them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InvalidValue, refuse_if
from rlplace.export.formats import CapturedRun, Exported, ExportFormat, ExportRequest, rank_devices
from rlplace.graphs import FORWARD, OpGraph
from rlplace.graphs.grouping.module_classes import ModuleClasses
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Shard
from rlplace.measure import Host, Measurement, Problem, Simulator
from rlplace.say import format_bytes, format_ms, say

COUNTS_S = 1e-15
"""The weight of an op that takes no time, so that a module without any goes where its ops are all the same."""


@dataclass(frozen=True)
class Projection:
    """A placement that a device map can say.

    Attributes:
        classes: the ops that such a map has together.
        class_device: (C,) int32, device of each class.
        devices: (N,) int32, device of each op.
        moved: share of the step's op time that was elsewhere before.
    """

    classes: ModuleClasses
    class_device: NDArray[np.int32]
    devices: NDArray[np.int32]
    moved: float


def project(problem: Problem, devices: NDArray[np.int32]) -> Projection:
    """The placement of modules that comes closest to `devices`.

    Each class goes where most of the time of its ops was spent, time being the mean of an op's over all devices, among
    the devices where all of them may be.

    Args:
        problem: of the placement.
        devices: (N,) device of each op.
    """
    classes = ModuleClasses(problem.graph)
    members = np.flatnonzero(classes.op_class >= 0)
    of, weight_s = classes.op_class[members], problem.costs.op_time_s.mean(axis=1)
    votes_s = np.zeros((classes.num_classes, problem.host.num_devices))
    np.add.at(votes_s, (of, devices[members]), weight_s[members] + COUNTS_S)
    if problem.allowed is not None:
        may = np.ones_like(votes_s, dtype=np.bool_)
        np.logical_and.at(may, of, problem.allowed[members])
        votes_s = np.where(may | ~may.any(axis=1, keepdims=True), votes_s, -1.0)
    class_device = votes_s.argmax(axis=1).astype(np.int32)
    projected = np.array(devices, dtype=np.int32)
    projected[members] = class_device[of]
    moved = float(weight_s[projected != devices].sum()) / max(float(weight_s.sum()), 1e-300)
    return Projection(classes, class_device, projected, moved)


def device_map(graph: OpGraph, projection: Projection, places: Sequence[Place]) -> dict[str, Place]:
    """The device map: the path of a module, or the name of a tensor that the root holds, and its device.

    Entries are the highest modules that are on one device altogether. The first one is on the device where the step's
    inputs are to be, which Hugging Face takes for the main one.

    Args:
        graph: with its program.
        projection: of a placement of it.
        places: the map's name of each device.

    Raises:
        InvalidValue: `graph` has no program.
    """
    model, classes = require_program(graph).origin.model, projection.classes
    tree, units = classes.tree, classes.tree.unit_of()
    numbers = (classes.inputs_class, *classes.entry_class.values())
    class_place = {number: places[device] for number, device in enumerate(projection.class_device.tolist())}
    main_place = next((class_place[number] for number in numbers if number >= 0), places[0])
    finest = {name: class_place.get(number, main_place) for name, number in classes.entry_class.items()}
    own: dict[str, set[Place]] = defaultdict(set)  # of the ops of modules around units
    for op in np.flatnonzero((graph.phases == FORWARD) & ~graph.is_source).tolist():
        if graph.modules[op] not in units:
            own[graph.modules[op]].add(class_place.get(int(classes.op_class[op]), main_place))

    def whole(path: str) -> set[Place]:
        """Places of all that is at or below a module."""
        names = (path,) if units.get(path) == path else tree.tensors.get(path, ()) if path not in units else ()
        return own[path].union({finest[name] for name in names if name in finest}, *map(whole, tree.children[path]))

    entries, left = dict[str, Place](), [""]
    while left:
        path = left.pop()
        is_entry = units[path] == path if path in units else _is_one(model, path)
        if is_entry and len(found := whole(path)) == 1:
            entries |= dict.fromkeys((path,), *found)
            continue
        if path not in units:
            entries |= {name: finest[name] for name in tree.tensors.get(path, ())}
        left += reversed(tree.children[path])
    begin = [(name, place) for name, place in entries.items() if place == main_place]
    return dict(begin[:1]) | entries


def _is_one(model: nn.Module, path: str) -> bool:
    """Whether an entry for a module places all that is below it: a list is not called, and has no inputs to bring."""
    is_called = not isinstance(module := model.get_submodule(path), nn.ModuleList | nn.ModuleDict)
    return is_called or all(len(child.state_dict()) for child in module.children())


CPU = "cpu"
Place = int | str
"""The index of a GPU, or `cpu`."""


def map_places(host: Host) -> tuple[Place, ...]:
    """The name of each device of `host` in a device map: the index of a GPU, or `cpu`.

    Parts of one GPU are that GPU, and cores and gangs of them are the CPU. A device of a host file that is called
    neither takes the index of its place among those that are no CPUs.

    Raises:
        InvalidValue: its devices are in several machines, which one process cannot reach.

    Example:
        >>> from rlplace.measure.hosts.resolve import resolve_host
        >>> map_places(resolve_host("cpu+4xA100"))
        ('cpu', 0, 1, 2, 3)
    """
    machines = sorted(
        {found[1] for device in host.devices if (found := re.match(r"(.+)/(?:cuda|gpu|cpu)", device.name))}
    )
    if len(machines) > 1:
        raise InvalidValue(
            "host",
            host.name,
            "a host of one machine",
            where="device map",
            hint=f"A device map is of one process, and these devices are in {len(machines)} machines.",
        )
    gpus = [
        device.name
        for device in host.devices
        if device.backend != "cpu" and re.match(r"(?:.+/)?cpu(?::|$)", device.name) is None
    ]
    numbered = [found for name in gpus if (found := re.search(r"(?:cuda|gpu):?(\d+)(?:/\d+)?$", name))]
    indices = [int(found[1]) for found in numbered] if len(numbered) == len(gpus) else range(len(gpus))
    of_gpu = dict(zip(gpus, indices, strict=True))
    return tuple(of_gpu.get(device.name, CPU) for device in host.devices)


LEARN_MODULES = "`rlplace train --granularity module` searches placements that a device map can say"


def exported(request: ExportRequest) -> Exported:
    """The device map of a run, with its memory on each device and the cost of placing whole modules.

    Raises:
        UserError: the run's step cannot be captured again, is cut into micro-batches or split; its host is several
            machines, or the model keeps no cache.
    """
    problem = dataclasses.replace(CapturedRun.of(request).problem(), allowed=request.session.allowed)
    refuse_if(
        problem.graph.num_shards > 1,
        "split",
        f"{problem.graph.num_shards} shards",
        "whole ops for a device map",
        where="export",
        hint=f"A device map places whole modules: train without `--split`. {LEARN_MODULES}.",
    )
    if (count := problem.graph.num_micro_batches) > 1:
        raise InvalidValue(
            "micro_batches",
            count,
            "1 for a device map",
            where="export",
            hint=f"Its batches are whole, other in step time and memory: train without micro-batches. {LEARN_MODULES}.",
        )
    places = map_places(problem.host)
    plan = request.placement.plan
    projection = project(problem, plan.devices)
    entries = device_map(problem.graph, projection, places)
    simulator = Simulator(dataclasses.replace(problem, allowed=None), threads=1)
    ops = simulator.retime(plan)
    is_kept = (projection.devices == plan.devices).all()
    modules = ops if is_kept else simulator.measure(projection.devices[None])[0]
    memory = device_memory(problem, projection.devices, places, _cache(problem, projection, request.cache_tokens))
    ratio = modules.step_time_s / ops.step_time_s if ops.ok and modules.ok else None
    figures: dict[str, Any] = {
        "device_map": entries,
        "main_device": next(iter(entries.values())),
        "inputs": _shapes(problem),
        "projection": {
            "op_step_s": ops.step_time_s,
            "module_step_s": modules.step_time_s,
            "ratio": ratio,
            "moved_share": projection.moved,
            "status": modules.status,
            "why": modules.why,
        },
        "memory": [{**dataclasses.asdict(each), "fits": each.fits} for each in memory],
    }
    counts = ", ".join(f"{count} on {_called(place)}" for place, count in Counter(entries.values()).items())
    lines = (
        f"the whole model is on {_called(entries[''])}" if "" in entries else f"{len(entries)} entries: {counts}",
        _projected(ops, modules, projection, ratio),
        *(_held(each) for each in memory if each.peak_bytes > each.context_bytes),
        *_warnings(memory, modules, places, entries),
    )
    say("\n".join(lines))
    return Exported(json.dumps(entries, indent=2) + "\n", figures)


def _cache(problem: Problem, projection: Projection, num_tokens: int) -> Counter[int]:
    """Bytes of keys and values by device."""
    batch = next((shape[0] for shape in _shapes(problem) if shape), 1)
    units, classes, held = projection.classes.tree.unit_of(), projection.classes, Counter[int]()
    model = require_program(problem.graph).origin.model
    for path, size in (cache_by_module(model, num_tokens, batch) if num_tokens else {}).items():
        held[int(projection.class_device[classes.entry_class[units[path]]])] += size
    return held


def _shapes(problem: Problem) -> list[list[int]]:
    """Shapes of the step's input tensors."""
    origin = require_program(problem.graph).origin
    leaves = pytree.tree_leaves((origin.args, origin.kwargs))
    return [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _called(place: Place) -> str:
    return f"GPU {place}" if isinstance(place, int) else place


def _projected(ops: Measurement, modules: Measurement, projection: Projection, ratio: float | None) -> str:
    step, before = (f"{format_ms(each.step_time_s)} ms" if each.ok else each.status for each in (modules, ops))
    if ratio is None:
        return f"simulated: single ops {before}, whole modules {step}"
    lost = f", {ratio:.3f} of the {before} with single ops placed ({projection.moved:.1%} of the op time moved)"
    kept = "; the placement was one of modules, nothing is lost"
    return f"simulated: {step} a step{lost if projection.moved else kept}"


def _held(memory: DeviceMemory) -> str:
    parts = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
        "cache": memory.cache_bytes,
        "context": memory.context_bytes,
    }
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    peak = f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.capacity_bytes)}"
    return f"{memory.device} ({_called(memory.place)}): {peak}: {shown}"


def _warnings(
    memory: Sequence[DeviceMemory],
    modules: Measurement,
    places: Sequence[Place],
    entries: dict[str, Place],
) -> Iterator[str]:
    """Devices on which the model does not fit, and facts that a device map alone does not tell Hugging Face."""
    if modules.status == "oom":
        yield f"warning: whole modules do not fit: {modules.why}; {LEARN_MODULES}"
    for each in memory if modules.status != "oom" else ():
        if not each.fits:
            yield (
                f"warning: {each.device} is {format_bytes(each.peak_bytes - each.capacity_bytes)} short where "
                "gradients stay until the optimizer's step, as in an ordinary loop: take a smaller batch, or keep less "
                "on it"
            )
    if CPU in entries.values() and any(place != CPU for place in places):
        yield (
            "warning: with GPUs beside it, `cpu` in a device map means that weights wait in RAM and are computed with "
            "on the main GPU, which is not what was simulated; `--exclude '*=cpu'` keeps modules off it"
        )
    main = next(iter(entries.values()))
    if main != CPU and len(set(entries.values())) > 1:
        yield f"dispatch it with `main_device={main}`: the step's inputs, and what the model's root reads with them"


DEVICE_MAP = ExportFormat("device_map.json", "a Hugging Face device map", exported, options=("cache_tokens",))


def cache_by_module(model: nn.Module, num_tokens: int, batch: int) -> dict[str, int]:
    """Bytes of keys and values that each attention layer keeps for `num_tokens` tokens of `batch` sequences.

    Args:
        model: of `transformers`, whose config says how many heads there are and how wide they are.
        num_tokens: of the prompt and of the generated tokens.
        batch: sequences.

    Raises:
        InvalidValue: it is no model that generates text with a cache.
    """
    layers = [
        path
        for path, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
        and getattr(module, "is_decoder", True)
    ]
    inner = [path for path in layers if not any(other.startswith(f"{path}.") for other in layers)]
    config: Any = getattr(model, "config", None)
    if config is None or not inner:
        raise InvalidValue(
            "cache_tokens",
            num_tokens,
            "0: only models of `transformers` that generate text have a cache of a known size",
            where="device map",
        )
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = (
        getattr(config, "head_dim", None)
        or getattr(config, "d_kv", None)
        or config.hidden_size // config.num_attention_heads
    )
    kept = min(num_tokens, getattr(config, "sliding_window", None) or num_tokens)
    element = next((tensor.element_size() for tensor in model.parameters()), torch.float32.itemsize)
    return dict.fromkeys(inner, 2 * batch * heads * width * kept * element)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device at one batch; the parts do not all peak at once, so their sum may be above `peak_bytes`.

    Attributes:
        device: its name on the host.
        place: in the map.
        parameter_bytes: of parameters and buffers.
        gradient_bytes: of their gradients, all of them.
        optimizer_bytes: of the optimizer's state.
        activation_bytes: most of all else that a step holds at one time, with received copies.
        cache_bytes: keys and values of generated text.
        context_bytes: held by the device itself.
        peak_bytes: most at one time where gradients stay until the optimizer's step, as in an ordinary loop, and the
            cache beside it.
        capacity_bytes: of the device.
    """

    device: str
    place: Place
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    cache_bytes: int
    context_bytes: int
    peak_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak_bytes <= self.capacity_bytes


def device_memory(
    problem: Problem, devices: NDArray[np.int32], places: tuple[Place, ...], cache_bytes: Mapping[int, int]
) -> list[DeviceMemory]:
    """The memory that each device of the host needs for a step.

    Args:
        problem: of the step, its graph with a program.
        devices: (N,) device of each op.
        places: the map's name of each device.
        cache_bytes: of the keys and values of generated text, by device; may be empty.
    """
    graph, host = problem.graph, problem.host
    parameters, gradients, states = (
        np.bincount(devices, weights=sizes, minlength=host.num_devices).astype(np.int64).tolist()
        for sizes in (np.where(graph.is_resident, graph.output_bytes, 0), graph.gradient_bytes, graph.state_bytes)
    )
    without = graph.tensor_bytes.copy()
    without[_gradients(graph)] = 0
    peaks, others = (  # most at one time on each device, whether or not it fits
        Simulator(dataclasses.replace(problem, graph=each, allowed=None), threads=1)
        .plan_and_time(devices)[1]
        .peak_bytes
        for each in (gradients_kept(graph), dataclasses.replace(graph, tensor_bytes=without))
    )
    return [
        DeviceMemory(
            device=device.name,
            place=places[number],
            parameter_bytes=parameters[number],
            gradient_bytes=gradients[number],
            optimizer_bytes=states[number],
            activation_bytes=max(others[number] - parameters[number] - states[number] - device.context_bytes, 0),
            cache_bytes=cache_bytes.get(number, 0),
            context_bytes=device.context_bytes,
            peak_bytes=peaks[number] + cache_bytes.get(number, 0),
            capacity_bytes=device.memory_bytes,
        )
        for number, device in enumerate(host.devices)
    ]


def gradients_kept(graph: OpGraph) -> OpGraph:
    """The graph of a step that keeps every gradient to its end, as a loop does that calls the optimizer afterwards."""
    return dataclasses.replace(graph, output_tensors=np.union1d(graph.output_tensors, _gradients(graph)))


def _gradients(graph: OpGraph) -> NDArray[np.int32]:
    """The tensors that hold gradients of parameters."""
    program = require_program(graph)
    return np.unique([program.base(ref) for ref in program.gradients.values()]).astype(np.int32)


WHERE = "export torchrec"
LOOKUPS = ("aten.embedding", "aten._embedding_bag", "rlplace.lookup_rows")
"""How the targets of ops that look rows up in a table begin."""
KERNELS = {"table_wise": "fused", "column_wise": "fused", "row_wise": "fused", "data_parallel": "dense"}
"""The kernel that torchrec has for a way of sharding: updates within the backward, or by the model's own optimizer."""


@dataclass(frozen=True)
class Table:
    """An embedding table of a placement.

    Attributes:
        path: of the module that looks it up; its parameter is `weight`.
        shape: rows and columns.
        sharding: whole on one device, split by columns or rows, or a copy on each.
        device: where the table and its update are; of a split one, its first shard.
        lookup_devices: where it is looked up, ascending.
        is_tied: whether it is read otherwise in the forward, which torchrec's collections of tables cannot do.
        shards: of a split one: offsets, sizes, and the device of each.
    """

    path: str
    shape: tuple[int, int]
    sharding: Literal["table_wise", "column_wise", "row_wise", "data_parallel"]
    device: int
    lookup_devices: tuple[int, ...]
    is_tied: bool = False
    shards: tuple[tuple[tuple[int, int], tuple[int, int], int], ...] = ()


def tables_of(graph: OpGraph, devices: NDArray[np.int32]) -> list[Table]:
    """The tables of a placement, in the order of the graph.

    One whose lookups are dealt out over devices by micro-batch is data-parallel: the placement sends a copy of it to
    each of them, and adds its gradients. One that is split has its shards where their updates are. Any other is whole
    where its update is.

    Args:
        graph: with its program.
        devices: (N,) of its ops.
    """
    sources = require_program(graph).sources
    looks = np.array([target.startswith(LOOKUPS) for target in graph.targets]) & (graph.phases == FORWARD)
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    found: dict[str, Table] = {}
    for op in np.unique(producer[looks[reader] & (graph.parameter_bytes[producer] > 0)]).tolist():
        shape = graph.tensor_shapes[int(graph.output_offsets[op])]
        lookups = reader[looks[reader] & (producer == op)]
        by_slice: dict[int, set[int]] = defaultdict(set)
        for lookup in lookups.tolist():
            by_slice[int(graph.micro_batch[lookup])].add(int(devices[lookup]))
        is_dealt = len({frozenset(used) for used in by_slice.values()}) > 1
        others = (producer == op) & ~looks[reader] & (graph.phases[reader] == FORWARD)
        shard = sources[op].shard
        path = (sources[op].key if shard is None else shard.name).removesuffix(".weight")
        table = Table(
            path=path,
            shape=(shape[0], shape[1]),
            sharding="data_parallel" if is_dealt and shard is None else "table_wise",
            device=int(devices[op]),
            lookup_devices=tuple(np.unique(devices[lookups]).tolist()),
            is_tied=bool(others.any()),
        )
        found[path] = table if shard is None else _joined(found.get(path), table, shard)
    return list(found.values())


def updated_in_parts(graph: OpGraph) -> list[str]:
    """The paths of tables that are looked up whole and updated in shards, as a split of `updates` makes them.

    Args:
        graph: with its program.
    """
    sources, producer = require_program(graph).sources, graph.tensor_op[graph.input_tensors]
    looks = np.array([target.startswith(LOOKUPS) for target in graph.targets]) & (graph.phases == FORWARD)
    joins = np.unique(producer[looks[graph.edge_op]])
    parts = np.unique(producer[np.isin(graph.edge_op, joins)]).tolist()
    shards = (sources[op].shard for op in parts if graph.parameter_bytes[op] > 0)
    return list(dict.fromkeys(shard.name.removesuffix(".weight") for shard in shards if shard is not None))


def _joined(before: Table | None, part: Table, shard: Shard) -> Table:
    """The table of the shards so far and the next one."""
    known = () if before is None else before.shards
    (start, _), *_ = shard.intervals
    shards = (*known, ((0, start) if shard.dim else (start, 0), part.shape, part.device))
    rows, columns = part.shape
    total = sum(sizes[shard.dim] for _, sizes, _ in shards)
    return dataclasses.replace(
        part,
        shape=(rows, total) if shard.dim else (total, columns),
        sharding="column_wise" if shard.dim else "row_wise",
        device=shards[0][2],
        lookup_devices=tuple(sorted({*part.lookup_devices, *(() if before is None else before.lookup_devices)})),
        is_tied=part.is_tied or (before is not None and before.is_tied),
        shards=shards,
    )


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
        shards = table.shards or (((0, 0), table.shape, table.device),)
        if away := [device for *_, device in shards if device not in ranks]:
            raise InvalidValue(
                "table",
                f"{table.path} on {host.devices[away[0]].name}",
                f"on a device with a process: {', '.join(host.devices[index].name for index in places)}",
                where=WHERE,
                hint="Train again with `--pin` or `--exclude`, so that no table is there.",
            )
        if table.sharding == "row_wise":
            _check_rows(table, list(ranks))
        is_copied = table.sharding == "data_parallel"
        spec = [
            {
                "shard_offsets": list(offsets),
                "shard_sizes": list(sizes),
                "placement": f"rank:{ranks[device]}/{places[device]}",
            }
            for offsets, sizes, device in shards
        ]
        module, _, name = table.path.rpartition(".")
        plan.setdefault(module, {})[name] = {
            "sharding_type": table.sharding,
            "compute_kernel": KERNELS[table.sharding],
            "ranks": sorted(ranks.values()) if is_copied else [ranks[device] for *_, device in shards],
            "sharding_spec": None if is_copied else {"shards": spec},
        }
    return plan


def _check_rows(table: Table, devices: Sequence[int]) -> None:
    """Refuses rows that are dealt out otherwise than torchrec does: evenly, over all ranks in order."""
    block = -(-table.shape[0] // len(devices))
    wanted = [(min(rank * block, table.shape[0]), device) for rank, device in enumerate(devices)]
    refuse_if(
        [(rows, device) for (rows, _), _, device in table.shards] != wanted,
        "table",
        f"{table.path} by rows in {len(table.shards)} shards",
        f"{block} rows on each of the {len(devices)} ranks, in order",
        where=WHERE,
        hint="torchrec deals rows out so. Split by `tables` (columns) instead.",
    )


def torchrec_plan(request: ExportRequest) -> Exported:
    """The text of `torchrec.json` for a run; says on stderr where the tables are.

    Raises:
        InvalidValue: the model looks up no embedding table, or one that is updated in shards.
        UserError: the run lacks a file or is malformed, or its workload cannot be built.
    """
    run = CapturedRun.of(request)
    in_parts = ", ".join(updated_in_parts(run.graph))
    refuse_if(
        in_parts,
        "split",
        f"updates of {in_parts} in shards, which are looked up as a whole",
        "tables that are updated where they are looked up, as torchrec does",
        where=WHERE,
        hint="Train again with a `--split` without `updates`, or without a split.",
    )
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
    say("\n".join(_said(tables, run.host)))
    return Exported(
        json.dumps({"schema": 1, "world_size": len(names), "devices": names, "plan": plan}, indent=2) + "\n",
        {"world_size": len(names), "num_tables": len(tables), "plan": plan},
    )


def _said(tables: Sequence[Table], host: Host) -> Iterator[str]:
    whole = [table for table in tables if table.sharding == "table_wise"]
    for table in (table for table in tables if table.shards):
        names = ", ".join(host.devices[device].name for *_, device in table.shards)
        yield f"{table.path}: {table.sharding.removesuffix('_wise')}s over {names}"
    for device in sorted({table.device for table in whole}):
        own = [table for table in whole if table.device == device]
        cells = sum(math.prod(table.shape) for table in own)
        yield f"{host.devices[device].name}: {len(own)} tables, {cells:,} numbers"
    if copied := sum(table.sharding == "data_parallel" for table in tables):
        yield f"every device: a copy of {copied} tables"
    if away := [table.path for table in whole if set(table.lookup_devices) != {table.device}]:
        yield (
            f"{len(away)} tables are looked up on another device than theirs in the placement; torchrec looks a table "
            f"up where it is: {', '.join(away[:5])}{', ...' if len(away) > 5 else ''}"
        )
    if tied := [table.path for table in tables if table.is_tied]:
        yield f"read by other ops too, which torchrec's tables are not: {', '.join(tied)}"


TABLES = ExportFormat("torchrec.json", "where the embedding tables are, as a sharding plan of torchrec", torchrec_plan)
