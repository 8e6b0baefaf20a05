"""`seeded`: a random op that draws from a seed of its own at every step, wherever it is placed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rlplace import cuda

_lock = threading.Lock()


def seeded(target: Callable[..., Any], place: torch.device, *, seed: int, op: int) -> Callable[..., Any]:
    """`target` as a function of the step and its arguments that draws from (seed, op, step) on `place`."""

    def run(step: int, *args: Any, **kwargs: Any) -> Any:
        generator = cuda.generator(place)
        with _lock:  # the generator belongs to the whole process: others must not notice
            before = generator.get_state()
            generator.manual_seed(_mix(seed, op, step))
            try:
                return target(*args, **kwargs)
            finally:
                generator.set_state(before)

    return run


def _mix(*values: int) -> int:
    """A 63-bit hash of integers (splitmix64's finaliser, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
