"""Placing a run's step again on other devices: python benchmarks/elastic.py OUT.json.

Runs on four simulated cores are placed again on three, on eight, and on cores of other kinds, from what the run knows
and from nothing, with the same number of simulated placements.
"""

from __future__ import annotations

import sys
import time
from statistics import geometric_mean
from typing import Any

from record import record

from rlplace.files import write_json_atomic
from rlplace.measure import Device, Host, Link, Placement, Problem, Route, Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.search import Budget, find
from rlplace.session.prepare import Prepared, Steps
from rlplace.session.session import Session
from rlplace.session.session_records import Request
from rlplace.session.setup import WHOLE
from rlplace.training import TrainConfig
from rlplace.training.elastic.placed_again import PORTFOLIO, KnownRun, replaced, search_again
from rlplace.workloads import parse_workload

WORKLOADS = ("nmt@small", "gpt2@small")
RUN_EVALUATIONS = 10_000
"""Of the run that is placed again."""
EVALUATIONS = (100, 400, 2000)
SEEDS = (0, 1, 2)


KINDS = {"core": (4e10, 1e10), "fast core": (8e10, 2e10)}
"""FLOP/s and bytes/s of one core of a server, and of one of twice its speed."""


def cores(*kinds: str) -> Host:
    """Cores of these kinds; a copy between two of them takes as long as it did on the machines that were measured."""
    devices = tuple(
        Device(
            f"cpu:{index}",
            kind,
            "simulated",
            1 << 36,
            memory_pool="ram",
            peak_flops_per_s={"float32": KINDS[kind][0]},
            memory_bandwidth_bytes_per_s=KINDS[kind][1],
            launch_s=3e-6,
        )
        for index, kind in enumerate(kinds)
    )
    pairs = [(one.name, other.name) for one in devices for other in devices if one is not other]
    links = tuple(Link(f"{one}->{other}", 8e9, 2e-5) for one, other in pairs)
    routes = tuple(Route(one, other, (f"{one}->{other}",), blocks_destination=True) for one, other in pairs)
    return Host(f"{len(kinds)} cores", devices, links, routes)


FROM = cores(*["core"] * 4)
TO = {
    "3 cores": cores(*["core"] * 3),
    "8 cores": cores(*["core"] * 8),
    "4 fast cores": cores(*["fast core"] * 4),
    "2 cores, 2 fast ones": cores("core", "core", "fast core", "fast core"),
}


@one_thread_here()
def main(out: str) -> None:
    rows = [row for workload in WORKLOADS for row in placed_again(workload)]
    result = {"schema": 1, **record(), "from": FROM.name, "run_evaluations": RUN_EVALUATIONS, "rows": rows}
    for count in EVALUATIONS:
        here = [row for row in rows if row["evaluations"] == count]
        means = {name: geometric_mean(row[name] for row in here) for name in ("over_nothing", "over_carried")}
        result[f"mean_{count}"] = means
        print(count, means)
    write_json_atomic(out, result)


def placed_again(workload: str) -> list[dict[str, Any]]:
    """A row for each host and number of evaluations."""
    known = run_of(workload)
    rows = []
    for name, host in TO.items():
        made = replaced(known, host, say=print)
        simulator = Simulator(made.believed, threads=1)
        assert made.start is not None
        carried_s = float(simulator.step_times(made.start[None])[0])
        for count in EVALUATIONS:
            begin_s = time.monotonic()
            # with the run's placement, and what `portfolio` finds without it
            again = [search_again(made, Budget(count), seed=seed).step_time_s for seed in SEEDS]
            spent_s = (time.monotonic() - begin_s) / len(SEEDS)
            nothing = [find(made.believed, PORTFOLIO, simulator, Budget(count), seed=s).step_time_s for s in SEEDS]
            rows.append(
                {
                    "workload": workload,
                    "host": name,
                    "evaluations": count,
                    "before_s": made.before_s,
                    "carried_s": carried_s,
                    "again_s": again,
                    "nothing_s": nothing,
                    "over_nothing": geometric_mean(again) / geometric_mean(nothing),
                    "over_carried": geometric_mean(again) / carried_s,
                    "seconds": spent_s,
                }
            )
            print({key: value for key, value in rows[-1].items() if key not in ("again_s", "nothing_s")})
    return rows


def run_of(workload: str) -> KnownRun:
    """A run on four cores, as its folder would tell of it."""
    spec = parse_workload(workload)
    problem = Problem.estimate(Steps(spec, FROM, 0).graph(1), FROM)
    simulator = Simulator(problem, threads=1)
    found = find(problem, PORTFOLIO, simulator, Budget(RUN_EVALUATIONS))
    assert found.devices is not None
    plan = found.plan if found.plan is not None else simulator.plan(found.devices)
    placement = Placement.of(problem, plan, PORTFOLIO)
    session = Session.in_memory()
    session.keep(request=Request(str(spec), FROM.name, FROM.fingerprint, "small"), config=TrainConfig())
    session.keep_problem(Prepared(problem, WHOLE))
    session.keep_placement(placement)
    return KnownRun.of(session, spec)


if __name__ == "__main__":
    main(sys.argv[1])
