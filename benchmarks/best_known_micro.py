"""The best step time known for each problem of `core-micro`: python benchmarks/best_known_micro.py [--share K/M].

Every problem begins with what is known of whole ops (`best_known.json`) and what `core.py core-micro` found, and is
searched in passes, half a million evaluations in all. Each pass chooses the number of micro-batches and the order of
ops anew; from the second on it also starts from what is known, if it chooses that number. Where whole ops are best
after the first pass, and were searched for as long, there is no other. `best_known_micro.json` has it all, so
that the command goes on where it was stopped, and several may run at once. `--refresh` searches nothing.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from best_known import decode, encode, known, locked
from core_micro import SEARCH, counts_of, problem_of
from core_micro_table import KNOWN_CUT as STORE
from numpy.typing import NDArray
from record import RESULTS, argument, parse
from suites import CORE, WORKLOADS, key_of

from rlplace.files import read_json
from rlplace.measure import Problem, Simulator
from rlplace.search import Budget, find
from rlplace.search.parallel.choose_micro_batches import choose
from rlplace.search.parallel.pipelines import list_priorities

TABLE = RESULTS / "core-micro.json"
PASSES = ((0, 50_000), (1, 50_000), (2, 100_000), (3, 300_000))
"""Seed and evaluations of each pass, that for the choice included."""
Entry = dict[str, Any]


def ordered(problem: Problem, devices: NDArray[np.int32]) -> Iterator[tuple[str, float]]:
    """The step time of a placement in every order that can be named; a step that is not cut has one."""
    simulator = Simulator(problem, threads=1)
    if problem.graph.num_micro_batches == 1:
        yield "rank", float(simulator.step_times(devices[None])[0])
        return
    for name, priorities in list_priorities(problem).items():
        yield name, float(simulator.step_times(devices[None], priorities)[0])


def fresh_entry(workload: str, host: str) -> Entry:
    """What is known of whole ops."""
    whole = known()[key_of(workload, host)]
    kept = {name: whole[name] for name in ("graph_fingerprint", "host_fingerprint", "devices", "found_by")}
    return {
        "workload": WORKLOADS[workload],
        "host": host,
        "count": 1,
        "op_order": "rank",
        "step_time_s": whole["step_time_s"],
        **kept,
        "whole_evaluations": whole["evaluations"],
        "evaluations": 0,
        "runs": [],
    }


def refresh(workload: str, host: str) -> None:
    """Takes in what is known of whole ops and what the committed table has; begins anew where the graph is another."""
    key, fresh = key_of(workload, host), fresh_entry(workload, host)
    entry = known(STORE).get(key, fresh)
    if problem_of(workload, host, entry["count"]).graph.fingerprint != entry["graph_fingerprint"]:
        entry = fresh
    whole = {name: value for name, value in fresh.items() if name not in ("evaluations", "runs")}
    is_whole_better = (fresh["step_time_s"] or math.inf) < (entry["step_time_s"] or math.inf)
    entry |= whole if is_whole_better else {"whole_evaluations": fresh["whole_evaluations"]}
    with locked(STORE) as problems:
        problems[key] = entry
    for row in read_json(TABLE)["rows"]:
        if row["problem"] != key or row["method"] != SEARCH or row["step_time_s"] is None:
            continue
        problem = problem_of(workload, host, row["count"])
        run = {"seed": 0, **{name: row[name] for name in ("allowed", "evaluations", "count")}}
        run["seconds"] = round(row["seconds"], 1)
        if problem.graph.fingerprint == row["graph_fingerprint"] and not any(
            run.items() <= other.items() for other in entry["runs"]
        ):
            keep(key, problem, [decode(row["devices"])], run)


def improve(workload: str, host: str, number: int, threads: int) -> None:
    """Runs pass `number` on one problem, unless it was run, or whole ops are best and were searched for long enough."""
    key, (seed, evaluations) = key_of(workload, host), PASSES[number]
    entry = known(STORE)[key]
    if any((run["seed"], run["allowed"]) == (seed, evaluations) for run in entry["runs"]):
        return
    if number > 0 and entry["count"] == 1 and entry["whole_evaluations"] >= sum(size for _, size in PASSES):
        return
    begin = time.monotonic()
    chosen = choose(
        {count: partial(problem_of, workload, host, count) for count in counts_of(host)},
        evaluations=evaluations,
        seed=seed,
    )
    problem, left = chosen.problem, evaluations - chosen.spent
    goes_on = number > 0 and entry["count"] == problem.graph.num_micro_batches  # in whichever order is chosen now
    start = decode(entry["devices"]) if goes_on else chosen.devices
    found = find(problem, SEARCH, Simulator(problem, threads=threads), Budget(left), seed=seed, start=start)
    run = {
        "seed": seed,
        "allowed": evaluations,
        "evaluations": chosen.spent + found.evaluations,
        "count": problem.graph.num_micro_batches,
        "seconds": round(time.monotonic() - begin, 1),
    }
    placements = [devices for devices in (found.devices, chosen.devices) if devices is not None]
    keep(key, problem, placements, run)


def keep(key: str, problem: Problem, placements: Sequence[NDArray[np.int32]], run: Entry) -> None:
    """Adds a run to a problem's entry, and the best of its placements in the best order where that is better."""
    times = [(step_s, name, place) for place, one in enumerate(placements) for name, step_s in ordered(problem, one)]
    step_s, order, place = min(times, default=(math.inf, "", -1))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    told = f"{step_s * 1e3:.3f} ms, {run['count']} micro-batches, {run['seconds']:.0f} s"
    print(f"{key} seed {run['seed']}: {told}", flush=True)
    with locked(STORE) as problems:
        entry = problems[key]
        entry["runs"].append(run | {"step_time_s": step_s if placements else None, "date": today})
        entry["evaluations"] += run["evaluations"]
        if step_s < (entry["step_time_s"] or math.inf):
            entry |= {
                "count": run["count"],
                "op_order": order,
                "step_time_s": step_s,
                "graph_fingerprint": problem.graph.fingerprint,
                "host_fingerprint": problem.host.fingerprint,
                "devices": encode(placements[place]),
                "found_by": f"{SEARCH}, seed {run['seed']}, {run['evaluations']:,} evaluations",
            }
        problems[key] = entry


def main() -> None:
    options = parse(
        __doc__,
        argument("--share", default="0/1", help="K/M: only every M-th problem, from the K-th"),
        argument("--workloads", default=",".join(WORKLOADS), help="only these"),
        argument("--threads", type=int, default=1),
        argument("--refresh", action="store_true", help="no search: only take in what is known elsewhere"),
    )
    first, step = (int(part) for part in options.share.split("/"))
    wanted = options.workloads.split(",")
    problems = sorted((names for names in CORE if names[0] in wanted), key=lambda names: wanted.index(names[0]))
    for workload, host in problems[first::step]:
        refresh(workload, host)
    for number in range(0 if options.refresh else len(PASSES)):
        for workload, host in problems[first::step]:
            improve(workload, host, number, options.threads)


if __name__ == "__main__":
    main()
