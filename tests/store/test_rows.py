"""Rows of strangers' databases: whatever they hold, they are decoded or refused, and nothing else happens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st
from stored import PLAN, row_of

from rlplace.errors import UserError
from rlplace.store.rows import (
    ARRAYS,
    StoredMeasurement,
    decode_measurement,
    decode_plan,
    encode_array,
)

VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=40), st.binary(max_size=40)
)
COLUMNS = [field.name for field in dataclasses.fields(StoredMeasurement)]


@contextmanager
def named(where: str) -> Iterator[None]:
    """Nothing happens while active, or a mistake is told that names `where`."""
    told = ""
    try:
        yield
    except UserError as error:
        told = str(error)
    assert not told or where in told


def columns() -> dict[str, object]:
    facts = dataclasses.asdict(row_of())
    return facts | {name: json.dumps(facts[name]) for name in ("samples_s", "peak_bytes")}


@given(st.dictionaries(st.sampled_from(COLUMNS), VALUES, min_size=1, max_size=4))
def test_any_values_in_a_row_are_a_measurement_or_a_mistake_that_is_named(changes: dict[str, object]) -> None:
    with named("FILE: measurement 7"):
        row = decode_measurement(columns() | changes, "FILE: measurement 7")
        assert row.measurement.step_time_s > 0
        json.dumps(row.to_dict(), allow_nan=False)


@given(st.dictionaries(st.sampled_from(["num_ops", "fingerprint", *ARRAYS]), VALUES, min_size=1, max_size=3))
def test_any_values_in_a_plan_are_that_plan_or_a_mistake_that_is_named(changes: dict[str, object]) -> None:
    row = {"fingerprint": PLAN.fingerprint, "num_ops": 3} | {name: encode_array(getattr(PLAN, name)) for name in ARRAYS}
    with named("FILE: plan"):
        assert decode_plan(row | changes, "FILE: plan").fingerprint == PLAN.fingerprint
