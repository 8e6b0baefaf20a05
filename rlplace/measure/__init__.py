"""Measuring: hosts, costs and plans; the simulator that predicts a step, the runner that executes it.

`problem` is a graph on a host with costs, `placement` the device of each op, `measurement` the outcome, `evaluator`
measures plans. `simulate` predicts a step, `execute` is a plan as running code, `timing` times it, `isolate` does so
in another process. `costs` and `hosts` are the parts of a problem, `host_model` is learned from measurements, `explain`
splits a step time into its parts, `bounds` proves lower bounds, `truth` hides a true problem behind a nominal one, and
`prediction_error` compares simulated and measured steps.

Importing this imports neither torch nor numba: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.measure.costs.costs import Costs
    from rlplace.measure.hosts.detect import detect_host
    from rlplace.measure.hosts.host import Device, Host, Link, Route
    from rlplace.measure.hosts.resolve import list_presets, resolve_host
    from rlplace.measure.measurement import Measurement, Measurer
    from rlplace.measure.placement import Placement, load_placement, save_placement
    from rlplace.measure.problem import Plan, Problem, Timeline
    from rlplace.measure.simulate.compiled_problem import upward_ranks
    from rlplace.measure.simulate.simulator import Simulator
    from rlplace.measure.timing.host_runner import HostRunner
    from rlplace.measure.timing.race import RaceProtocol, race

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

__getattr__ = lazy(__name__, __file__)
