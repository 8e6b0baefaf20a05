"""`FirstLosses`: NaN is a placement's fault where another placement has none."""

from __future__ import annotations

import math

import pytest
import torch

from rlplace.measure.timing.host_runner import FirstLosses, NotANumber, has_nan

NAN, FINE = torch.tensor(math.nan), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (FINE, False),
        (torch.tensor(math.inf), False),
        (NAN, True),
        ((FINE, {"aux": [NAN]}), True),
        (torch.tensor([1, 2]), False),
        (torch.tensor([complex(math.nan, 0.0)]), True),
        (torch.empty(0), False),
        ((None, 3, "text"), False),
    ],
)
def test_what_holds_a_nan(result: object, expected: bool) -> None:
    assert has_nan(result) is expected


def test_after_a_number_a_nan_is_an_error() -> None:
    losses = FirstLosses()
    assert losses.is_nan(NAN), "nobody can judge yet"
    assert not losses.saw_numbers
    assert not losses.is_nan(FINE)
    assert losses.saw_numbers
    with pytest.raises(NotANumber, match="NaN"):
        losses.is_nan(NAN)
