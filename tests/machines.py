"""Machines that are processes of this one: this process is rank 0 of torchrun, and others keep workers for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from core_hosts import process_host

from rlplace.measure.hosts import nodes as nodes_module
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.nodes import Nodes, join
from rlplace.measure.hosts.signed_store import SECRET

KEEPER = """
from rlplace.measure.hosts.nodes import join
from rlplace.measure.isolate.keeper import keep
keep(join())
"""
ENDS_WITHIN_S = 60.0


@dataclass(frozen=True)
class Machines:
    """What torchrun started.

    Attributes:
        nodes: of rank 0, this process.
        others: processes of the other ranks.
        host: a core for each rank; those of one machine have a memory in common.
    """

    nodes: Nodes
    others: dict[int, subprocess.Popen[bytes]]
    host: Host


@contextlib.contextmanager
def machines(count: int = 2, *, num_local: int = 1) -> Iterator[Machines]:
    """So many machines with so many ranks each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    facts = {"WORLD_SIZE": count * num_local, "LOCAL_WORLD_SIZE": num_local, "MASTER_ADDR": "127.0.0.1"}
    path = os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as ends:
        for name, value in {**facts, "MASTER_PORT": port, "PYTHONPATH": path, SECRET: ""}.items():
            patch.setenv(name, str(value))
        patch.delenv(SECRET)  # until this process joins, and then until the end
        others = {}
        for rank in range(count * num_local - 1, -1, -1):
            patch.setenv("RANK", str(rank))
            patch.setenv("GROUP_RANK", str(rank // num_local))
            patch.setenv("LOCAL_RANK", str(rank % num_local))
            if rank:
                others[rank] = subprocess.Popen([sys.executable, "-c", KEEPER])
                ends.callback(others[rank].wait, ENDS_WITHIN_S)
        patch.setattr(nodes_module, "_JOINED", [])
        nodes = join()
        ends.callback(nodes.end)
        yield Machines(nodes, others, host_of(nodes))


def host_of(nodes: Nodes) -> Host:
    """`cpu:0`, `cpu:1`, ..., one for each rank."""
    host = process_host(nodes.num_ranks)
    apart = zip(host.devices, nodes.facts, strict=True)
    return replace(
        host,
        name="nodes",
        devices=tuple(replace(each, memory_pool=facts.machine, machine=facts.machine) for each, facts in apart),
    )
