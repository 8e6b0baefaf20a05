"""Ranks as threads of one process: the memory, signals and messages are those of processes, and start at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from multiprocessing import Pipe

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.rank_processes import RankCrew, serve_rank
from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.hosts.host import Host


@contextlib.contextmanager
def rank_threads(graph: OpGraph, host: Host, *, seed: int = 0) -> Iterator[RankCrew]:
    """A crew whose devices but the first are served by other threads."""
    arena = Arena.new(host.num_devices)
    links = [Pipe() for _ in host.devices[1:]]
    threads = [
        threading.Thread(
            target=serve_rank, args=(graph, host, rank, Arena(arena.file), theirs), kwargs={"seed": seed}, daemon=True
        )
        for rank, (_, theirs) in enumerate(links, start=1)
    ]
    for thread in threads:
        thread.start()
    crew = RankCrew(host, arena, links=[ours for ours, _ in links])
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
        arena.close()
