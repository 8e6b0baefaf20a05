"""Whether the machines on which torchrun runs a command can work together: one check in which every rank takes part."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from rlplace.doctor.system import Check, Finding, System, first_of
from rlplace.measure.hosts.nodes import Nodes, join, under_torchrun
from rlplace.say import counted, format_bytes, format_seconds

CONNECTS_WITHIN_S = 5.0


def check_machines(system: System) -> Iterator[Finding]:
    """Of all machines of torchrun: their interfaces and versions, whether they reach each other, and their links."""
    if not under_torchrun():
        yield Finding("machines", "ok", "this one alone; under torchrun, all that work together are looked at")
        return
    from rlplace.measure.profiling.machine_links import measured_links

    nodes = join()
    unreached = look_at_machines(nodes)
    firsts = [nodes.facts[nodes.ranks_of(machine)[0]] for machine in nodes.machines]
    ranks = (f"{each.machine}: {counted(each.num_local, 'rank')}, {each.interface} {each.address}" for each in firsts)
    yield Finding("machines", "ok", ", ".join(ranks))
    yield _versions(nodes)
    remedy = "open all TCP ports between these machines (gloo, NCCL and rlplace listen on ports that are free), or "
    remedy += "name the interface between them on each: GLOO_SOCKET_IFNAME=NAME"
    told = "; ".join(
        f"{row['source']} cannot reach {row['destination']} ({row['address']}): {row['why']}" for row in unreached
    )
    yield first_of("reach", told or "every machine reaches every other one", (bool(told), "fail", remedy))
    if len(nodes.machines) > 1 and not unreached:
        for (source, destination), each in measured_links(nodes).items():
            found = (
                f"{format_seconds(each.latency_s)}, {format_bytes(int(each.bandwidth_bytes_per_s))}/s; "
                f"{format_bytes(int(each.both_bytes_per_s))}/s while the other direction is used as well"
            )
            yield Finding(f"link {source} to {destination}", "ok", found)


MACHINES = Check("machines", check_machines)


def look_at_machines(nodes: Nodes) -> list[dict[str, Any]]:
    """What machine does not reach which: `source`, `destination`, `address`, `why`; all ranks must call this."""
    is_first = nodes.local_rank == 0
    family = socket.AF_INET6 if ":" in nodes.address else socket.AF_INET
    with socket.create_server((nodes.address, 0), family=family) if is_first else socket.socket() as server:
        ports = nodes.gather("doctor/ports", server.getsockname()[1] if is_first else 0)
        others = [rank for rank, each in enumerate(nodes.facts) if ports[rank] and each.machine != nodes.machine]
        rows = [row for rank in others if (row := _unreached(nodes, rank, ports[rank]))] if is_first else []
        # the servers are open until every machine has answered: the system connects what nobody has accepted
        return [row for found in nodes.gather("doctor/rows", rows) for row in found]


def _unreached(nodes: Nodes, rank: int, port: int) -> dict[str, Any] | None:
    """Why this machine does not reach that of another rank; None where it does."""
    there = nodes.facts[rank]
    try:
        socket.create_connection((there.address, port), CONNECTS_WITHIN_S, (nodes.address, 0)).close()
    except OSError as error:
        why = str(error) or type(error).__name__
        row = {"source": nodes.machine, "destination": there.machine, "address": f"{there.address}:{port}"}
        return row | {"why": why}
    return None


def _versions(nodes: Nodes) -> Finding:
    by_machine = {each.machine: each.versions for each in nodes.facts}
    by_package = {
        name: {machine: versions.get(name, "none") for machine, versions in by_machine.items()}
        for name in nodes.facts[0].versions
    }
    told = "; ".join(
        f"{name}: {', '.join(f'{machine} has {version}' for machine, version in found.items())}"
        for name, found in by_package.items()
        if len({*found.values()}) > 1
    )
    same = ", ".join(f"{name} {version}" for name, version in nodes.facts[0].versions.items())
    return first_of("versions", told or f"{same} on every machine", (bool(told), "fail", "install the same on all"))
