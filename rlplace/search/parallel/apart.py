"""Roles that people place apart from the rest: experts of a mixture, each on a device, and embedding tables."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import FORWARD
from rlplace.measure.problem import Problem
from rlplace.search.parallel.step_roles import StepRoles

EXPERTS = "experts"
"""Name of the module whose numbered children are experts."""
LOOKUP = "aten.embedding"
"""How the targets of ops that look rows up in a table begin."""


def apart_roles(problem: Problem, step: StepRoles, devices: NDArray[np.int32]) -> list[tuple[str, NDArray[np.int32]]]:
    """What may be apart, in words, and (R,) int32 the device of each of its roles, -1 for all others.

    Expert n of every layer has the same device, for all micro-batches; tables, largest first, go where the fewest bytes
    of tables are.

    Args:
        problem: what is placed.
        step: its roles.
        devices: (D',) where they are dealt out.
    """
    found = []
    for what, device_at in (("experts", _experts(problem, step, devices)), ("tables", _tables(problem, step, devices))):
        if np.any(device_at >= 0):
            found.append((what, device_at[step.position]))
    return found


def _experts(problem: Problem, step: StepRoles, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """(P,) int32: the device of each place of the chain that belongs to an expert, else -1."""
    graph = problem.graph
    numbers = {path: _expert(path) for path in set(graph.modules)}
    expert = np.array([numbers[path] for path in graph.modules], dtype=np.int64)
    found = np.full(step.num_positions, -1, dtype=np.int32)
    count = int(expert.max(initial=-1)) + 1
    inside = np.flatnonzero((expert >= 0) & (step.follows >= 0) & (graph.phases == FORWARD))
    if count > 1:
        found[step.op_position[inside]] = devices[expert[inside] * len(devices) // count]
    return found


def _expert(path: str) -> int:
    """The number of the expert that a module belongs to; -1 for none."""
    words = path.split(".")
    for name, number in itertools.pairwise(words):
        if name == EXPERTS and number.isdecimal():
            return int(number)
    return -1


def _tables(problem: Problem, step: StepRoles, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """(P,) int32: the device of each place of the chain that looks up a table, with that table, else -1."""
    graph = problem.graph
    producer, reader = graph.tensor_op[graph.input_tensors], graph.edge_op
    looks = np.array([target.startswith(LOOKUP) for target in graph.targets]) & (graph.phases == FORWARD)
    edges = looks[reader] & (graph.parameter_bytes[producer] > 0) & (step.follows[reader] >= 0)
    found = np.full(step.num_positions, -1, dtype=np.int32)
    tables = np.unique(producer[edges])
    if len(tables) < 2:
        return found
    place, filled = step.op_position, np.zeros(len(devices))
    for table in tables[np.argsort(-graph.parameter_bytes[tables], kind="stable")].tolist():
        least = int(filled.argmin())
        filled[least] += graph.parameter_bytes[table]
        found[place[table]] = devices[least]
    return found
