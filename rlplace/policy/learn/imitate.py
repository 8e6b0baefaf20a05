"""`imitate`: teaches a policy a placement before it learns from step times."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.errors import InvalidValue
from rlplace.policy.placer.policy import PlacerPolicy

LEAST_WEIGHT = 0.5
"""Weight of a group without cost against the mean group: it may hold a large parameter all the same."""


def imitate(
    policy: PlacerPolicy,
    group_devices: NDArray[np.integer],
    *,
    num_steps: int = 60,
    learning_rate: float = 3e-3,
    smoothing: float = 0.06,
) -> float:
    """The cross-entropy left after cloning a teacher's placement (behaviour cloning; Pomerleau 1991).

    Each group counts by its cost. Label smoothing leaves every other device a share of `smoothing / D`, so that the
    policy keeps trying them.

    Args:
        policy: learns, in place.
        group_devices: (G,) devices of groups, or (M, G) for several teachers to be followed alike.
        num_steps: gradient steps (Adam).
        learning_rate: of Adam.
        smoothing: probability taken from the teacher's device and shared among all D.

    Raises:
        InvalidValue: the wrong number of groups, or a device that does not exist.
    """
    teachers_MG = np.atleast_2d(np.asarray(group_devices))
    if teachers_MG.shape[1:] != (policy.num_groups,):
        raise InvalidValue("group_devices", teachers_MG.shape, f"{policy.num_groups} devices, one a group")
    if teachers_MG.size and not 0 <= teachers_MG.min() <= teachers_MG.max() < policy.num_devices:
        raise InvalidValue("device", int(teachers_MG.max()), f"0..{policy.num_devices - 1}", where="imitate")
    if not policy.allowed.numpy()[np.arange(policy.num_groups), teachers_MG].all():
        raise InvalidValue("group_devices", "a group on a device where it may not be", "allowed devices only")
    targets_MG = torch.from_numpy(teachers_MG.astype(np.int64))
    cost_G = policy.group_cost.mean(dim=1)
    weight_G = LEAST_WEIGHT + (1 - LEAST_WEIGHT) * cost_G / cost_G.mean().clamp(min=1e-12)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = (cloning_loss(policy.logits(), targets_MG, smoothing) * weight_G).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


def cloning_loss(logits_GD: Tensor, targets_MG: Tensor, smoothing: float) -> Tensor:
    """(G,) cross-entropy towards M placements (M, G), with label smoothing over the devices that logits do not bar."""
    log_probs_GD = torch.log_softmax(logits_GD, dim=-1)
    log_prob_G = log_probs_GD.gather(1, targets_MG.T).mean(dim=1)
    is_allowed_GD = torch.isfinite(log_probs_GD)
    mean_G = torch.where(is_allowed_GD, log_probs_GD, 0.0).sum(dim=1) / is_allowed_GD.sum(dim=1)
    return -((1 - smoothing) * log_prob_G + smoothing * mean_G)
