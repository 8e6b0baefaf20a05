"""`Costs`: its tables, and what a file may say of them."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.errors import InvalidValue
from rlplace.measure.costs.costs import Costs, read_workspaces

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


def test_scratch_of_a_file_comes_back() -> None:
    rows = [[1, 2, 3], [0, 0, 1 << 40]]
    found = read_workspaces(rows, (2, 3), "problem.json")
    assert found is not None
    assert found.tolist() == rows
    assert read_workspaces(None, (2, 3), "problem.json") is None


@pytest.mark.parametrize("rows", [7, "x", {}, [[1, 2, 3]], [[1, 2], [3, 4]], [[1, 2, 3], [0, 0, -1]], [[1, 2, 3], 5]])
@pytest.mark.parametrize("value", [None, 1.5, True, 10**40, "1"])
def test_what_is_no_such_table_names_the_field(rows: object, value: object) -> None:
    for each in (rows, [[0, 0, 0], [0, 0, value]]):
        with pytest.raises(InvalidValue, match=r"problem\.json: costs\.workspace_bytes.*, expected"):
            read_workspaces(each, (2, 3), "problem.json")
