"""Measuring: hosts, costs and plans; the simulator that predicts a step, the runner that executes it.

Importing this imports neither torch nor numba: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.measure.costs.costs import Costs
    from rlplace.measure.hosts.detect import detect_host
    from rlplace.measure.hosts.host import Device, Host, Link, Route
    from rlplace.measure.hosts.resolve import list_presets, resolve_host
    from rlplace.measure.measurement import Measurement, Measurer
    from rlplace.measure.placement import Placement, load_placement, save_placement
    from rlplace.measure.plan import Plan
    from rlplace.measure.problem import Problem
    from rlplace.measure.run.race import RaceProtocol, race
    from rlplace.measure.run.runner import HostRunner
    from rlplace.measure.simulate.ranks import upward_ranks
    from rlplace.measure.simulate.simulator import Simulator
    from rlplace.measure.timeline import Timeline

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
    "Costs": "rlplace.measure.costs.costs",
    "Device": "rlplace.measure.hosts.host",
    "Host": "rlplace.measure.hosts.host",
    "HostRunner": "rlplace.measure.run.runner",
    "Link": "rlplace.measure.hosts.host",
    "Measurement": "rlplace.measure.measurement",
    "Measurer": "rlplace.measure.measurement",
    "Placement": "rlplace.measure.placement",
    "Plan": "rlplace.measure.plan",
    "Problem": "rlplace.measure.problem",
    "RaceProtocol": "rlplace.measure.run.race",
    "Route": "rlplace.measure.hosts.host",
    "Simulator": "rlplace.measure.simulate.simulator",
    "Timeline": "rlplace.measure.timeline",
    "detect_host": "rlplace.measure.hosts.detect",
    "list_presets": "rlplace.measure.hosts.resolve",
    "load_placement": "rlplace.measure.placement",
    "race": "rlplace.measure.run.race",
    "resolve_host": "rlplace.measure.hosts.resolve",
    "save_placement": "rlplace.measure.placement",
    "upward_ranks": "rlplace.measure.simulate.ranks",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
