"""`learn_many`: one network learns on several problems at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.optim import Adam

from rlplace.errors import InvalidValue
from rlplace.policy.config import PPOConfig
from rlplace.policy.learn.ppo import GroupPPO
from rlplace.policy.protocols import GroupPolicy

Score = Callable[[NDArray[np.int32]], NDArray[np.floating]]
"""From placements (B, G) of groups to their rewards (B,)."""


def learn_many(
    policies: Sequence[GroupPolicy],
    scores: Sequence[Score],
    config: PPOConfig | None = None,
    *,
    num_rounds: int,
    num_samples: int = 16,
    seed: int = 0,
    on_update: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[GroupPPO]:
    """A learner for each policy, after `num_rounds` updates on each problem in turn, with one optimizer for all.

    GDP's batch training (Zhou et al. 2019, section 3.3): the network is shared, everything else is by problem. Rewards
    are compared within a problem, since a step of one says nothing of a step of another; so are the best placements.

    Args:
        policies: of one network, each made for a problem (`GnnPolicy(other, network=first.network)`).
        scores: what rewards the placements of each policy.
        config: of PPO.
        num_rounds: updates on each problem.
        num_samples: placements an update.
        seed: of the order of problems within a round, and of minibatches.
        on_update: told the index of the policy and the figures of its update.

    Raises:
        InvalidValue: no policies, another number of scores, or networks that are not shared.
    """
    config = config or PPOConfig()
    if not policies or len(scores) != len(policies):
        raise InvalidValue("scores", len(scores), f"one for each of {len(policies)} policies", where="learn_many")
    shared = list(policies[0].parameters())
    if any([id(one) for one in policy.parameters()] != [id(one) for one in shared] for policy in policies[1:]):
        hint = "Give the network of the first policy to the others."
        raise InvalidValue("policies", "networks of their own", "one network", where="learn_many", hint=hint)
    optimizer = Adam(shared, lr=config.learning_rate)
    learners = [
        GroupPPO(policy, config, seed=seed + index, optimizer=optimizer) for index, policy in enumerate(policies)
    ]
    generator = np.random.default_rng(seed)
    for turn in range(num_rounds):
        for index in generator.permutation(len(policies)).tolist():
            rows = policies[index].sample(num_samples)
            figures = learners[index].update(rows, scores[index](rows), progress=turn / num_rounds)
            if on_update is not None:
                on_update(index, figures)
    return learners
