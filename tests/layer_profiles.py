"""Small layer profiles as text, and problems made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from random_problems import plain_host

from rlplace.graphs.formats import load_graph, load_times_s
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem

Row = tuple[float, float, int, int]
"""Milliseconds forward and backward, bytes of activations and of parameters."""


def profile_text(rows: Sequence[Row], edges: Sequence[tuple[int, int]] | None = None) -> str:
    """A profile of layers `l0`, `l1`, ... of nodes 1, 2, ...; a chain where no edges are given."""
    chain = [(index, index + 1) for index in range(len(rows) - 1)] if edges is None else edges
    lines = [
        f"node{index + 1} -- l{index} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={activation}, parameter_size={parameter}"
        for index, (forward, backward, activation, parameter) in enumerate(rows)
    ]
    return "\n".join([*lines, *(f"\tnode{source + 1} -- node{reader + 1}" for source, reader in chain), ""])


def profile_problem(
    folder: Path,
    rows: Sequence[Row],
    micro_batches: int,
    host: Host | int,
    edges: Sequence[tuple[int, int]] | None = None,
) -> Problem:
    """A problem of a profile, on a plain host of so many devices where none is given."""
    path = folder / "profile.txt"
    path.write_text(profile_text(rows, edges))
    host = plain_host(host) if isinstance(host, int) else host
    times_s = load_times_s(path, micro_batches=micro_batches)
    assert times_s is not None
    return Problem.grouped(load_graph(path, micro_batches=micro_batches), host, Costs.given(times_s, host))
