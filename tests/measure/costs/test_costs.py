"""`Costs`: its tables, and what a file may say of them."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.errors import InvalidValue
from rlplace.measure.costs.costs import Costs

SECONDS = np.ones((2, 3))


def test_scratch_is_a_table_like_that_of_seconds() -> None:
    costs = Costs(SECONDS, "profiled", np.array([[1, 2, 3], [0, 0, 0]]))
    assert costs.workspace_bytes is not None
    assert costs.workspace_bytes.dtype == np.int64
    assert not costs.workspace_bytes.flags.writeable
    assert Costs(SECONDS, "profiled").workspace_bytes is None


@pytest.mark.parametrize("table", [np.zeros((2, 2)), np.zeros(6), np.full((2, 3), -1)])
def test_other_scratch_is_refused(table: np.ndarray) -> None:
    with pytest.raises(InvalidValue, match="workspace_bytes"):
        Costs(SECONDS, "profiled", table)
