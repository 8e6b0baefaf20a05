"""A placement that a GPU has no memory for is `oom`; the next one runs, on that GPU too once it has memory again."""

from __future__ import annotations

from gpu_stages.subject import subject
from gpu_stages.verdict import Verdict
from rlplace import cuda
from rlplace.measure import HostRunner, RaceProtocol
from rlplace.measure.execute.device_threads import torch_device

WORKLOAD = "nmt@layers=1,units=256,batch=8,steps=4,vocab=8000"
LIMIT_BYTES = 4 << 20
ONCE = RaceProtocol(warmup=0, min_rounds=1, max_rounds=1)


def run(host_word: str) -> Verdict:
    placed = subject(host_word, WORKLOAD)
    first, last = placed.host.devices[0], placed.host.devices[-1]
    place = torch_device(first)
    if place.type != "cuda":
        return Verdict("skipped", "no GPU on this host: no memory to limit")
    on_first, on_last = placed.plan_on(0), placed.plan_on(placed.host.num_devices - 1)
    runner = HostRunner(placed.problem, placed.simulator)
    cuda.limit_memory(place, LIMIT_BYTES)
    try:
        limited = [runner.measure_plans([plan], protocol=ONCE)[0] for plan in (on_first, on_last)]
    finally:
        cuda.limit_memory(place, cuda.gpu(place.index).memory_bytes)
    (freed,) = runner.measure_plans([on_first], protocol=ONCE)
    runner.close()
    found = [outcome.status for outcome in (*limited, freed)]
    line = f"{first.name} with {LIMIT_BYTES >> 20} MiB: {found[0]}; then {last.name}: {found[1]}; all of {first.name}: "
    line += found[2]
    return Verdict.of(found == ["oom", "ok", "ok"], line, why=[outcome.why for outcome in (*limited, freed)])
