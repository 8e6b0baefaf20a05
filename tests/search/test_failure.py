"""What a row says of a method that raised."""

from __future__ import annotations

import pytest

from rlplace.errors import RunnerError
from rlplace.search.task import MOST_LETTERS, Failure


def failure_of(error: Exception) -> Failure:
    try:
        raise error
    except Exception as raised:
        return Failure.of(raised)


def test_an_error_of_others_says_its_type_and_where_it_was_raised() -> None:
    failed = failure_of(ValueError("first\nsecond"))
    assert failed.why.startswith("ValueError: first (test_failure.py, line ")
    assert "second" in failed.traceback
    assert "failure_of" in failed.traceback
    assert failure_of(KeyError()).why.startswith("KeyError (test_failure.py, line ")


@pytest.mark.parametrize(
    ("error", "why"),
    [(RunnerError("gmap failed"), "gmap failed"), (MemoryError("42 GiB"), "42 GiB"), (MemoryError(), "out of memory")],
)
def test_errors_of_ours_and_of_memory_say_what_they_say(error: Exception, why: str) -> None:
    assert failure_of(error).why == why


def test_a_long_first_line_is_cut() -> None:
    assert failure_of(RunnerError("x" * 10_000)).why == "x" * (MOST_LETTERS - 3) + "..."
