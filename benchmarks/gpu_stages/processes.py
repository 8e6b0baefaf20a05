"""Steps over processes, a GPU each: NCCL carries tensors between them, and the losses are those of threads.

On cores, gloo carries them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from gpu_stages.subject import Subject, subject
from gpu_stages.verdict import Verdict
from rlplace.measure import Plan, resolve_host
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.distributed import connect, store_in
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankCrew
from rlplace.measure.execute.residents import Residents
from rlplace.measure.isolate.fleet import Fleet
from rlplace.measure.isolate.isolated_runner import IsolatedRunner, packed_setup
from rlplace.measure.timing.race import RaceProtocol

NUM_PLANS, NUM_STEPS, NUM_TIMED = 3, 3, 20
MOST_REL_DIFF = 1e-5
"""Of losses on GPUs, where sums of embeddings' gradients have no order."""


def run(host_word: str) -> Verdict:
    host = resolve_host(host_word)
    if host.num_devices < 2:
        return Verdict("skipped", f"{host.name} has one device: a step over processes needs two GPUs")
    # cores without a memory in common, as GPUs are
    placed = subject(replace(host, devices=tuple(replace(device, memory_pool="") for device in host.devices)))
    plans = placed.draw_plans(NUM_PLANS)
    crew = Crew(host.devices)
    try:
        threads = [_losses_and_s(placed, plan, Residents(placed.graph, placed.host), crew) for plan in plans]
    finally:
        crew.stop()
    with _ranks(placed) as ranks:
        residents = Residents(placed.graph, placed.host, is_apart=True, ask=ranks.ask)
        processes = [_losses_and_s(placed, plan, residents, ranks) for plan in plans]
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


@contextmanager
def _ranks(placed: Subject) -> Iterator[RankCrew]:
    """A crew whose devices but the first are processes."""
    count = placed.host.num_devices
    with closing(packed_setup(placed.problem)) as packed, closing(Fleet(packed, placed.host.devices, first=1)) as fleet:
        wires = connect(placed.host, 0, store_in(fleet.store, count))
        fleet.await_ready()
        crew = RankCrew(placed.host, fleet.arena, links=fleet.links, wires=wires)
        try:
            yield crew
        finally:
            crew.stop()
