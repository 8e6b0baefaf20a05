"""Ranks as threads of one process: the memory, signals and messages are those of processes, and start at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.distributed import Wires
from rlplace.measure.execute.rank_processes import RankCrew, serve_rank
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.hosts.host import Host


@contextlib.contextmanager
def rank_threads(
    graph: OpGraph, host: Host, *, seed: int = 0, wires: Callable[[int], Wires] | None = None
) -> Iterator[RankCrew]:
    """A crew whose devices but the first are served by other threads.

    Args:
        graph: with its program.
        host: its devices.
        seed: of values that the graph does not hold.
        wires: of a rank, which it makes together with all others; by default tensors go through slots.
    """
    arenas = {machine: Arena.new(host.num_devices) for machine in {device.machine for device in host.devices}}
    arena = arenas[host.devices[0].machine]
    links = [Pipe() for _ in host.devices[1:]]

    def serve(rank: int, link: Connection[Any, Any]) -> None:
        made = None if wires is None else wires(rank)
        own = Arena(arenas[host.devices[rank].machine].file)
        serve_rank(graph, host, rank, own, link, seed=seed, wires=made)

    threads = [
        threading.Thread(target=serve, args=(rank, theirs), name=f"rank {rank}", daemon=True)
        for rank, (_, theirs) in enumerate(links, start=1)
    ]
    for thread in threads:
        thread.start()
    crew = RankCrew(host, arena, links=[ours for ours, _ in links], wires=None if wires is None else wires(0))
    try:
        yield crew
    finally:
        for rank, (ours, _) in enumerate(links, start=1):
            ours.close()
            arena.set_task(rank, -1, 0)
            arena.task_signals(rank)[0].release()
        for thread in threads:
            thread.join(timeout=60)
        crew.stop()
        for each in arenas.values():
            each.close()


def rank_residents(graph: OpGraph, host: Host, crew: RankCrew) -> Residents:
    """Those of all ranks: each has those of its own device."""
    return Residents(graph, host, is_apart=True, ask=crew.ask)
