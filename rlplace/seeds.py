"""Seeds: whole numbers that Python, NumPy and PyTorch all take."""

from __future__ import annotations

from rlplace.errors import InvalidValue

LARGEST_SEED = 2**32 - 1
"""NumPy's global generator, which Stable-Baselines3 seeds, takes no larger one."""


def check_seed(seed: int, where: str = "") -> int:
    """The seed itself.

    Raises:
        InvalidValue: it is negative, or larger than `LARGEST_SEED`.

    >>> check_seed(7)
    7
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise InvalidValue("seed", seed, f"a whole number from 0 to {LARGEST_SEED}", where=where)
    return seed
