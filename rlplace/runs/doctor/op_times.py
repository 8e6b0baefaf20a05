"""How long one small op takes, again and again: whether timing is steady here."""

from __future__ import annotations

import time
from typing import Any

NUM_ELEMENTS = 32768
"""As many as PyTorch leaves to one thread: more would be shared among several, whatever their number is set to."""
OPS_PER_SAMPLE = 32
WARM_UP_S = 0.03
TIMED_S = 0.3


def op_times_s(torch: Any) -> list[float]:
    """Seconds of each sample, a fixed number of products of small tensors; about 0.3 s in all."""
    left, right, product = (torch.ones(NUM_ELEMENTS) for _ in range(3))

    def sample() -> None:
        for _ in range(OPS_PER_SAMPLE):
            torch.mul(left, right, out=product)

    end_s = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end_s:
        sample()
    times_s: list[float] = []
    before_s = time.perf_counter()
    end_s = before_s + TIMED_S
    while before_s < end_s:
        sample()
        after_s = time.perf_counter()
        times_s.append(after_s - before_s)
        before_s = after_s
    return times_s
