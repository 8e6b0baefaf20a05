"""Ops that sleep, and models of them: nothing but their times and their transfers is in a step."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn


@torch.library.custom_op("rlplace_benchmarks::nap", mutates_args=())
def nap(x: Tensor, y: Tensor, seconds: float, size: int) -> Tensor:
    """A tensor of `size` bytes, after `seconds`."""
    time.sleep(seconds)
    return torch.zeros(size, dtype=torch.uint8)


@nap.register_fake
def _(x: Tensor, y: Tensor, seconds: float, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Naps(nn.Module):
    """A random graph of naps of 2 to 20 ms, each of which reads two of the six before it.

    Args:
        num_ops: naps.
        most_bytes: of an output; sizes are spread evenly over their logarithms, from 4 kB on.
        seed: of the graph.
    """

    def __init__(self, num_ops: int, most_bytes: int, seed: int) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        parents = [generator.integers(max(0, k - 6), k, 2).tolist() for k in range(1, num_ops + 1)]
        seconds = generator.uniform(2e-3, 20e-3, num_ops).tolist()
        sizes = np.exp(generator.uniform(np.log(4096), np.log(most_bytes), num_ops)).astype(int).tolist()
        self.naps = list(zip(parents, seconds, sizes, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """The last nap's output, and that of every nap that nothing reads."""
        made, unread = [x], {0}
        for (a, b), seconds, size in self.naps:
            made.append(nap(made[a], made[b], seconds, size))
            unread -= {a, b}
            unread.add(len(made) - 1)
        return torch.stack([made[k].float().mean() for k in sorted(unread)]).sum()
