"""`Policy` and `Learner`: what proposes placements of groups, and what makes it better from their rewards.

`PolicyModule`: what policies share that are one network: sizes, generator, log-probabilities of whole placements.

`one_line`: how policies print.

`ProblemTensors`: the features of a problem as networks take them.

How sharp a distribution over groups must be for its samples to stay near its mode, and what it is without that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter

from rlplace.env.problem_features import ProblemFeatures


@runtime_checkable
class Policy(Protocol):
    """A distribution over placements of a problem's G groups on D devices."""

    @property
    def num_groups(self) -> int:
        """Groups that it places, G."""

    @property
    def num_devices(self) -> int:
        """Devices that it places them on, D."""

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn; by the policy's own generator, or by `rng`."""

    def log_prob(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B,) log-probabilities of placements (B, G), through which gradients flow."""

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest placement, or nearly: the policy's best guess."""

    def save(self, path: Path) -> None:
        """Writes weights to `path` (safetensors), and what is needed to make the policy again beside it (`.json`)."""


@runtime_checkable
class LearnedPolicy(Policy, Protocol):
    """A policy with parameters: what `reinforce` can teach."""

    def parameters(self) -> Iterator[Parameter]:
        """What is learned."""


@runtime_checkable
class GroupPolicy(LearnedPolicy, Protocol):
    """A policy that decides group by group: what `ppo` can teach.

    Its log-probability is the sum over groups of `evaluate`'s, each given the groups that were decided before it.
    """

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G) of groups, and entropies (B, G) in nats, with gradients."""


@runtime_checkable
class Loadable(Policy, Protocol):
    """A policy that takes weights from a file: what `--init FILE` needs."""

    @property
    def kind(self) -> str:
        """What its checkpoints say they are of."""

    def load(self, path: Path) -> None:
        """Takes the weights that `save` wrote; refuses those that do not fit."""


@runtime_checkable
class Straying(Protocol):
    """A policy that can be told how far its samples stray from its best guess."""

    def set_flips(self, flips: float) -> None:
        """Lets samples differ from the best guess in about `flips` groups."""


@runtime_checkable
class Tempered(Protocol):
    """A policy that divides its logits by a temperature, in samples as in log-probabilities."""

    temperature: Tensor


@runtime_checkable
class StartsSomewhere(Protocol):
    """A policy that proposes placements around one that is known: its log-probabilities depend on that one."""

    def start_from(self, group_devices: NDArray[np.integer]) -> None:
        """Proposes from now on around the placement (G,)."""


@runtime_checkable
class Learner(Protocol):
    """Makes a policy better, in place."""

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Moves the policy towards placements (G,) or (M, G) that are known to be good."""

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

    def forget(self) -> None:
        """Drops what it remembers of rewards, as when they come to mean something else."""


class PolicyModule(nn.Module):
    """A network that is a distribution over placements of G groups on D devices, decided group by group.

    Attributes:
        num_groups: groups that it places, G.
        num_devices: devices that it places them on, D.
        generator: draws the samples.
        problem_buffers: names of the buffers that describe the problem; a state of a learner does not change them.
    """

    problem_buffers: ClassVar[tuple[str, ...]] = ()

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


class Counted(Protocol):
    """A policy as far as it is counted."""

    @property
    def num_groups(self) -> int: ...

    @property
    def num_devices(self) -> int: ...

    def parameters(self) -> Iterator[Parameter]: ...


def one_line(policy: Counted) -> str:
    """A policy in one line, where a module's own `repr` has one for each layer."""
    count = sum(parameter.numel() for parameter in policy.parameters())
    places = f"{policy.num_groups:,} groups on {policy.num_devices} devices"
    return f"{type(policy).__name__}({places}, {count:,} parameters)"


LEAST_WEIGHT = 0.01
"""Weight of an edge that carries next to nothing, in mean costs of a group."""


@dataclass(frozen=True, eq=False)
class ProblemTensors:
    """A problem of G groups, K edges and D devices.

    Attributes:
        nodes: (G, F) float32.
        edges: (K, Fe) float32.
        edge_source, edge_target: (K,) int64.
        edge_weight: (K,) float32, seconds of each edge in mean costs of a group.
        devices: (D, Fd) float32: features of each device, and the summary of the problem.
        pairs: (G, D, Fp) float32.
        links: (D, D, Fl) float32.
        load: (G, D) float32, what each group adds to each device, in even shares of the step.
        held: (G, D) float32, what it adds to each device's fullness.
        allowed: (G, D) bool.
        twins: (D,) int64, how many devices before each one look the same.
    """

    nodes: Tensor
    edges: Tensor
    edge_source: Tensor
    edge_target: Tensor
    edge_weight: Tensor
    devices: Tensor
    pairs: Tensor
    links: Tensor
    load: Tensor
    held: Tensor
    allowed: Tensor
    twins: Tensor

    @classmethod
    def of(cls, features: ProblemFeatures) -> ProblemTensors:
        """Those of `features`."""
        arrays = features.arrays
        summary = torch.from_numpy(features.summary).expand(features.num_devices, -1)
        weight_K = torch.from_numpy(arrays.edge_s() / arrays.unit_s) + LEAST_WEIGHT
        return cls(
            nodes=torch.from_numpy(features.nodes),
            edges=torch.from_numpy(features.edges),
            edge_source=torch.from_numpy(features.edge_source),
            edge_target=torch.from_numpy(features.edge_target),
            edge_weight=weight_K.float(),
            devices=torch.cat([torch.from_numpy(features.devices), summary], dim=-1),
            pairs=torch.from_numpy(features.pairs),
            links=torch.from_numpy(features.links),
            load=torch.from_numpy(arrays.cost_s / arrays.share_s).float(),
            held=torch.from_numpy(arrays.held_bytes[:, None] / arrays.room_bytes).float(),
            allowed=torch.from_numpy(features.allowed.copy()),
            twins=torch.from_numpy(features.twins()),
        )

    @property
    def num_groups(self) -> int:
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        return len(self.devices)


LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
BISECTIONS = 30


def temperature_for(logits_GD: Tensor, flips: float) -> float:
    """What to divide logits by, so that a sample differs from the mode in `flips` groups on average.

    Which groups are flipped, and to what, stays the policy's to say: those it is least sure of. A policy sure of
    everything would propose one placement for ever; an unsure one would change too much at once to tell what made a
    placement better.

    Args:
        logits_GD: (G, D), minus infinity where a group may not be.
        flips: more than 0; where no temperature gives as many, or as few, the nearest of the range is taken.
    """
    logits_GD = logits_GD.double()
    low, high = LEAST_TEMPERATURE, MOST_TEMPERATURE
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        expected = (1 - torch.softmax(logits_GD / middle, dim=-1).amax(dim=-1)).sum()
        low, high = (low, middle) if expected > flips else (middle, high)
    return low


@contextlib.contextmanager
def at_temperature_1(policy: object) -> Iterator[None]:
    """While active, a policy that has a temperature has that of 1: what it is taught holds however it is sampled."""
    if not isinstance(policy, Tempered):
        yield
        return
    before = policy.temperature
    policy.temperature = torch.ones(())
    try:
        yield
    finally:
        policy.temperature = before
