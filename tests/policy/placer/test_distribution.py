import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from rlplace.policy.base import IndependentPolicy, chosen_and_entropy, drawn


@pytest.fixture
def logits_BGD():
    return torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))


def test_log_probs_are_those_of_one_categorical_a_group(logits_BGD):
    actions_BG = torch.randint(3, (5, 7), generator=torch.Generator().manual_seed(1))
    log_prob_BG, _ = chosen_and_entropy(logits_BGD, actions_BG.numpy())
    for b in range(5):
        for g in range(7):
            alone = Categorical(logits=logits_BGD[b, g])
            assert log_prob_BG[b, g].item() == pytest.approx(alone.log_prob(actions_BG[b, g]).item(), abs=1e-6)


def test_entropies_are_those_of_one_categorical_a_group(logits_BGD):
    _, entropy_BG = chosen_and_entropy(logits_BGD, np.zeros((5, 7), dtype=np.int64))
    alone = [[Categorical(logits=logits_BGD[b, g]).entropy().item() for g in range(7)] for b in range(5)]
    assert entropy_BG.numpy() == pytest.approx(np.array(alone), abs=1e-6)


def test_the_mode_is_the_likeliest_device_and_the_lower_of_two():
    class Fixed(IndependentPolicy):
        def logits(self):
            return torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]])

    assert Fixed(np.ones((2, 3), dtype=np.bool_), 0).mode().tolist() == [1, 0]


def test_samples_come_as_often_as_their_probability():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
    samples_BG = drawn(probabilities.log(), 20_000, torch.Generator().manual_seed(0))
    for group in range(2):
        share = torch.bincount(samples_BG[:, group], minlength=3) / len(samples_BG)
        assert share.tolist() == pytest.approx(probabilities[group].tolist(), abs=0.015)


def test_the_generator_alone_decides_what_is_drawn(logits_BGD):
    def draw():
        torch.manual_seed(int(torch.randint(1000, ())))
        return drawn(logits_BGD[0].log_softmax(-1), 5, torch.Generator().manual_seed(3))

    assert torch.equal(draw(), draw())


def test_one_set_of_logits_serves_many_actions(logits_BGD):
    actions_BG = np.random.default_rng(1).integers(3, size=(9, 7))
    shared = chosen_and_entropy(logits_BGD[:1], actions_BG)
    repeated = chosen_and_entropy(logits_BGD[:1].repeat(9, 1, 1), actions_BG)
    assert all(torch.equal(one, other) for one, other in zip(shared, repeated, strict=True))
