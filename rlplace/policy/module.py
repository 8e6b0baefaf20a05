"""`PolicyModule`: what policies share that are one network: sizes, generator, log-probabilities of whole placements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.policy.one_line import one_line


class PolicyModule(nn.Module):
    """A network that is a distribution over placements of G groups on D devices, decided group by group.

    Attributes:
        num_groups: groups that it places, G.
        num_devices: devices that it places them on, D.
        generator: draws the samples.
    """

    def __init__(self, allowed_GD: NDArray[np.bool_], seed: int) -> None:
        """A policy without weights yet.

        Args:
            allowed_GD: (G, D), where each group may be.
            seed: of the samples.
        """
        super().__init__()
        self.num_groups, self.num_devices = allowed_GD.shape
        self.generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        """In one line: that of a network would print every layer."""
        return one_line(self)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G) of groups, and entropies (B, G) in nats, with gradients."""
        raise NotImplementedError

    def log_prob(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B,) log-probabilities of placements (B, G)."""
        return self.evaluate(group_devices)[0].sum(dim=-1)

    def drawing(self, rng: np.random.Generator | None) -> torch.Generator:
        """What draws samples: the policy's own generator, which goes on, or one that `rng` seeds."""
        return self.generator if rng is None else torch.Generator().manual_seed(int(rng.integers(2**63)))


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Layers that are made within draw their weights from `seed`; PyTorch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed GPUs too, beyond the fork
        yield
