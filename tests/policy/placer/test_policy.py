import numpy as np
import pytest
import torch
from fake_measurer import chain_problem

from rlplace.errors import InvalidValue
from rlplace.policy import PlacerArchitecture, make_policy

SMALL = PlacerArchitecture(hidden=8, num_layers=2)


@pytest.fixture
def policy():
    policy = make_policy(chain_problem(6, num_devices=3), SMALL, seed=0)
    torch.nn.init.normal_(policy.table_GD, generator=torch.Generator().manual_seed(0))
    return policy


def observe(batch_size):
    return {"graph": torch.zeros(batch_size, dtype=torch.int64)}


def test_forward_gives_what_other_policies_give(policy):
    actions_BG, values_B1, log_prob_B = policy(observe(4))
    assert (actions_BG.shape, values_B1.shape, log_prob_B.shape) == ((4, 6), (4, 1), (4,))
    expected_GD = torch.log_softmax(policy.logits(), dim=-1)
    for b in range(4):
        by_hand = sum(expected_GD[g, actions_BG[b, g]].item() for g in range(6))
        assert log_prob_B[b].item() == pytest.approx(by_hand, abs=1e-5)


def test_evaluate_agrees_with_forward(policy):
    actions_BG, values_B1, log_prob_B = policy(observe(4))
    values_again_B1, log_prob_again_B, entropy_B = policy.evaluate_actions(observe(4), actions_BG)
    assert torch.allclose(log_prob_again_B, log_prob_B)
    assert torch.equal(values_again_B1, values_B1)
    log_prob_BG, entropy_BG = policy.evaluate(actions_BG.numpy())
    assert torch.allclose(log_prob_BG.sum(dim=1), log_prob_B)
    assert torch.allclose(entropy_BG.sum(dim=1), entropy_B)


def test_the_graph_is_encoded_once_a_batch(policy):
    calls = []
    policy.encoder.register_forward_hook(lambda *_: calls.append(1))
    policy(observe(512))
    policy.evaluate_actions(observe(512), torch.zeros(512, 6))
    assert len(calls) == 2


def test_a_new_policy_finds_every_device_as_likely():
    policy = make_policy(chain_problem(6, num_devices=3), SMALL, seed=5)
    assert torch.equal(policy.logits(), torch.zeros(6, 3))


@pytest.mark.parametrize("flips", [0.5, 2.0, 3.5])
def test_samples_differ_from_the_mode_in_as_many_groups_as_asked(policy, flips):
    policy.set_flips(flips)
    different = (policy.sample(20_000, np.random.default_rng(0)) != policy.mode()).sum(axis=1)
    assert different.mean() == pytest.approx(flips, rel=0.05)


def test_flips_do_not_change_the_mode_nor_the_order_of_devices(policy):
    before, mode = policy.logits().clone(), policy.mode()
    policy.set_flips(1.0)
    assert torch.equal(policy.logits(), before)
    assert np.array_equal(policy.mode(), mode)


def test_one_device_leaves_no_choice():
    policy = make_policy(chain_problem(4, num_devices=1), SMALL)
    policy.set_flips(2.0)
    assert not policy.sample(3).any()


def test_samples_depend_on_the_seed_alone(policy):
    first, again = (policy.sample(8, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.shape == (8, 6)
    assert first.dtype == np.int32
    other = policy.sample(8, np.random.default_rng(8))
    assert not np.array_equal(first, other)


def test_predict_serves_single_and_vector_observations(policy):
    alone, _ = policy.predict({"graph": np.int64(0)}, deterministic=True)
    assert alone.tolist() == policy.mode().tolist()
    batch, _ = policy.predict({"graph": np.zeros(3, dtype=np.int64)}, deterministic=True)
    assert batch.tolist() == [policy.mode().tolist()] * 3


@pytest.mark.parametrize("options", [{"hidden": 0}, {"num_layers": -1}, {"table_scale": float("nan")}])
def test_sizes_are_checked(options):
    with pytest.raises(InvalidValue):
        PlacerArchitecture(**options)
