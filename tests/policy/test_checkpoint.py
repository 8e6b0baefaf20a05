import json

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem

from rlplace.errors import FileProblem, UserError
from rlplace.policy import PlacerArchitecture, imitate, load_policy, make_policy
from rlplace.policy.base import load_checkpoint, save_checkpoint

ARCHITECTURE = PlacerArchitecture(hidden=8, num_layers=1)


@pytest.fixture
def saved(tmp_path):
    policy = make_policy(chain_problem(5, num_devices=3), ARCHITECTURE)
    imitate(policy, np.array([0, 1, 2, 1, 0]), num_steps=20)
    policy.set_flips(1.5)
    policy.save(tmp_path / "policy.safetensors")
    return policy, tmp_path / "policy.safetensors"


def test_a_loaded_policy_is_the_saved_one(saved):
    policy, path = saved
    loaded = load_policy(path)
    assert loaded.architecture == ARCHITECTURE
    assert loaded.feature_names == policy.feature_names
    assert torch.equal(loaded.logits(), policy.logits())
    for seed in range(3):
        samples = [p.sample(16, np.random.default_rng(seed)) for p in (policy, loaded)]
        assert np.array_equal(*samples)


def test_a_loaded_policy_learns_on(saved):
    loaded = load_policy(saved[1])
    imitate(loaded, np.array([2, 2, 2, 2, 2]))
    assert loaded.mode().tolist() == [2] * 5


def test_the_architecture_is_readable(saved):
    about = json.loads(saved[1].with_suffix(".json").read_text())
    assert about["schema"] == 1
    assert (about["num_groups"], about["num_devices"]) == (5, 3)
    assert about["architecture"] == {"hidden": 8, "num_layers": 1, "table_scale": 10.0}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileProblem, match="no such file"):
        load_policy(tmp_path / "policy.safetensors")


def test_what_is_missing_is_named_the_weights_first(saved):
    weights, about = saved[1], saved[1].with_suffix(".json")
    about.unlink()
    with pytest.raises(
        FileProblem, match=r"policy\.json: no such file\. It describes the weights of policy\.safetensors"
    ):
        load_policy(weights)
    weights.unlink()
    with pytest.raises(FileProblem, match=r"policy\.safetensors: no such file"):
        load_policy(weights)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"kind": "other"},
        {"architecture": {"hidden": "wide"}},
        {"architecture": {"depth": 3}},
        {"architecture": {"hidden": 16, "num_layers": 1, "table_scale": 10.0}},
        {"num_groups": 4},
    ],
)
def test_a_description_that_does_not_fit_is_refused(saved, change):
    about_path = saved[1].with_suffix(".json")
    about_path.write_text(json.dumps(json.loads(about_path.read_text()) | change))
    with pytest.raises(UserError, match=r"policy\.(json|safetensors)"):
        load_policy(saved[1])


def test_another_kind_is_named_with_what_reads_it(tmp_path):
    path = tmp_path / "policy.safetensors"
    save_checkpoint(path, {"schema": 1, "kind": "table"}, {"table_GD": torch.zeros(3, 2)})
    with pytest.raises(FileProblem, match=r"kind 'placer', but of kind 'table': `load_checkpoint\(path, 'table'\)`"):
        load_policy(path)
    with pytest.raises(FileProblem, match="`--policy table` takes it"):
        load_policy(path)
    assert load_checkpoint(path, "table")[1]["table_GD"].shape == (3, 2)


@pytest.mark.parametrize("damage", [b"", b"\x80\x04pickle", b"\xff" * 64])
def test_weights_that_are_no_safetensors_are_refused(saved, damage):
    saved[1].write_bytes(damage)
    with pytest.raises(FileProblem):
        load_policy(saved[1])
