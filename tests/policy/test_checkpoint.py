import json

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem

from rlplace.errors import FileProblem, InvalidValue, UserError
from rlplace.policy import PlacerArchitecture, imitate, make_policy
from rlplace.policy.base import load_checkpoint, save_checkpoint

ARCHITECTURE = PlacerArchitecture(hidden=8, num_layers=1)


@pytest.fixture
def saved(tmp_path):
    policy = make_policy(chain_problem(5, num_devices=3), ARCHITECTURE)
    imitate(policy, np.array([0, 1, 2, 1, 0]), num_steps=20)
    policy.set_flips(1.5)
    policy.save(tmp_path / "policy.safetensors")
    return policy, tmp_path / "policy.safetensors"


def loaded(path, num_ops=5, architecture=ARCHITECTURE):
    policy = make_policy(chain_problem(num_ops, num_devices=3), architecture, seed=7)
    policy.load(path)
    return policy


def test_a_loaded_policy_is_the_saved_one(saved):
    policy, other = saved[0], loaded(saved[1])
    assert torch.equal(other.logits(), policy.logits())
    for seed in range(3):
        samples = [p.sample(16, np.random.default_rng(seed)) for p in (policy, other)]
        assert np.array_equal(*samples)


def test_a_loaded_policy_learns_on(saved):
    policy = loaded(saved[1])
    imitate(policy, np.array([2, 2, 2, 2, 2]))
    assert policy.mode().tolist() == [2] * 5


def test_the_architecture_is_readable(saved):
    about = json.loads(saved[1].with_suffix(".json").read_text())
    assert (about["schema"], about["kind"]) == (1, "placer")
    assert about["options"] == {"hidden": 8, "num_layers": 1, "table_scale": 10.0}


def test_weights_of_other_sizes_options_or_features_are_refused(saved):
    with pytest.raises(FileProblem, match="another size"):
        loaded(saved[1], num_ops=4)
    with pytest.raises(InvalidValue, match="options"):
        loaded(saved[1], architecture=PlacerArchitecture(hidden=8, num_layers=1, table_scale=1.0))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileProblem, match="no such file"):
        loaded(tmp_path / "policy.safetensors")


def test_what_is_missing_is_named_the_weights_first(saved):
    weights, about = saved[1], saved[1].with_suffix(".json")
    about.unlink()
    with pytest.raises(
        FileProblem, match=r"policy\.json: no such file\. It describes the weights of policy\.safetensors"
    ):
        loaded(weights)
    weights.unlink()
    with pytest.raises(FileProblem, match=r"policy\.safetensors: no such file"):
        loaded(weights)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"kind": "other"},
        {"options": {"hidden": "wide"}},
        {"options": {"depth": 3}},
        {"options": {"hidden": 16, "num_layers": 1, "table_scale": 10.0}},
        {"features": ["others"]},
        {"features": None},
    ],
)
def test_a_description_that_does_not_fit_is_refused(saved, change):
    about_path = saved[1].with_suffix(".json")
    about_path.write_text(json.dumps(json.loads(about_path.read_text()) | change))
    with pytest.raises(UserError, match=r"policy\.(json|safetensors)"):
        loaded(saved[1])


def test_another_kind_is_named_with_what_reads_it(tmp_path):
    path = tmp_path / "policy.safetensors"
    save_checkpoint(path, {"schema": 1, "kind": "table"}, {"table_GD": torch.zeros(3, 2)})
    with pytest.raises(FileProblem, match=r"kind 'placer', but of kind 'table': `load_checkpoint\(path, 'table'\)`"):
        loaded(path)
    with pytest.raises(FileProblem, match="`--policy table` takes it"):
        loaded(path)
    assert load_checkpoint(path, "table")[1]["table_GD"].shape == (3, 2)


@pytest.mark.parametrize("damage", [b"", b"\x80\x04pickle", b"\xff" * 64])
def test_weights_that_are_no_safetensors_are_refused(saved, damage):
    saved[1].write_bytes(damage)
    with pytest.raises(FileProblem):
        loaded(saved[1])
