"""`check_actions`: actions of agents, checked once for all envs."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.errors import InvalidValue

ActionSpace = spaces.Discrete | spaces.MultiDiscrete


def check_actions(actions: object, space: ActionSpace, where: str, num_envs: int | None = None) -> NDArray[np.int64]:
    """`actions` as int64: of the shape of `space`, or (num_envs, ...) with a leading axis of envs.

    Args:
        actions: what an agent chose.
        space: of one env; it counts from 0, and all its numbers have one limit.
        where: who was given them, for messages.
        num_envs: how many actions there are; None for one without an axis of envs.

    Raises:
        InvalidValue: another shape, no integers, or one out of range; says which.

    Example:
        >>> check_actions([1, 0], spaces.MultiDiscrete([2, 2]), "env").tolist()
        [1, 0]
    """
    shape = (() if num_envs is None else (num_envs,)) + (space.shape or ())
    limit = int(np.max(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n))
    expected = f"integers 0..{limit - 1} of shape {shape}"
    try:
        found = np.asarray(actions)
    except ValueError as error:  # rows of different lengths
        raise InvalidValue("action", actions, expected, where=where) from error
    if found.shape != shape:
        raise InvalidValue("action", f"an array of shape {found.shape}", expected, where=where)
    if not np.issubdtype(found.dtype, np.integer):
        raise InvalidValue("action", f"an array of {found.dtype}", expected, where=where)
    is_wrong = (found < 0) | (found >= limit)
    if np.any(is_wrong):
        raise InvalidValue("action", f"one with {int(found[is_wrong].flat[0])} in it", expected, where=where)
    return found.astype(np.int64)
