"""What people and programs are told of a placement that went to another host: which devices, and what moved."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.problem import Problem
from rlplace.say import counted
from rlplace.training.elastic.devices import GONE, DeviceMatch
from rlplace.training.elastic.figures import CarriedCosts

MOST_LINES = 6
"""Pairs of devices that are told one by one, those with the most time first."""


def moves(problem: Problem, match: DeviceMatch, before: NDArray[np.int32], after: NDArray[np.int32]) -> dict[str, Any]:
    """What is not any more on the device that stands for its old one, as `--json` prints it.

    Args:
        problem: on the new host.
        match: of the two hosts.
        before: (N,) devices of the old one.
        after: (N,) of the new one.

    Returns:
        `num_ops` that moved, their `share` of the step's mean time, and `pairs`: `from`, `to`, `num_ops` and `share` of
        every pair of devices that ops moved between, the largest share first.
    """
    mean_s = problem.costs.op_time_s.mean(axis=1)
    whole_s = max(float(mean_s.sum()), 1e-30)
    stays = np.array(match.to, dtype=np.int32)
    has_moved = stays[before] != after
    num_new = problem.host.num_devices
    keys, place = np.unique(before[has_moved].astype(np.int64) * num_new + after[has_moved], return_inverse=True)
    counts = np.bincount(place, minlength=len(keys))
    seconds = np.bincount(place, weights=mean_s[has_moved], minlength=len(keys))
    pairs = [
        {
            "from": match.old.devices[int(key) // num_new].name,
            "to": problem.host.devices[int(key) % num_new].name,
            "num_ops": int(count),
            "share": float(second_s) / whole_s,
        }
        for key, count, second_s in sorted(zip(keys, counts, seconds, strict=True), key=lambda one: (-one[2], one[0]))
    ]
    share = float(mean_s[has_moved].sum()) / whole_s
    return {"num_ops": int(np.count_nonzero(has_moved)), "share": share, "pairs": pairs}


def describe_devices(match: DeviceMatch) -> dict[str, Any]:
    """The devices of both hosts, as `--json` prints them: which stands for which, which are gone, which were added."""
    return {"kept": match.renamed, "gone": list(match.gone), "added": list(match.added)}


def describe_costs(carried: CarriedCosts | None, match: DeviceMatch) -> dict[str, list[str]]:
    """Kinds of devices by where their op times come from, as `--json` prints them."""
    kinds = list(dict.fromkeys(device.kind for device in match.new.devices))
    if carried is None:
        return {"known": [], "estimated": [], "profiled": kinds}
    return {"known": list(carried.known), "estimated": list(carried.estimated), "profiled": []}


def device_lines(match: DeviceMatch) -> list[str]:
    """What changed of the devices, a line each."""
    others = [
        f"{old.name} is {match.new.devices[index].name} now"
        for old, index in zip(match.old.devices, match.to, strict=True)
        if index != GONE and match.new.devices[index].name != old.name
    ]
    lines = [f"devices: {', '.join(others)}"] if others else []
    lines += [f"gone: {', '.join(match.gone)}"] if match.gone else []
    lines += [f"added: {', '.join(match.added)}"] if match.added else []
    return lines


def move_lines(moved: dict[str, Any], num_ops: int) -> list[str]:
    """What moved, a line for all and one for each of the first pairs of devices."""
    if not moved["num_ops"]:
        return ["no op moved"]
    lines = [f"moved: {moved['num_ops']:,} of {counted(num_ops, 'op')}, {moved['share']:.0%} of the step's time"]
    pairs = moved["pairs"]
    lines += [
        f"  {pair['from']} to {pair['to']}: {counted(pair['num_ops'], 'op')}, {pair['share']:.0%}"
        for pair in pairs[:MOST_LINES]
    ]
    if len(pairs) > MOST_LINES:
        lines.append(f"  and between {counted(len(pairs) - MOST_LINES, 'more pair')} of devices")
    return lines
