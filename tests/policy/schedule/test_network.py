"""`ScheduleNetwork`: a new one is the list scheduler; no weight depends on the numbers of groups or devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlplace.env import DECISION_FEATURES
from rlplace.env.sequential import FEATURES, FIRST_WEIGHTS
from rlplace.errors import InvalidValue
from rlplace.policy.schedule_network import (
    ALLOWED,
    GROUP_FEATURES,
    MARKS,
    SUMMARY,
    Components,
    ScheduleNetwork,
    new_network,
    related,
)


def test_a_new_network_weighs_features_as_its_component_does() -> None:
    network = new_network()
    features = torch.randn(5, 3, len(DECISION_FEATURES), generator=torch.Generator().manual_seed(0))
    groups, summary = torch.zeros(5, len(GROUP_FEATURES)), torch.zeros(len(SUMMARY))
    features[..., ALLOWED] = 1.0
    scores = network.device_scores(features, torch.zeros(3, MARKS), groups, summary, 4, torch.tensor(2.0))
    costs = (features[..., : len(FEATURES)] * torch.tensor(FIRST_WEIGHTS[4][1])).sum(-1)
    margins = costs - costs.amin(-1, keepdim=True)
    assert scores.detach() == pytest.approx(-2.0 * torch.log(1 + margins / 4.0), abs=1e-4)
    assert not network.priorities(groups, summary).any()


def test_permuting_devices_permutes_the_scores() -> None:
    network = new_network(seed=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(2, 4, len(DECISION_FEATURES), generator=draw)
    groups, summary = torch.randn(2, len(GROUP_FEATURES), generator=draw), torch.randn(len(SUMMARY), generator=draw)
    order = torch.tensor([2, 0, 3, 1])
    marks = torch.randn(4, MARKS, generator=draw)
    scores = network.device_scores(features, marks, groups, summary, 0, torch.tensor(1.0))
    turned = network.device_scores(features[:, order], marks[order], groups, summary, 0, torch.tensor(1.0))
    assert turned.detach() == pytest.approx(scores[:, order].detach(), abs=1e-5)


def test_the_seed_decides_on_the_first_weights_and_nobody_else_draws() -> None:
    before = torch.random.get_rng_state()
    first, same, other = new_network(seed=1), new_network(seed=1), new_network(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    key = "correction.0.weight"
    assert torch.equal(first.state_dict()[key], same.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])


def test_a_new_ranker_believes_the_list_schedule() -> None:
    network = new_network()
    estimates = torch.tensor([[2.0, 1.0, 0.5, 0.5, 3.0, 0.2], [1.0, 1.0, 0.0, 0.0, 0.0, 0.9]], dtype=torch.float64)
    times = network.log_times(estimates, torch.zeros(2, len(SUMMARY)))
    assert times.tolist() == pytest.approx([np.log(2.0), 0.0])


def test_estimates_have_no_unit() -> None:
    estimates = torch.tensor([2.0, 1.0, 0.5, 0.5, 3.0, 0.2], dtype=torch.float64)
    scaled = estimates * torch.tensor([1e-3, 1e-3, 1e-3, 1e-3, 1.0, 1.0], dtype=torch.float64)
    assert related(scaled) == pytest.approx(related(estimates), abs=1e-6)


def test_components_need_a_weight_for_each_feature() -> None:
    with pytest.raises(InvalidValue, match="9 weights"):
        Components(np.zeros(1, dtype=np.int64), np.zeros((1, 3)))
    with pytest.raises(InvalidValue, match="one at least"):
        Components(np.zeros(0, dtype=np.int64), np.zeros((0, 9)))
    pairs = [("finest", tuple(float(i) for i in range(9))), ("own", (0.5,) * 9)]
    assert [Components.of(pairs).pair(place) for place in range(2)] == pairs


def test_every_number_of_components_is_a_network() -> None:
    for count in (1, 3):
        network = ScheduleNetwork(Components.of(FIRST_WEIGHTS[:count]), 4, num_scenarios=2)
        assert network.component_scores(torch.zeros(len(SUMMARY))).shape == (count,)
        assert network.scenarios.shape == (2, count)
