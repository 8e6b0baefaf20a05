"""`idle_share`: how much of this machine nobody uses, beside which a measured time is read."""

from __future__ import annotations

import time


def idle_share(seconds: float = 0.5) -> float:
    """Share of this machine's CPU time that nobody used over `seconds`: 1 on an idle machine; nan if unknown."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return float("nan")
    total = sum(after) - sum(before)
    return (after[3] + after[4] - before[3] - before[4]) / total if total else float("nan")


def _cpu_times() -> list[int]:
    with open("/proc/stat", encoding="ascii") as lines:
        return [int(value) for value in lines.readline().split()[1:9]]
