"""Whether the machines on which torchrun runs a command can work together: one check in which every rank takes part."""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlplace.doctor.system import Check, Finding, System, first_of
from rlplace.measure.hosts.nodes import Nodes, accept_all, join, under_torchrun
from rlplace.say import counted, format_bytes, format_seconds

CONNECTS_WITHIN_S = 5.0
PINGS = 20
CLOCKS_APART_S = 1.0
_TIME = struct.Struct("!d")


def check_machines(system: System) -> Iterator[Finding]:
    """Of all machines of torchrun: their interfaces and versions, whether they reach each other, links and clocks."""
    if not under_torchrun():
        yield Finding("machines", "ok", "this one alone; under torchrun, all that work together are looked at")
        return
    from rlplace.measure.profiling.machine_links import measured_links

    nodes = join()
    rows = look_at_machines(nodes)
    yield _interfaces(nodes)
    yield _versions(nodes)
    unreached = [row for row in rows if row["why"]]
    yield _reached(rows, unreached)
    if rows and not unreached:
        yield _clocks(rows)
        for (source, destination), each in measured_links(nodes).items():
            found = (
                f"{format_seconds(each.latency_s)}, {format_bytes(int(each.bandwidth_bytes_per_s))}/s; "
                f"{format_bytes(int(each.both_bytes_per_s))}/s while the other direction is used as well"
            )
            yield Finding(f"link {source} to {destination}", "ok", found)


MACHINES = Check("machines", check_machines)


def look_at_machines(nodes: Nodes) -> list[dict[str, Any]]:
    """What each machine found of each other one; all ranks must call this.

    Keys: `source`, `destination`, `address`, `why` (empty: it was reached), `round_trip_s`, and `ahead_s`, the time by
    which the clock of the destination is ahead.
    """
    is_first = nodes.local_rank == 0
    family = socket.AF_INET6 if ":" in nodes.address else socket.AF_INET
    with socket.create_server((nodes.address, 0), family=family) if is_first else socket.socket() as server:
        port = server.getsockname()[1] if is_first else 0
        ports = nodes.gather("doctor/ports", port)
        if is_first:
            threading.Thread(target=accept_all, args=(server, _echo), daemon=True).start()
        others = [rank for rank, each in enumerate(nodes.facts) if ports[rank] and each.machine != nodes.machine]
        rows = [_look(nodes, rank, ports[rank]) for rank in others] if is_first else []
        return [row for found in nodes.gather("doctor/rows", rows) for row in found]


def _echo(connection: socket.socket, _: Callable[[], None]) -> None:
    """Answers every byte with this machine's time."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(CONNECTS_WITHIN_S)
        while connection.recv(1):
            connection.sendall(_TIME.pack(time.time()))


def _look(nodes: Nodes, rank: int, port: int) -> dict[str, Any]:
    there = nodes.facts[rank]
    row: dict[str, Any] = {"source": nodes.machine, "destination": there.machine, "address": f"{there.address}:{port}"}
    trips_s, ahead_s = list[float](), list[float]()
    try:
        with socket.create_connection((there.address, port), CONNECTS_WITHIN_S, (nodes.address, 0)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                begin_s, begin = time.time(), time.perf_counter()
                connection.sendall(b"?")
                (told_s,) = _TIME.unpack(connection.recv(_TIME.size, socket.MSG_WAITALL))
                trips_s.append(time.perf_counter() - begin)
                ahead_s.append(told_s - begin_s - trips_s[-1] / 2)
    except (OSError, struct.error) as error:
        return row | {"why": str(error) or type(error).__name__, "round_trip_s": None, "ahead_s": None}
    return row | {"why": "", "round_trip_s": statistics.median(trips_s), "ahead_s": statistics.median(ahead_s)}


def _interfaces(nodes: Nodes) -> Finding:
    firsts = [nodes.facts[nodes.ranks_of(machine)[0]] for machine in nodes.machines]
    told = ", ".join(
        f"{each.machine}: {counted(each.num_local, 'rank')}, {each.interface} {each.address}" for each in firsts
    )
    return Finding("machines", "ok", told)


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


def _reached(rows: list[dict[str, Any]], unreached: list[dict[str, Any]]) -> Finding:
    if unreached:
        told = "; ".join(
            f"{row['source']} cannot reach {row['destination']} ({row['address']}): {row['why']}" for row in unreached
        )
        remedy = "open all TCP ports between these machines (gloo, NCCL and rlplace listen on ports that are free), or "
        remedy += "name the interface between them on each: GLOO_SOCKET_IFNAME=NAME"
        return Finding("reach", "fail", told, remedy)
    if not rows:
        return Finding("reach", "ok", "one machine")
    slowest = max(rows, key=lambda row: float(row["round_trip_s"]))
    told = f"every machine reaches every other one; there and back in {format_seconds(slowest['round_trip_s'])} at most"
    return Finding("reach", "ok", told)


def _clocks(rows: list[dict[str, Any]]) -> Finding:
    apart_s = max(abs(float(row["ahead_s"])) for row in rows)
    remedy = "logs of these machines are hard to compare: run a time service. Step times do not depend on it"
    return first_of("clocks", f"at most {format_seconds(apart_s)} apart", (apart_s > CLOCKS_APART_S, "warn", remedy))
