"""HOST words: `resolve_host` for this machine's devices, a preset or a file; `check_runs_here` for a host to run on."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rlplace.errors import InvalidValue, UnknownName, refuse_if
from rlplace.measure.hosts.control_groups import free_bytes
from rlplace.measure.hosts.host import Device, Host, HostKind
from rlplace.measure.hosts.host_file import ENDINGS, load_host
from rlplace.measure.hosts.nodes import check_machines, is_here
from rlplace.measure.timing.threads import usable_cores
from rlplace.records import Described
from rlplace.say import format_bytes

PRESETS = Path(__file__).with_name("presets")

HOST_WORDS = {
    "auto": "this machine: its GPUs, else its cores",
    "cores": "the cores of its CPU, a device each, at most 4",
    "cores:2x4": "2 devices of 4 cores each",
    "procs:2": "2 of its cores, a process each; also procs, procs:2x4",
    "cuda": "its GPUs",
    "cuda/4": "each GPU as 4 devices, cuda:0/0 to cuda:0/3, with a quarter of its memory each",
    "cuda+cpu": "its GPUs, and its CPU as one more device; also cuda/2+cpu, auto+cpu",
    "cuda-procs": "its GPUs, a process each",
    "nodes": "all machines on which torchrun runs this command, a device for each of its processes",
}
"""Words for this machine, those with numbers as examples of their kind, and their meaning."""

AS_PROCESSES = "-procs"
"""The end of words for hosts whose devices are processes: `cuda-procs`, `4xV100-pcie-procs`."""

_GPUS = re.compile(r"(?P<kind>auto|cuda-procs|cuda(?:/(?P<parts>[1-9][0-9]{0,3}))?)(?P<cpu>\+cpu)?\Z")
_CORES = re.compile(r"(?P<kind>cores|procs)(?::(?P<devices>[1-9][0-9]{0,3})(?:x(?P<cores>[1-9][0-9]{0,3}))?)?\Z")

_CORE_WORDS = tuple(f"{kind}{sign}" for kind in ("cores", "procs") for sign in ":/+")
_HERE = (*_CORE_WORDS, "cuda", "auto+", "auto/")
"""How words for this machine begin that may hold a slash."""


def list_presets() -> tuple[str, ...]:
    """Names of the presets, sorted; each also with `AS_PROCESSES` behind it."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


def resolve_host(text: str | Host, *, gangs: bool = False) -> Host:
    """The host of a HOST word; a `Host` is returned unchanged.

    Args:
        text: `auto` (this machine: its GPUs, else its cores), `cores`, `cores:2` (two devices of one core), `cores:2x4`
            (two devices of four cores), `cuda` (its GPUs), `cuda/4` (each GPU as four devices), `auto+cpu`, `cuda+cpu`,
            `cuda/4+cpu` (the CPU as one more device), a preset, or the path of a host file. A process for each device:
            `procs`, `procs:2`, `procs:2x4`, `cuda-procs`, a preset with `-procs` behind its name; `nodes` (under
            torchrun).
        gangs: Whether the cores of this machine may also work as gangs; presets and files define this themselves.

    Raises:
        UnknownName: No host has this name.
        InvalidValue: Neither a word nor a host; a malformed `cores:...` or `cuda...`; devices that this machine lacks;
            or a host file with a wrong value.
        FileProblem: A host file that is missing or malformed.
    """
    if isinstance(text, Host):
        return text
    if not isinstance(text, str):
        raise InvalidValue("host", text, "a word such as `auto` or `cores`, or a `Host`")
    if text in list_presets():
        return load_host(PRESETS / f"{text}.yaml")
    if text.removesuffix(AS_PROCESSES) in list_presets():
        return resolve_host(text.removesuffix(AS_PROCESSES)).as_processes(text)
    if is_host_file(text):
        return load_host(text)
    refuse_if(
        AS_PROCESSES in text and text.startswith(("cores", "auto-")),
        "host",
        text,
        f"`procs{text.replace(AS_PROCESSES, '').removeprefix('cores').removeprefix('auto')}`",
        hint="`procs` is `cores` with a process for each device; `cuda-procs` is so of `cuda`.",
    )
    if _GPUS.match(text) or text in ("cores", "procs", "nodes") or text.startswith(_CORE_WORDS):
        return _detect(text, gangs)
    refuse_if(
        text.startswith(("cuda", "auto+", "auto/")),
        "host",
        text,
        "auto, cuda or cuda/PARTS (PARTS from 1), each with +cpu or without, e.g. cuda/2+cpu; or cuda-procs",
        hint="The environment variable CUDA_VISIBLE_DEVICES says which GPUs PyTorch sees.",
    )
    refuse_if(
        text == "cpu",
        "host",
        text,
        "`cores`",
        hint="`cores` is every core of this machine as a device, `cores:2` two of them.",
    )
    presets = list_presets()
    raise UnknownName("host", text, (*HOST_WORDS, *presets, *(name + AS_PROCESSES for name in presets)))


def is_host_file(text: str) -> bool:
    """Whether a HOST word is the path of a host file; no file is looked for.

    >>> is_host_file("mine.yaml"), is_host_file("hosts/mine"), is_host_file("cuda/2")
    (True, True, False)
    """
    return text.endswith(ENDINGS) or (os.sep in text and not text.startswith(_HERE))


def describe_hosts() -> list[dict[str, Any]]:
    """One row for each preset, as `rlplace hosts` lists them; `Host.to_dict` has all the facts of one.

    Keys: `name`, `num_devices`, `kinds` (how many of each), `memory_bytes` (of each device), `num_links`,
    `slowest_route_bytes_per_s`, `fastest_route_bytes_per_s` and `simulated`.
    """
    return [_row(resolve_host(name)) for name in list_presets()]


def _detect(text: str, gangs: bool) -> Host:
    from rlplace.measure.hosts.detect import detect_host

    if text == "nodes":
        return detect_host("nodes")
    found = _GPUS.match(text)
    if found is not None:
        kind = cast("HostKind", found["kind"].partition("/")[0])
        return detect_host(kind, gangs=gangs, num_parts=int(found["parts"] or 1), with_cpu=found["cpu"] is not None)
    match = _CORES.match(text)
    if match is None:
        raise InvalidValue("host", text, "{0}, {0}:DEVICES or {0}:DEVICESxCORES, e.g. {0}:2x4".format(text[:5]))
    num_devices, cores_per_device = (int(part) if part else None for part in match.group("devices", "cores"))
    kind = cast("HostKind", match["kind"])
    return detect_host(kind, num_devices=num_devices, cores_per_device=cores_per_device, gangs=gangs)


def _row(host: Host) -> dict[str, Any]:
    bandwidth = {link.name: link.bandwidth_bytes_per_s for link in host.links}
    rates = [min(bandwidth[name] for name in route.links) for route in host.routes if route.links]
    return {
        "name": host.name,
        "num_devices": host.num_devices,
        "kinds": dict(Counter(device.kind for device in host.devices)),
        "memory_bytes": [device.memory_bytes for device in host.devices],
        "num_links": len(host.links),
        "slowest_route_bytes_per_s": min(rates, default=0.0),
        "fastest_route_bytes_per_s": max(rates, default=0.0),
        "simulated": host.is_simulated,
    }


HINT = (
    "Use a host of this machine (`auto`, `cores`, `cuda`); to simulate this one, set `backend: simulated` on its "
    "devices."
)


def check_present(host: Host) -> None:
    """Refuses a host that is not simulated and has a device that this machine lacks, before anything is run on it.

    Raises:
        InvalidValue: a GPU that PyTorch does not see, one that is there both whole and in parts, a core that this
            process may not use, or processes that are neither cores nor whole GPUs,
            a machine on which torchrun runs no process, or more processes than there are cores or memory for.
    """
    if host.is_simulated:
        return
    where = f"host {host.name!r}"
    kinds = {"part of a GPU" if "/" in device.local_name else device.backend for device in host.devices}
    refuse_if(
        host.processes and kinds not in ({"cpu"}, {"cuda"}),
        "processes",
        True,
        "false: a step runs over processes of cores, or of whole GPUs",
        where=where,
        hint="Use `cuda`; to simulate this host, set `backend: simulated` on its devices.",
    )
    check_machines(host, where=where)
    if host.processes:
        _check_room([each for each in host.devices if not each.machine], where)  # torchrun has started the others
    for device in filter(is_here, host.devices):
        if device.backend == "cuda":
            _check_gpu(device, host, where)
        if missing := sorted(set(device.cores) - set(usable_cores())):
            raise InvalidValue(
                f"cores of device {device.name!r}",
                missing,
                f"cores that this process may use ({', '.join(map(str, usable_cores()))})",
                where=where,
                hint=HINT,
            )


def check_runs_here(host: Host, *, where: str = "measure", instead: str = "simulate instead") -> None:
    """Refuses a host that is not of this machine, before anything is run on it.

    Args:
        host: every device of it has to be here.
        where: the thing to run, for messages.
        instead: the use of a simulated host, for messages.

    Raises:
        InvalidValue: it is simulated, or has a device that this machine lacks.
    """
    refuse_if(
        host.is_simulated,
        "host",
        host.name,
        "a host of this machine (`auto`, `cores`, `procs`, `cuda`)",
        where=where,
        hint=f"A simulated host has no devices to run on: {instead}.",
    )
    check_present(host)


PROCESS_BYTES = 300 << 20
"""Memory of a process that has imported PyTorch and holds no tensor yet, about."""


def _check_room(devices: Sequence[Device], where: str) -> None:
    """Refuses more processes than this machine has room for: a stranger's folder may name any number of them."""
    counts = Counter(core for device in devices for core in device.cores)
    shared = sorted(core for core, count in counts.items() if count > 1)
    refuse_if(shared, "cores", shared, "no core of two processes", where=where, hint=HINT)
    needed, free = len(devices) * PROCESS_BYTES, free_bytes()
    refuse_if(
        needed > free,
        "devices",
        Described(f"{len(devices)} processes, which take {format_bytes(needed)}"),
        f"what the {format_bytes(free)} of free memory have room for",
        where=where,
        hint=HINT,
    )


def _check_gpu(device: Device, host: Host, where: str) -> None:
    from rlplace import cuda

    count, parsed = cuda.num_gpus(), cuda.parse_name(device.local_name)
    if parsed is None or parsed[0] >= count:
        seen = ", ".join(f"cuda:{index}" for index in range(count)) or "PyTorch sees none here"
        raise InvalidValue("device", device.name, f"a CUDA device of this machine ({seen})", where=where, hint=HINT)
    whole = f"cuda:{parsed[0]}"
    refuse_if(
        device.local_name != whole and whole in host.device_index,
        "device",
        device.name,
        f"no part of {whole!r}, which is a device too",
        where=where,
        hint="Both would count the same memory: name its parts alone (`cuda/2`).",
    )
