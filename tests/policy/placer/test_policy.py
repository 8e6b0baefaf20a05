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


def test_the_graph_is_encoded_once_a_batch(policy):
    calls = []
    policy.encoder.register_forward_hook(lambda *_: calls.append(1))
    policy.sample(512)
    policy.evaluate(np.zeros((512, 6), dtype=np.int64))
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


@pytest.mark.parametrize("options", [{"hidden": 0}, {"num_layers": -1}, {"table_scale": float("nan")}])
def test_sizes_are_checked(options):
    with pytest.raises(InvalidValue):
        PlacerArchitecture(**options)
