"""Steps over processes, a GPU each: NCCL carries tensors between them, and the losses are those of threads.

On cores, gloo carries them. The other ranks are processes that run this file: HOST RANK DESCRIPTORS.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gpu_stages.subject import Subject, subject
from gpu_stages.verdict import Verdict
from rlplace.measure import Plan, resolve_host
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.distributed import Wires, connect, store_in
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankCrew, RankResidents, serve_rank
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.isolate.isolated_runner import IsolatedRunner
from rlplace.measure.isolate.lifeline import end_with
from rlplace.measure.timing.race import RaceProtocol

NUM_PLANS, NUM_STEPS, NUM_TIMED = 3, 3, 20
MOST_REL_DIFF = 1e-5
"""Of losses on GPUs, where sums of embeddings' gradients have no order."""


def run(host_word: str) -> Verdict:
    host = resolve_host(host_word)
    if host.num_devices < 2:
        return Verdict("skipped", f"{host.name} has one device: a step over processes needs two GPUs")
    placed = _subject(host_word)
    plans = placed.draw_plans(NUM_PLANS)
    crew = Crew(host.devices)
    try:
        threads = [_losses_and_s(placed, plan, Residents(placed.graph, host), crew) for plan in plans]
    finally:
        crew.stop()
    with _ranks(placed, host_word) as ranks:
        processes = [_losses_and_s(placed, plan, RankResidents(placed.graph, host, ranks), ranks) for plan in plans]
    pairs = [(a, b) for (some, _), (other, _) in zip(threads, processes, strict=True) for a, b in zip(some, other)]
    difference = max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    runner = IsolatedRunner(placed.problem, placed.simulator)
    try:
        protocol = RaceProtocol(warmup=1, min_rounds=3, max_rounds=3, hopeless=1e9, num_traced=1)
        measured = runner.measure_plans(plans, protocol=protocol)
    finally:
        runner.close()
    failed = [each.why for each in measured if not each.ok]
    of_threads, of_processes = (statistics.median(s for _, s in each) * 1e3 for each in (threads, processes))
    line = f"{NUM_PLANS} random placements on {host.num_devices} devices: losses differ by {difference:.1e}; "
    line += f"a step takes {of_processes:.2f} ms over processes, {of_threads:.2f} ms over threads; "
    line += f"measured: {len(measured) - len(failed)} of {len(measured)}{f' ({failed[0]})' if failed else ''}"
    most = MOST_REL_DIFF if host.devices[0].backend == "cuda" else 0.0
    return Verdict.of(difference <= most and not failed, line, transfers=[plan.num_transfers for plan in plans])


def _subject(host_word: str) -> Subject:
    torch.manual_seed(0)  # each process makes the same parameters
    return subject(host_word)


def _losses_and_s(placed: Subject, plan: Plan, residents: Residents, crew: Crew) -> tuple[list[float], float]:
    """Losses of the first steps, and the seconds of a later one."""
    residents.reset()
    step, losses = PlacedStep(placed.graph, placed.host, plan, residents, crew), []
    for number in range(NUM_STEPS):
        step.run(number, deadline_s=60.0)
        losses.append(float(step.result))
    seconds = statistics.median(step.run(number, deadline_s=60.0) for number in range(NUM_STEPS, NUM_TIMED))
    step.unload()
    return losses, seconds


def _wires(placed: Subject, rank: int, store: int) -> Wires:
    return connect(placed.host, rank, store_in(store, placed.host.num_devices))


@contextmanager
def _ranks(placed: Subject, host_word: str) -> Iterator[RankCrew]:
    """A crew whose devices but the first are processes."""
    count = placed.host.num_devices
    with ExitStack() as ends:
        arena, store = Arena.new(count), os.memfd_create("rlplace")
        ends.callback(arena.close)
        ends.callback(os.close, store)
        alive, lifeline = os.pipe()
        pairs = [socket.socketpair() for _ in range(1, count)]
        others = []
        for rank, (_, theirs) in enumerate(pairs, start=1):
            files = (arena.file, store, theirs.fileno(), alive)
            words = [sys.executable, "-m", "gpu_stages.processes", host_word, str(rank), *map(str, files)]
            others.append(subprocess.Popen(words, pass_fds=files, cwd=Path(__file__).parents[1]))
            ends.callback(others[-1].wait)
            theirs.close()
        os.close(alive)
        ends.callback(os.close, lifeline)  # which ends them
        crew = RankCrew(
            placed.host,
            arena,
            links=[ends.enter_context(Connection(ours.detach())) for ours, _ in pairs],
            wires=_wires(placed, 0, store),
        )
        ends.callback(crew.stop)
        yield crew


def main(host_word: str, rank: int, arena: int, store: int, link: int, alive: int) -> None:
    """The process of another rank."""
    end_with(alive)
    placed = _subject(host_word)
    serve_rank(placed.graph, placed.host, rank, Arena(arena), Connection(link), wires=_wires(placed, rank, store))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
