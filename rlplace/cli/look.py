"""`rlplace hosts` and `rlplace workloads`: what there is to place, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tyro

from rlplace.cli.arguments import print_json, say


def hosts(name: tyro.conf.Positional[str] = "", json: bool = False) -> None:
    """List the host presets, or show one host.

    Args:
        name: a preset, `auto`, `cores` or a host file; empty lists the presets
        json: print one JSON object on stdout
    """
    from rlplace.measure.hosts.resolve import describe_hosts, resolve_host

    if name:
        host = resolve_host(name)
        if json:
            print_json({"schema": 1, "fingerprint": host.fingerprint, **host.to_dict()})
            return
        for device in host.devices:
            say(f"{device.name:12} {device.kind:28} {device.memory_bytes / 2**30:8.1f} GiB")
        for link in host.links:
            say(f"{link.name:28} {link.bandwidth_bytes_per_s / 1e9:8.1f} GB/s {link.latency_s * 1e6:8.1f} us")
        return
    rows = describe_hosts()
    if json:
        print_json({"schema": 1, "hosts": rows})
        return
    for row in rows:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in dict(row["kinds"]).items())  # type: ignore[call-overload]
        say(f"{row['name']:18} {kinds}")


def workloads(json: bool = False) -> None:
    """List the named workloads: their sizes, options, and counts of ops and edges of a training step.

    Args:
        json: print one JSON object on stdout
    """
    from rlplace.workloads import describe_workloads

    rows = describe_workloads()
    if json:
        print_json({"schema": 1, "workloads": rows})
        return
    for row in rows:
        if row["problem"]:
            say(f"{row['name']:13} {row['problem']}")
            continue
        for size in ("small", "paper"):
            options = ",".join(f"{key}={str(value).lower()}" for key, value in row[size].items())
            counts = row["counts"].get(size)
            counted = f"{counts['num_ops']:7,} ops {counts['num_edges']:7,} edges" if counts else f"{'not counted':>25}"
            say(f"{row['name']:13} {size:6} {counted}  {options}")
        if not row["is_installed"]:
            say(f"{'':13} needs pip install 'rlplace[{row['extra']}]'")
    say("several as one: multi:NAME[@...][*WEIGHT],NAME,...; your own: package.module:function, or a graph file")


COMMANDS: dict[str, Callable[..., Any]] = {"hosts": hosts, "workloads": workloads}
