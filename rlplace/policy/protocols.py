"""`Policy` and `Learner`: what proposes placements of groups, and what makes it better from their rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter


@runtime_checkable
class Policy(Protocol):
    """A distribution over placements of a problem's G groups on D devices."""

    @property
    def num_groups(self) -> int:
        """Groups that it places, G."""
        ...

    @property
    def num_devices(self) -> int:
        """Devices that it places them on, D."""
        ...

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn; by the policy's own generator, or by `rng`."""
        ...

    def log_prob(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B,) log-probabilities of placements (B, G), through which gradients flow."""
        ...

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest placement, or nearly: the policy's best guess."""
        ...

    def save(self, path: Path) -> None:
        """Writes weights to `path` (safetensors), and what is needed to make the policy again beside it (`.json`)."""
        ...


@runtime_checkable
class LearnedPolicy(Policy, Protocol):
    """A policy with parameters: what `reinforce` can teach."""

    def parameters(self) -> Iterator[Parameter]:
        """What is learned."""
        ...


@runtime_checkable
class GroupPolicy(LearnedPolicy, Protocol):
    """A policy that decides group by group: what `ppo` can teach.

    Its log-probability is the sum over groups of `evaluate`'s, each given the groups that were decided before it.
    """

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G) of groups, and entropies (B, G) in nats, with gradients."""
        ...


@runtime_checkable
class Loadable(Policy, Protocol):
    """A policy that takes weights from a file: what `--init FILE` needs."""

    @property
    def kind(self) -> str:
        """What its checkpoints say they are of."""
        ...

    def load(self, path: Path) -> None:
        """Takes the weights that `save` wrote; refuses those that do not fit."""
        ...


@runtime_checkable
class Straying(Protocol):
    """A policy that can be told how far its samples stray from its best guess."""

    def set_flips(self, flips: float) -> None:
        """Lets samples differ from the best guess in about `flips` groups."""
        ...


@runtime_checkable
class Tempered(Protocol):
    """A policy that divides its logits by a temperature, in samples as in log-probabilities."""

    temperature: Tensor


@runtime_checkable
class StartsSomewhere(Protocol):
    """A policy that proposes placements around one that is known: its log-probabilities depend on that one."""

    def start_from(self, group_devices: NDArray[np.integer]) -> None:
        """Proposes from now on around the placement (G,)."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Makes a policy better, in place."""

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Moves the policy towards placements (G,) or (M, G) that are known to be good."""
        ...

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """Learns from placements (B, G) and their rewards (B,); figures of the update by name.

        An `update` with one more keyword, `ran`, is told (B,) bool: which placements ran to their end.

        Args:
            group_devices: devices of groups, sampled from the policy or not.
            rewards: larger is better; all finite.
            progress: share of learning that is done, 0 to 1, for what changes over time.
        """
        ...

    def forget(self) -> None:
        """Drops what it remembers of rewards, as when they come to mean something else."""
        ...
