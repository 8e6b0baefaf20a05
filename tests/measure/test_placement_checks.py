"""What a wrong placement is told, one or a batch of them."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.errors import InvalidValue
from rlplace.measure.problem import check_allowed, check_range, check_together

GRAPH, HOST = op_graph([[], [0], [1]]), plain_host(3)


def test_what_is_in_range_comes_back_as_an_array() -> None:
    assert check_range([[0, 2], [1, 1]], 2, 3, one="op", where="here").tolist() == [[0, 2], [1, 1]]  # type: ignore[arg-type]
    assert check_range(np.zeros((0, 2), dtype=np.int64), 2, 3, one="op", where="here").shape == (0, 2)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (np.zeros((4, 3), dtype=np.int32), r"here: length is \(4, 3\), expected 2 devices, one for each op"),
        (np.array([0.0, 1.0]), "here: dtype is 'float64', expected integers"),
        (np.array([0, 3]), r"here: device is 3, expected 0\.\.2"),
        (np.array([-1, 3]), r"here: device is -1, expected 0\.\.2"),
    ],
)
def test_what_is_out_of_range_is_refused(devices: np.ndarray, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        check_range(devices, 2, 3, one="op", where="here")


def test_the_first_op_that_is_parted_from_its_class_is_named() -> None:
    members, leaders = np.array([1, 2]), np.array([0, 0])
    check_together(np.array([[0, 0, 0], [2, 2, 2]]), GRAPH, members, leaders)
    with pytest.raises(InvalidValue, match="op 'op2' away from 'op0'"):
        check_together(np.array([[0, 0, 0], [2, 2, 1]]), GRAPH, members, leaders)


def test_the_first_op_that_is_barred_is_named_with_where_it_may_be() -> None:
    allowed = np.array([[True, True, True], [True, False, True], [True, True, True]])
    check_allowed(np.array([[1, 0, 1], [1, 2, 1]]), GRAPH, HOST, allowed)
    with pytest.raises(InvalidValue, match=r"op1.* on .*d1.*, expected one where it may run: d0, d2"):
        check_allowed(np.array([[1, 0, 1], [1, 1, 1]]), GRAPH, HOST, allowed)
