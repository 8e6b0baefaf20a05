import numpy as np
import pytest
import torch
from fake_measurer import chain_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from permuted_devices import permuted
from random_problems import random_problem

from rlplace.env import problem_features
from rlplace.policy.base import LEAST_WEIGHT, ProblemTensors
from rlplace.policy.gnn import FIELD_FEATURES, AssignmentNetwork, fields
from rlplace.policy.options import GnnConfig


def lively(seed: int = 0) -> AssignmentNetwork:
    """A network that has an opinion."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AssignmentNetwork(GnnConfig(hidden=8, marks=3))
        for step in network.rounds:
            torch.nn.init.normal_(step.score.weight)
            torch.nn.init.normal_(step.query.weight)
    return network


def tensors(problem):
    return ProblemTensors.of(problem_features(problem))


def test_fields_are_those_worked_out_by_hand():
    # a chain 0 -> 1 -> 2 of one-second ops and one byte at 100 bytes a second
    problem = tensors(chain_problem(3))
    share_GD = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.0, 1.0]])
    field_GDF = fields(problem, share_GD)
    columns = {name: field_GDF[..., index] for index, name in enumerate(FIELD_FEATURES)}
    assert columns["reads"].tolist() == [[0, 0], pytest.approx([0.8, 0.2]), pytest.approx([0.5, 0.5])]
    assert columns["readers"].tolist() == [pytest.approx([0.5, 0.5]), pytest.approx([0.0, 1.0]), [0, 0]]
    # an even share is 1.5 s: devices have 1.3 s and 1.7 s to do
    assert columns["load"][2].tolist() == pytest.approx([np.log1p(1.3 / 1.5), np.log1p(1.7 / 1.5)])
    assert problem.edge_weight.tolist() == pytest.approx([0.01 + LEAST_WEIGHT] * 2)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_permuting_devices_with_their_marks_permutes_the_logits(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 12)))
    order = rng.permutation(problem.host.num_devices)
    marks_DM = torch.from_numpy(rng.standard_normal((problem.host.num_devices, 3))).float()
    network = lively()
    with torch.no_grad():
        before_GD = network(tensors(problem), marks_DM)
        after_GD = network(tensors(permuted(problem, order)), marks_DM[order])
    assert torch.allclose(after_GD, before_GD[:, order], atol=2e-3)
    assert torch.isfinite(before_GD).all()


def test_what_is_likely_elsewhere_matters():
    """Equal devices get other logits by their marks alone, and a round later by what the marks have drawn to them."""
    problem = tensors(chain_problem(4))
    with torch.no_grad():
        same_GD = lively()(problem, torch.zeros(2, 3))
        marked_GD = lively()(problem, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0]]))
    assert torch.allclose(same_GD[:, 0], same_GD[:, 1], atol=1e-5)
    assert (marked_GD[:, 0] - marked_GD[:, 1]).abs().min() > 1e-4


def test_gradients_reach_every_weight_once_the_last_round_says_something():
    problem, network = tensors(chain_problem(4, num_devices=3)), lively()
    network(problem, torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[:, 0].square().sum().backward()
    silent = [name for name, weight in network.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not silent


def test_one_device_and_no_edges():
    with torch.no_grad():
        assert lively()(tensors(chain_problem(1, num_devices=1)), torch.zeros(1, 3)).shape == (1, 1)
