from __future__ import annotations

import math

import pytest

from rlplace.say import format_bytes, format_clock, format_ms, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (3e-9, "3.00 ns"),
        (9.996e-7, "1.00 µs"),
        (0.000_099_96, "100 µs"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (59.9, "59.9 s"),
        (59.97, "1:00"),
        (-0.0123, "-12.3 ms"),
        (math.inf, "–"),
        (math.nan, "–"),
    ],
)
def test_format_seconds_gives_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1 << 20, "1.00 MiB"), (80 * 2**30, "80.0 GiB"), (math.inf, "–")],
)
def test_format_bytes_uses_binary_units(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_format_clock_rounds_to_seconds() -> None:
    assert [format_clock(s) for s in (59.6, 3599.7, 86_400.0, -75.0, math.nan)] == [
        "1:00",
        "1:00:00",
        "24:00:00",
        "-1:15",
        "–",
    ]


def test_format_ms_keeps_digits_of_tiny_steps() -> None:
    assert [format_ms(s) for s in (0.0, 0.1261, 0.00005, math.inf)] == ["0.00", "126.10", "0.050", "–"]
