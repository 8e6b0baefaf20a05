"""`find_measurer`: what an env measures with, from what `gymnasium.make` can be given: an object, or words alone."""

from __future__ import annotations

from typing import Any

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem

NUM_GROUPS = 256
"""Groups to aim at where a workload is named."""


class SharedMeasurer:
    """A measurer that copies of an env's spec share: it may hold threads, and a host cannot be copied."""

    def __init__(self, measurer: Measurer) -> None:
        self.measurer = measurer

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMeasurer:
        return self


def find_measurer(
    measurer: Measurer | SharedMeasurer | None,
    problem: Problem | None,
    workload: str | None,
    host: str | Host,
    num_groups: int,
    workload_seed: int,
    *,
    runs: bool,
) -> tuple[Measurer, bool]:
    """What placements are measured with, and whether it was made here, so that the env has to close it.

    Args:
        measurer: what measures placements; or
        problem: what is placed; or
        workload: a WORKLOAD word, e.g. `nmt@small`, which is captured;
        host: a HOST word, e.g. `4xV100-pcie`, or a host, that goes with a workload.
        num_groups: groups to aim at, of a workload.
        workload_seed: of a workload's weights and inputs.
        runs: run placements on the problem's host, which is this machine; otherwise they are simulated.

    Raises:
        InvalidValue: not exactly one of measurer, problem and workload, or a host that cannot run anything.
        UserError: no such workload or host.
    """
    given: dict[str, object] = {"measurer": measurer, "problem": problem, "workload": workload}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        hint = 'For example `workload="nmt@small", host="4xV100-pcie"`.'
        expected = "exactly one of measurer, problem and workload"
        raise InvalidValue("given", " and ".join(names) or "nothing to place", expected, where="environment", hint=hint)
    if isinstance(given["problem"], str):
        hint = f"For a problem made from words: `workload={problem!r}, host=...`."
        raise InvalidValue("problem", problem, "a `Problem`", where="environment", hint=hint)
    if measurer is not None:
        return (measurer.measurer if isinstance(measurer, SharedMeasurer) else measurer), False
    if problem is None:
        problem = _problem_of(str(workload), host, num_groups, workload_seed)
    return _made(problem, runs=runs), True


def _made(problem: Problem, *, runs: bool) -> Measurer:
    from rlplace.measure.simulate.simulator import Simulator

    simulator = Simulator(problem, threads=1)  # an env measures one placement at a time
    if not runs:
        return simulator
    from rlplace.measure.timing.host_runner import HostRunner

    return HostRunner(problem, simulator)


def _problem_of(workload: str, host: str | Host, num_groups: int, workload_seed: int) -> Problem:
    from rlplace.measure.hosts.resolve import resolve_host
    from rlplace.report.console import make_progress
    from rlplace.session.steps import Steps, make_problem
    from rlplace.workloads import parse_workload

    spec, place = parse_workload(workload), resolve_host(host) if isinstance(host, str) else host
    graph = Steps(spec, place, workload_seed).graph(1)
    return make_problem(graph, place, num_groups, make_progress(is_quiet=True).say, spec=spec)
