"""Seeds: whole numbers that Python, NumPy and PyTorch all take."""

from __future__ import annotations

from numbers import Integral
from typing import TypeGuard

from rlplace.errors import InvalidValue

LARGEST_SEED = 2**32 - 1
"""NumPy's global generator, which Stable-Baselines3 seeds, takes no larger one."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, NumPy's among them; a truth value is none.

    >>> is_whole(1), is_whole(1.5), is_whole(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_seed(seed: int, where: str = "") -> int:
    """The seed itself.

    Raises:
        InvalidValue: it is no whole number, negative, or larger than `LARGEST_SEED`.

    >>> check_seed(7)
    7
    """
    if not is_whole(seed) or not 0 <= seed <= LARGEST_SEED:
        raise InvalidValue("seed", seed, f"a whole number from 0 to {LARGEST_SEED}", where=where)
    return seed
