import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from rlplace.policy import GroupCategorical


@pytest.fixture
def logits_BGD():
    return torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))


def test_log_probs_are_those_of_one_categorical_a_group(logits_BGD):
    actions_BG = torch.randint(3, (5, 7), generator=torch.Generator().manual_seed(1))
    distribution = GroupCategorical().proba_distribution(logits_BGD)
    log_prob_BG = distribution.group_log_prob(actions_BG)
    for b in range(5):
        for g in range(7):
            alone = Categorical(logits=logits_BGD[b, g])
            assert log_prob_BG[b, g].item() == pytest.approx(alone.log_prob(actions_BG[b, g]).item(), abs=1e-6)
    assert distribution.log_prob(actions_BG).tolist() == pytest.approx(log_prob_BG.sum(dim=1).tolist())


def test_entropies_are_those_of_one_categorical_a_group(logits_BGD):
    distribution = GroupCategorical().proba_distribution(logits_BGD)
    alone = [[Categorical(logits=logits_BGD[b, g]).entropy().item() for g in range(7)] for b in range(5)]
    assert distribution.group_entropy().numpy() == pytest.approx(np.array(alone), abs=1e-6)
    assert distribution.entropy().numpy() == pytest.approx(np.array(alone).sum(axis=1), abs=1e-5)


def test_the_mode_is_the_likeliest_device_and_the_lower_of_two():
    logits_BGD = torch.tensor([[[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]]])
    assert GroupCategorical().proba_distribution(logits_BGD).mode().tolist() == [[1, 0]]


def test_samples_come_as_often_as_their_probability():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
    distribution = GroupCategorical(torch.Generator().manual_seed(0))
    samples_BG = distribution.actions_from_params(probabilities.log().expand(20_000, 2, 3))
    for group in range(2):
        share = torch.bincount(samples_BG[:, group], minlength=3) / len(samples_BG)
        assert share.tolist() == pytest.approx(probabilities[group].tolist(), abs=0.015)


def test_the_generator_alone_decides_what_is_drawn(logits_BGD):
    def draw():
        torch.manual_seed(int(torch.randint(1000, ())))
        distribution = GroupCategorical(torch.Generator().manual_seed(3)).proba_distribution(logits_BGD)
        return distribution.sample()

    assert torch.equal(draw(), draw())


def test_one_set_of_logits_serves_many_actions(logits_BGD):
    actions_BG = torch.randint(3, (9, 7), generator=torch.Generator().manual_seed(1))
    shared = GroupCategorical().proba_distribution(logits_BGD[:1]).group_log_prob(actions_BG)
    repeated = GroupCategorical().proba_distribution(logits_BGD[:1].repeat(9, 1, 1)).group_log_prob(actions_BG)
    assert torch.equal(shared, repeated)


def test_params_give_actions_and_their_log_prob(logits_BGD):
    actions_BG, log_prob_B = GroupCategorical().log_prob_from_params(logits_BGD)
    again = GroupCategorical().proba_distribution(logits_BGD).log_prob(actions_BG)
    assert torch.equal(log_prob_B, again)
