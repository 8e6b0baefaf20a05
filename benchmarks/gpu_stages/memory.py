"""Peaks of memory: what the simulator says of random placements, and what PyTorch's allocator counts."""

from __future__ import annotations

import gc

import numpy as np
import torch

from gpu_stages.subject import Subject, subject
from gpu_stages.verdict import Verdict
from rlplace import cuda
from rlplace.measure import Plan
from rlplace.measure.execute.device_threads import Crew, torch_device

WORKLOAD = "nmt@layers=2,units=512,batch=64,steps=8,vocab=8000"
NUM_PLANS = 4
RELATIVE, WORKSPACES_BYTES = 0.1, 64 << 20
"""How much more may be counted than simulated: a share, and for each device workspaces of libraries."""


def run(host_word: str) -> Verdict:
    placed = subject(host_word, WORKLOAD)
    crew = Crew(placed.host.devices)  # one for all: libraries take a workspace for every stream that they meet
    try:
        rows = [
            row for plan in (placed.plan_on(0), *placed.draw_plans(NUM_PLANS)) for row in _peaks(placed, plan, crew)
        ]
    finally:
        crew.stop()
    if not rows:
        return Verdict("skipped", "no GPU on this host: nothing counts what it allocates")
    spare_bytes = WORKSPACES_BYTES * placed.host.num_devices
    over = [row for row in rows if row["counted"] > row["simulated"] * (1 + RELATIVE) + spare_bytes]
    ratios = [row["counted"] / row["simulated"] for row in rows if row["simulated"]]
    line = f"{len(rows)} peaks on {placed.host.name}: counted is {min(ratios):.2f} to {max(ratios):.2f} of simulated"
    return Verdict.of(not over, line, peaks=rows)


def _peaks(placed: Subject, plan: Plan, crew: Crew) -> list[dict[str, float]]:
    """Bytes on each GPU: simulated (of parts their sum, an upper bound), and counted over a step."""
    outcome = placed.simulator.retime(plan)
    simulated: dict[torch.device, float] = {}
    for device, peak in zip(placed.host.devices, outcome.peak_bytes, strict=True):
        if device.backend == "cuda":
            place = torch_device(device)
            simulated[place] = simulated.get(place, 0.0) + float(np.maximum(peak - device.context_bytes, 0))
    gc.collect()  # what the step before held
    with placed.loaded(plan, crew) as step:
        step.run(0)
        for place in simulated:
            cuda.forget_peak(place)
        step.run(1)
        counted = {place: cuda.peak_bytes(place) for place in simulated}
    return [{"simulated": simulated[place], "counted": float(counted[place])} for place in simulated]
