"""Measuring: hosts, costs and plans; the simulator that predicts a step, the runner that executes it.

Importing this imports neither torch nor numba: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.measure.costs import Costs
    from rlplace.measure.detect import detect_host
    from rlplace.measure.host import Device, Host, Link, Route
    from rlplace.measure.hosts import list_presets, resolve_host
    from rlplace.measure.measurement import Measurement, Measurer, Timeline
    from rlplace.measure.placement import Placement, load_placement, save_placement
    from rlplace.measure.plan import Plan
    from rlplace.measure.problem import Problem
    from rlplace.measure.race import RaceProtocol, race
    from rlplace.measure.ranks import upward_ranks
    from rlplace.measure.runner import HostRunner
    from rlplace.measure.simulator import Simulator

__all__ = [
    "Costs",
    "Device",
    "Host",
    "HostRunner",
    "Link",
    "Measurement",
    "Measurer",
    "Placement",
    "Plan",
    "Problem",
    "RaceProtocol",
    "Route",
    "Simulator",
    "Timeline",
    "detect_host",
    "list_presets",
    "load_placement",
    "race",
    "resolve_host",
    "save_placement",
    "upward_ranks",
]

_HOMES = {
    "Costs": "rlplace.measure.costs",
    "Device": "rlplace.measure.host",
    "Host": "rlplace.measure.host",
    "HostRunner": "rlplace.measure.runner",
    "Link": "rlplace.measure.host",
    "Measurement": "rlplace.measure.measurement",
    "Measurer": "rlplace.measure.measurement",
    "Placement": "rlplace.measure.placement",
    "Plan": "rlplace.measure.plan",
    "Problem": "rlplace.measure.problem",
    "RaceProtocol": "rlplace.measure.race",
    "Route": "rlplace.measure.host",
    "Simulator": "rlplace.measure.simulator",
    "Timeline": "rlplace.measure.measurement",
    "detect_host": "rlplace.measure.detect",
    "list_presets": "rlplace.measure.hosts",
    "load_placement": "rlplace.measure.placement",
    "race": "rlplace.measure.race",
    "resolve_host": "rlplace.measure.hosts",
    "save_placement": "rlplace.measure.placement",
    "upward_ranks": "rlplace.measure.ranks",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
