import numpy as np
import pytest
import torch
from fake_measurer import chain_problem

from rlplace.errors import InvalidValue
from rlplace.policy import ImproverPolicy, PlacerArchitecture, imitate, make_policy
from rlplace.policy.learn.learners import cloning_loss

SMALL = PlacerArchitecture(hidden=8, num_layers=1)


@pytest.fixture
def policy():
    return make_policy(chain_problem(6, num_devices=3), SMALL)


def test_the_mode_becomes_the_teachers_placement(policy):
    teacher = np.array([0, 2, 1, 1, 0, 2])
    before = imitate(make_policy(chain_problem(6, num_devices=3), SMALL), teacher, num_steps=1)
    assert imitate(policy, teacher) < before
    assert policy.mode().tolist() == teacher.tolist()


def test_smoothing_leaves_the_other_devices_a_share(policy):
    imitate(policy, np.array([0, 2, 1, 1, 0, 2]), num_steps=400, smoothing=0.3)
    probabilities_GD = torch.softmax(policy.logits().detach(), dim=-1)
    assert probabilities_GD.amax(dim=-1).tolist() == pytest.approx([0.7] * 6, abs=0.03)
    assert probabilities_GD.amin(dim=-1).min() > 0.05


def test_teachers_that_disagree_are_followed_alike(policy):
    imitate(policy, np.array([[0] * 6, [1] * 6]), num_steps=400, smoothing=0.0)
    probabilities_GD = torch.softmax(policy.logits().detach(), dim=-1)
    assert probabilities_GD[:, 0].tolist() == pytest.approx([0.5] * 6, abs=0.03)
    assert probabilities_GD[:, 1].tolist() == pytest.approx([0.5] * 6, abs=0.03)


def test_the_loss_is_smoothed_cross_entropy():
    class Known:
        def evaluate(self, group_devices):
            return torch.log(torch.tensor([[0.5, 0.7], [0.25, 0.7]])), None

    loss_G = cloning_loss(Known(), np.zeros((2, 2), dtype=int), smoothing=0.3)
    by_hand = [
        -(0.7 * np.log(0.5) + 0.3 * np.log(0.5) + 0.7 * np.log(0.25) + 0.3 * np.log(0.75)) / 2,
        -(0.7 * np.log(0.7) + 0.3 * np.log(0.3)),
    ]
    assert loss_G.tolist() == pytest.approx(by_hand, rel=1e-5)


def test_what_was_learned_does_not_depend_on_the_temperature_before(policy):
    again = make_policy(chain_problem(6, num_devices=3), SMALL)
    again.set_flips(0.1)
    for one in (policy, again):
        imitate(one, np.array([0, 2, 1, 1, 0, 2]))
    assert torch.equal(policy.logits(), again.logits())


def test_a_policy_that_starts_somewhere_starts_there():
    policy = ImproverPolicy(chain_problem(6, num_devices=3))
    assert imitate(policy, np.array([0, 2, 1, 1, 0, 2])) == 0.0
    assert policy.start.tolist() == policy.mode().tolist() == [0, 2, 1, 1, 0, 2]


@pytest.mark.parametrize("teacher", [[0, 1], [0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 0, -1]])
def test_a_teacher_for_something_else_is_refused(policy, teacher):
    with pytest.raises(InvalidValue):
        imitate(policy, np.array(teacher))
