"""Device maps learned at the level of modules beside those that accelerate makes: python benchmarks/device_maps.py.

Every map is simulated with gradients that stay until the end of the step, as in an ordinary loop. accelerate sees sizes
of parameters alone; where its map does not fit so, the closest of its family that does is found as its users do it, by
moving what it may put on the first device.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import argument, as_markdown, parse, record, save
from torch import nn

from rlplace.errors import InvalidValue, MissingExtra
from rlplace.export.device_map import Place, device_map, gradients_kept, map_places, project
from rlplace.graphs import OpGraph
from rlplace.graphs.grouping.module_classes import ModuleClasses
from rlplace.measure import Measurement, Problem, Simulator, resolve_host
from rlplace.search import Budget, find
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build_for, parse_workload

HOST = "RTX4090+RTX3060"
GPT2 = "gpt2@paper,layers=24,width=1024,heads=16"
MIXTRAL = "mixtral@width=1024,heads=16,kv_heads=4,mlp=3584,experts=8,tokens=1024,vocab=32000"
WORKLOADS = (f"{GPT2},batch=7", f"{GPT2},batch=8", f"{MIXTRAL},layers=12,batch=5", f"{MIXTRAL},layers=14,batch=4")
FAMILY = ("balanced", "balanced_low_0", "sequential")
SHARES = 50
"""Steps of this part of the parameters lead away from `balanced`."""
DeviceMap = dict[str, int | str]


def map_devices(graph: OpGraph, entries: Mapping[str, Place], places: Sequence[Place]) -> NDArray[np.int32]:
    """(N,) int32: the device of each op under a device map, made here or elsewhere.

    An op of a unit is where the map has its module; where the units of one class are apart, which a map of another's
    making may have, the ops that no module of the map owns are with the first of them.

    Args:
        graph: of the model that the map is of.
        entries: the map.
        places: what the map calls each device of the host.

    Raises:
        InvalidValue: a module that the map does not place, or a place that is no device.
    """
    classes = ModuleClasses(graph)
    where = {place: device for device, place in reversed(list(enumerate(places)))}

    def device_of(name: str) -> int:
        path = name
        while path not in entries and path:
            path = path.rpartition(".")[0]
        if path not in entries:  # it may be finer than what must be whole here
            path = next((entry for entry in entries if entry.startswith(f"{name}.")), "")
        if path not in entries:
            raise InvalidValue("device map", f"nothing for {name!r}", "every module in it, or one above")
        if entries[path] not in where:
            raise InvalidValue(
                "device map", entries[path], f"one of {', '.join(map(str, dict.fromkeys(places)))}", where=path
            )
        return where[entries[path]]

    entry_device = {name: device_of(name) for name in classes.entry_class}
    class_device = np.zeros(classes.num_classes, dtype=np.int32)
    for name, number in reversed(list(classes.entry_class.items())):
        class_device[number] = entry_device[name]
    devices = np.where(classes.op_class >= 0, class_device[classes.op_class], 0).astype(np.int32)
    units = classes.tree.unit_of()
    is_tied = np.isin(np.arange(graph.num_ops), np.flatnonzero(graph.colocation >= 0))
    for op, path in enumerate(graph.modules):
        unit = units.get(path)
        if unit in entry_device and (not is_tied[op] or graph.is_resident[op]):
            devices[op] = entry_device[unit]
    leaders: dict[int, int] = {}  # what lives with a parameter is where that is
    for op in sorted(np.flatnonzero(is_tied).tolist(), key=lambda op: (not graph.is_resident[op], op)):
        devices[op] = devices[leaders.setdefault(int(graph.colocation[op]), op)]
    return devices


def families(model: nn.Module, room: dict[int, int]) -> dict[str, DeviceMap]:
    """The maps that accelerate makes of `room` bytes on each GPU."""
    return {name: inferred(model, balanced(model, room, name)) for name in FAMILY}


def balanced(model: nn.Module, room: dict[int, int], name: str) -> dict[int, int]:
    """What accelerate lets each GPU hold."""
    from accelerate.utils import get_balanced_memory

    if name == "sequential":
        return dict(room)
    kept: dict[int, int] = get_balanced_memory(
        model, dict(room), no_split_module_classes=unsplit(model), low_zero=name == "balanced_low_0"
    )
    return kept


def inferred(model: nn.Module, room: dict[int, int]) -> DeviceMap:
    """accelerate's own map for `room` bytes on each GPU."""
    from accelerate import infer_auto_device_map

    found: DeviceMap = infer_auto_device_map(model, dict(room), no_split_module_classes=unsplit(model))
    return found


def unsplit(model: nn.Module) -> list[str]:
    return sorted(getattr(model, "_no_split_modules", None) or ())


def closest(
    model: nn.Module, room: dict[int, int], full: int, measured: Callable[[DeviceMap], Measurement]
) -> tuple[DeviceMap, Measurement, dict[int, int]] | None:
    """The first map that fits as the first GPU may hold more than under `balanced`, or less where that one is full."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    begin = balanced(model, room, "balanced")
    for step in range(SHARES + 1):
        own = begin[0] + (step if full else -step) * size // SHARES
        asked = {0: max(min(own, room[0]), 0), 1: begin[1]}
        entries = inferred(model, asked)
        if set(entries.values()) - {0, 1}:
            continue
        measurement = measured(entries)
        if measurement.ok:
            return entries, measurement, asked
    return None


def compare(name: str, evaluations: int, seed: int) -> list[dict[str, Any]]:
    """One workload's rows."""
    host = resolve_host(HOST)
    workload = build_for(parse_workload(name), host, seed)
    graph = gradients_kept(capture_workload(workload))
    problem = Problem.estimate(graph, host, grouping="device-map")
    simulator, places = Simulator(problem), map_places(host)
    plain = Simulator(dataclasses.replace(problem, graph=graph))  # accelerate's maps need not keep to our classes

    def measured(entries: DeviceMap) -> Measurement:
        return plain.measure(map_devices(graph, entries, places)[None])[0]

    found = find(problem, "portfolio", simulator, Budget(evaluations=evaluations), seed=seed)
    ours = device_map(graph, project(problem, found.devices), places)
    room = {number: device.memory_bytes - device.context_bytes for number, device in enumerate(host.devices)}
    rows = [row("learned", ours, measured(ours), graph)]
    rows[0]["searched_step_s"] = found.step_time_s
    for device in range(host.num_devices):
        everything = plain.measure(np.full((1, graph.num_ops), device, dtype=np.int32))[0]
        rows.append(row(f"all on {host.devices[device].name}", {"": device}, everything, graph))
    for family, entries in families(workload.model, room).items():
        if set(entries.values()) - {0, 1}:
            rows.append({"map": family, "status": "spills", "why": "leaves modules to the CPU", "device_map": entries})
            continue
        measurement = measured(entries)
        rows.append(row(family, entries, measurement, graph))
        if family == "balanced" and not measurement.ok:
            over = [
                peak > device.memory_bytes for peak, device in zip(measurement.peak_bytes, host.devices, strict=True)
            ]
            fitting = closest(workload.model, room, int(np.argmax(over)), measured)
            if fitting is not None:
                entries, measurement, asked = fitting
                rows.append(
                    row("the closest to balanced that fits", entries, measurement, graph) | {"max_memory": asked}
                )
    for each in rows:
        each |= {"workload": name, "num_ops": graph.num_ops}
    return rows


def row(name: str, entries: DeviceMap, measurement: Measurement, graph: OpGraph) -> dict[str, Any]:
    return {
        "map": name,
        "status": measurement.status,
        "why": measurement.why,
        "step_time_s": measurement.step_time_s if measurement.ok else None,
        "peak_bytes": list(measurement.peak_bytes),
        "device_map": entries,
        "parameters": parameters_on(graph, entries),
    }


def parameters_on(graph: OpGraph, entries: DeviceMap) -> list[int]:
    """Bytes of parameters on each GPU."""
    devices: NDArray[np.int32] = map_devices(graph, entries, (0, 1))
    return [int(graph.parameter_bytes[devices == device].sum()) for device in (0, 1)]


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    host = resolve_host(HOST)
    names = " | ".join(f"peak on {device.name}, GiB of {device.memory_bytes / 2**30:.1f}" for device in host.devices)
    text = [
        "# Device maps: learned, and made by accelerate\n\n",
        as_markdown(facts),
        f"\nOn `{HOST}`, simulated with estimated costs, Adam, float32, whole batches; gradients stay until the end\n"
        "of the step, as in an ordinary loop. `learned` is `portfolio` over modules, as `rlplace export --format\n"
        "device_map` writes it, and read back from there. `balanced`, `balanced_low_0` and `sequential` are\n"
        "`get_balanced_memory` and `infer_auto_device_map` of accelerate with the memory of the two GPUs: they count\n"
        "parameters alone. Where `balanced` does not fit, the closest map of the family that does lets the first GPU\n"
        f"hold more (or less, where that is the full one), as its users do it with `max_memory`, by 1/{SHARES} of the\n"
        "parameters at a time.\n",
    ]
    for workload in dict.fromkeys(each["workload"] for each in rows):
        of = [each for each in rows if each["workload"] == workload]
        best = of[0]["step_time_s"]
        text.append(f"\n`{workload}`, {of[0]['num_ops']:,} ops:\n\n")
        text.append(
            f"| map | step, ms | learned / it | {names} | parameters on each, GiB |\n|---|---|---|---|---|---|\n"
        )
        for each in of:
            if each["status"] == "spills":
                text.append(f"| {each['map']} | {each['why']} | | | | |\n")
                continue
            step = f"{each['step_time_s'] * 1e3:.1f}" if each["step_time_s"] else each["status"]
            ratio = f"{best / each['step_time_s']:.3f}" if best and each["step_time_s"] else ""
            peaks = " | ".join(f"{peak / 2**30:.2f}" for peak in each["peak_bytes"])
            held = ", ".join(f"{size / 2**30:.2f}" for size in each["parameters"])
            text.append(f"| {each['map']} | {step} | {ratio} | {peaks} | {held} |\n")
    return "".join(text)


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--evaluations", type=int, default=3000),
        argument("--seed", type=int, default=0),
        argument("--dry", action="store_true", help="print the table, and keep nothing"),
    )
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "hf")
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it says of each GPU that this machine lacks it
    facts = record("accelerate", "transformers")
    rows = [each for name in options.workloads for each in compare(name, options.evaluations, options.seed)]
    text = markdown(rows, facts)
    print(text)
    if not options.dry:
        save("device_maps", {"schema": 1, **facts, "host": HOST, "rows": rows}, text)


if __name__ == "__main__":
    main()
