"""No op of a placed step makes the host wait for a GPU: PyTorch's debug mode for synchronisations finds none."""

from __future__ import annotations

import torch

from gpu_stages.subject import subject
from gpu_stages.verdict import Verdict
from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.measure.execute.device_threads import torch_device

NUM_PLANS = 6


def run(host_word: str) -> Verdict:
    placed = subject(host_word)
    place = torch_device(placed.host.devices[0])
    if place.type == "cuda" and not _sees_a_wait(place):
        return Verdict.of(False, "the mode does not see `.item()`, so it proves nothing")
    for number, plan in enumerate(placed.draw_plans(NUM_PLANS)):
        with placed.loaded(plan) as step:
            for k in range(2):  # libraries make their handles, and memory is pinned, where nobody minds
                step.run(k)
            try:
                with cuda.forbid_waits():
                    for k in range(2, 5):
                        step.run(k)
            except RunnerError as error:
                return Verdict.of(False, f"placement {number}: {error}", num_transfers=plan.num_transfers)
    return Verdict.of(True, f"{NUM_PLANS} random placements on {placed.host.name}: no op waits for a GPU")


def _sees_a_wait(place: torch.device) -> bool:
    number = torch.ones(1, device=place)
    try:
        with cuda.forbid_waits():
            number.item()
    except RuntimeError:
        return True
    return False
