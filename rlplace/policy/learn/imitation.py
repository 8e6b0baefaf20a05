"""`CloneLearner`: clones the best placements seen so far, and nothing else.

`imitate`: teaches a policy a placement before it learns from step times.

`Elites`: the best placements seen so far.

`settle`: what a learner tells its policy after each update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.errors import InvalidValue
from rlplace.policy.base import GroupPolicy, StartsSomewhere, Straying, at_temperature_1
from rlplace.policy.learn.state import (
    LearnerState,
    check_devices,
    check_finite,
    load_optimizer_state,
    load_policy_state,
    optimizer_state,
    policy_state,
)
from rlplace.policy.options import CloneConfig


class CloneLearner:
    """The cross-entropy method with a network for its distribution (Rubinstein 1999; de Boer et al. 2005).

    Args:
        policy: learns, in place.
        config: how.
    """

    def __init__(self, policy: GroupPolicy, config: CloneConfig | None = None) -> None:
        self.policy, self.config = policy, config or CloneConfig()
        self.elites = Elites(self.config.num_elites)
        self._optimizer = torch.optim.Adam(policy.parameters(), lr=self.config.learning_rate)

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Clones placements (G,) or (M, G)."""
        imitate(self.policy, group_devices)
        settle(self.policy, self.config.flips)

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """Takes note of placements (B, G) and rewards (B,), and clones the best of all."""
        self.elites.add(group_devices, rewards)
        loss = torch.zeros(())
        for _ in range(self.config.num_steps):
            loss = cloning_loss(self.policy, self.elites.group_devices, self.config.smoothing).mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        settle(self.policy, self.config.flips, self.elites)
        return {"elite_loss": loss.item(), "best_reward": float(self.elites.rewards[0])}

    def forget(self) -> None:
        """Forgets the best placements."""
        self.elites.clear()

    def state(self) -> LearnerState:
        """All that it and its policy need to go on."""
        return learner_state(self.policy, self._optimizer, self.elites)

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options.

        Raises:
            KeyError, RuntimeError, ValueError: it is of another policy.
        """
        load_learner_state(state, self.policy, self._optimizer, self.elites)


LEAST_WEIGHT = 0.5
"""Weight of a group without cost against the mean group: it may hold a large parameter all the same."""
CERTAIN = 1e-6
"""A device whose log-probability is above minus this is not told from one that is certain."""


def imitate(
    policy: GroupPolicy,
    group_devices: NDArray[np.integer],
    *,
    num_steps: int = 60,
    learning_rate: float = 3e-3,
    smoothing: float = 0.06,
) -> float:
    """The loss left after cloning a teacher's placement (behaviour cloning; Pomerleau 1991).

    Where the policy says what its groups cost (`group_cost`, (G, D)), each counts by it. A policy that starts from a
    placement just starts from the first teacher's, and has nothing left to learn.

    Args:
        policy: learns, in place.
        group_devices: (G,) devices of groups, or (M, G) for several teachers to be followed alike.
        num_steps: gradient steps (Adam).
        learning_rate: of Adam.
        smoothing: probability that is left for other devices than the teacher's, so that the policy keeps trying them.

    Raises:
        InvalidValue: the wrong number of groups, or a device that does not exist or that pins bar.
    """
    teachers_MG = np.atleast_2d(np.asarray(group_devices))
    if teachers_MG.shape[1:] != (policy.num_groups,):
        raise InvalidValue("group_devices", teachers_MG.shape, f"{policy.num_groups} devices, one a group")
    if teachers_MG.size and not 0 <= teachers_MG.min() <= teachers_MG.max() < policy.num_devices:
        raise InvalidValue("device", int(teachers_MG.max()), f"0..{policy.num_devices - 1}", where="imitate")
    with torch.no_grad():
        if torch.isneginf(policy.evaluate(teachers_MG)[0]).any():
            raise InvalidValue("group_devices", "a group on a device where it may not be", "allowed devices only")
    if isinstance(policy, StartsSomewhere):
        policy.start_from(teachers_MG[0])
        return 0.0
    weight_G = _weights(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = (cloning_loss(policy, teachers_MG, smoothing) * weight_G).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


def cloning_loss(policy: GroupPolicy, group_devices: NDArray[np.integer], smoothing: float) -> Tensor:
    """(G,) mean cross-entropy, in nats, towards placements (M, G) with a probability of `1 - smoothing`.

    It is label smoothing with two labels, the known device and all others: a policy that became certain would try
    nothing else. It holds at a temperature of 1, however the policy samples.
    """
    with at_temperature_1(policy):
        log_prob_MG, _ = policy.evaluate(group_devices)
    log_other_MG = torch.log1p(-log_prob_MG.clamp(max=-CERTAIN).exp())
    return -((1 - smoothing) * log_prob_MG + smoothing * log_other_MG).mean(dim=0)


def _weights(policy: GroupPolicy) -> Tensor:
    cost_GD = getattr(policy, "group_cost", None)
    if cost_GD is None:
        return torch.ones(())
    cost_G = cost_GD.mean(dim=1)
    weight_G: Tensor = LEAST_WEIGHT + (1 - LEAST_WEIGHT) * cost_G / cost_G.mean().clamp(min=1e-12)
    return weight_G


class Elites:
    """The `capacity` distinct placements with the highest mean reward, best first.

    A placement that comes again counts with the mean of its rewards: on a host whose answers vary, one lucky answer
    does not stay on top.

    Example:
        >>> elites = Elites(capacity=2)
        >>> elites.add(np.array([[0, 1], [1, 1], [0, 0]]), np.array([-2.0, -1.0, -3.0]))
        >>> elites.group_devices.tolist(), elites.rewards.tolist()
        ([[1, 1], [0, 1]], [-1.0, -2.0])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self.rewards)

    def clear(self) -> None:
        """Forgets everything, as when rewards come to mean something else."""
        self.group_devices: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self.rewards: NDArray[np.float64] = np.zeros(0)
        self._counts: dict[bytes, int] = {}

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of the kept placements came, best first."""
        return np.array([self._counts[row.tobytes()] for row in self.group_devices], dtype=np.int64)

    def restore(
        self, group_devices: NDArray[np.int32], rewards: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> None:
        """Goes on from another one's `group_devices`, `rewards` and `counts`."""
        self.group_devices, self.rewards = np.array(group_devices, dtype=np.int32), np.array(rewards, dtype=np.float64)
        keys = (row.tobytes() for row in self.group_devices)
        self._counts = dict(zip(keys, counts.tolist(), strict=True))

    def add(self, group_devices_BG: NDArray[np.integer], rewards_B: NDArray[np.floating]) -> None:
        """Takes note of B placements (B, G) and their rewards (B,)."""
        mean = {row.tobytes(): reward for row, reward in zip(self.group_devices, self.rewards.tolist(), strict=True)}
        rows = np.ascontiguousarray(group_devices_BG, dtype=np.int32)
        for row, reward in zip(rows, np.asarray(rewards_B, dtype=np.float64).tolist(), strict=True):
            key = row.tobytes()
            count = self._counts.get(key, 0) + 1
            self._counts[key] = count
            mean[key] = mean.get(key, 0.0) + (reward - mean.get(key, 0.0)) / count
        kept = sorted(mean, key=lambda key: -mean[key])[: self.capacity]
        self._counts = {key: self._counts[key] for key in kept}
        self.rewards = np.array([mean[key] for key in kept])
        self.group_devices = np.array([np.frombuffer(key, dtype=np.int32) for key in kept], dtype=np.int32)


def settle(policy: object, flips: float | None = None, elites: Elites | None = None) -> None:
    """Has the policy propose around the best placement seen, and stay near its best guess, where it can be told.

    Args:
        policy: any; one that is neither `StartsSomewhere` nor `Straying` is left alone.
        flips: groups in which samples differ from the best guess on average; None leaves that as it is.
        elites: the best placements seen.
    """
    if elites is not None and len(elites) and isinstance(policy, StartsSomewhere):
        policy.start_from(elites.group_devices[0])
    if flips is not None and isinstance(policy, Straying):
        policy.set_flips(flips)


def learner_state(
    policy: object,
    optimizer: torch.optim.Optimizer,
    elites: Elites,
    facts: Mapping[str, Any] | None = None,
    *,
    elites_name: str = "elites",
) -> LearnerState:
    """What every learner keeps: its policy, its optimizer and the best placements seen, beside facts of its own.

    Raises:
        InvalidValue: the policy is no `torch.nn.Module` with a `generator`.
    """
    state = LearnerState({}, facts or {}).with_part("policy", policy_state(policy))
    return state.with_part("optimizer", optimizer_state(optimizer)).with_part(elites_name, elites_state(elites))


def load_learner_state(
    state: LearnerState,
    policy: object,
    optimizer: torch.optim.Optimizer,
    elites: Elites,
    *,
    elites_name: str = "elites",
) -> None:
    """Takes what `learner_state` gave, but for the facts.

    Raises:
        KeyError, RuntimeError, ValueError: it is of another learner or policy.
    """
    load_policy_state(policy, state.part("policy"))
    load_optimizer_state(optimizer, state.part("optimizer"))
    load_elites_state(elites, state.part(elites_name), policy)


def elites_state(elites: Elites) -> LearnerState:
    """The best placements seen, their rewards, and how often each came."""
    tensors = {"group_devices": elites.group_devices, "rewards": elites.rewards, "counts": elites.counts}
    return LearnerState({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})


def load_elites_state(elites: Elites, state: LearnerState, policy: object) -> None:
    """Takes what `elites_state` gave, of placements of this policy.

    Raises:
        KeyError, ValueError: it is no such state.
    """
    devices, rewards, counts = (state.tensors[name] for name in ("group_devices", "rewards", "counts"))
    if len(devices):
        check_devices("group_devices", devices, policy)
    if len(devices) > elites.capacity or not len(devices) == len(rewards) == len(counts):
        raise ValueError(f"{len(devices)} placements, {len(rewards)} rewards and {len(counts)} counts")
    check_finite("rewards", rewards)
    if counts.is_floating_point() or counts.dim() != 1 or rewards.dim() != 1 or bool((counts < 1).any()):
        raise ValueError("rewards and counts that are none")
    elites.restore(devices.numpy(), rewards.numpy(), counts.numpy())
