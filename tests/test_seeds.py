"""Which seeds there are: those that NumPy and PyTorch take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stable_baselines3.common.utils import set_random_seed

from rlplace.errors import InvalidValue
from rlplace.seeds import LARGEST_SEED, check_seed


@pytest.mark.parametrize("seed", [0, 1, LARGEST_SEED])
def test_a_seed_in_range_is_taken_by_everybody(seed: int) -> None:
    assert check_seed(seed) == seed
    torch.Generator().manual_seed(seed)
    np.random.default_rng(seed)
    with torch.random.fork_rng():
        set_random_seed(seed)


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 2**70])
def test_any_other_is_refused(seed: int) -> None:
    with pytest.raises(InvalidValue, match=f"train: seed is {seed}, expected a whole number from 0"):
        check_seed(seed, "train")
