"""`held_out`: how good the guesses of a network are on problems that it was not trained on."""

from __future__ import annotations

import numpy as np
import torch

from rlplace.policy.schedule.network import ScheduleNetwork
from rlplace.policy.schedule.proposals import choose
from rlplace.training.pretrain.tables import Table

COUNTS = (1, 4, 16, 64)
"""Numbers of guesses of which the best one counts."""


def held_out(network: ScheduleNetwork, table: Table) -> dict[str, float]:
    """Geometric means over problems of the best of some guesses over the best of all components.

    Args:
        network: guesses.
        table: (P, C) of its components on other problems; those that none of them fits on are left out.

    Returns:
        By what guesses (`gate` alone, `ranker`, or `listed` for the components in their order) and how many.
    """
    table = table.rows(np.flatnonzero(np.isfinite(table.log_times).any(axis=1)))
    summary = torch.from_numpy(table.summary)
    wide = summary[:, None].expand(-1, table.log_times.shape[1], -1)
    with torch.no_grad():
        gate = network.component_scores(summary).double().numpy()
        ranker = network.log_times(torch.from_numpy(table.estimates), wide).double().numpy()
    scenarios, ratios = network.scenarios.double().numpy(), table.log_ratios
    orders = {
        "gate": [choose(row, scenarios, max(COUNTS)) for row in gate],
        "ranker": [choose(row, scenarios, max(COUNTS)) for row in ranker],
        "listed": [list(range(table.log_times.shape[1]))] * len(ratios),
    }
    return {
        f"{name}@{count}": float(
            np.exp(np.mean([row[order[:count]].min() for row, order in zip(ratios, found, strict=True)]))
        )
        for name, found in orders.items()
        for count in COUNTS
    }
