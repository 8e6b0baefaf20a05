"""Ranks of torchrun that are not there: their facts, and threads in place of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import HashStore

from rlplace.measure.hosts.nodes import Nodes, RankFacts


def facts_of(machines: Sequence[str], **options: Any) -> tuple[RankFacts, ...]:
    """Facts of a rank for each name of a machine, a core each."""
    facts = []
    for rank, machine in enumerate(machines):
        local_rank = machines[:rank].count(machine)
        given = {
            "address": "127.0.0.1",
            "interface": "lo",
            "num_local": machines.count(machine),
            "cores": (local_rank,),
            "ram_bytes": 1 << 30,
            "cpu": "Some CPU",
            "versions": {"torch": "2.9"},
        }
        facts.append(RankFacts(machine=machine, local_rank=local_rank, **given | options))
    return tuple(facts)


def nodes_of(facts: Sequence[RankFacts]) -> list[Nodes]:
    """Each rank, as it sees the others."""
    store = HashStore()
    return [
        Nodes(
            rank,
            len(facts),
            each.local_rank,
            each.num_local,
            each.machine,
            each.address,
            each.interface,
            store,
            b"secret",
            tuple(facts),
        )
        for rank, each in enumerate(facts)
    ]


def at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that run beside each other; raises the first error."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
