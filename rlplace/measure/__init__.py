"""Measuring: hosts, costs and plans; the simulator that predicts a step, the runner that executes it."""

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
