"""The best step time known for each problem of a suite: python benchmarks/best_known.py core [--share K/M].

Every problem is searched in passes, a million evaluations in the first four, each of another seed or length; what is
known already is kept in `benchmarks/best_known.json`, so that the command goes on where it was stopped, and several may
run at once. A placement that annealing gives up, because it can no longer be accepted, counts as an evaluation too.
"""

from __future__ import annotations

import datetime
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import argument, parse
from suites import SUITES, WORKLOADS, key_of, problem_of

from rlplace.files import read_json, write_json_atomic
from rlplace.measure import Problem, Simulator
from rlplace.measure.bounds import lower_bound_s
from rlplace.search import Budget, find

STORE = Path(__file__).parent / "best_known.json"
PASSES = (
    (0, 50_000), (3, 50_000), (1, 200_000), (2, 700_000), (4, 500_000),
    (0, 10_000), (5, 300_000), (6, 30_000), (7, 30_000), (8, 30_000), (9, 30_000),
)  # fmt: skip
"""Seed and evaluations of each pass; one is what `core.py` runs of `portfolio` ..."""
ONLY = dict.fromkeys(range(6, len(PASSES)), ("rnnlm", "nmt"))
"""... and the workloads of those passes that are not for all: when searches learned to see ops that repeat."""
METHOD = "portfolio"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def encode(devices: NDArray[np.int32]) -> str:
    """A placement as one digit an op, in base 36."""
    return "".join(DIGITS[device] for device in devices.tolist())


def decode(text: str) -> NDArray[np.int32]:
    """The placement in such a string."""
    return np.array([DIGITS.index(digit) for digit in text], dtype=np.int32)


def known(store: Path = STORE) -> dict[str, Any]:
    """Entries by problem."""
    return read_json(store)["problems"] if store.exists() else {}


@contextmanager
def locked(store: Path = STORE) -> Iterator[dict[str, Any]]:
    """The entries, to be changed by one process at a time, and written back."""
    with open(store.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        problems = known(store)
        yield problems
        write_json_atomic(store, {"schema": 1, "problems": dict(sorted(problems.items()))}, indent=1)


def fresh_entry(problem: Problem, workload: str, host: str) -> dict[str, Any]:
    """An entry that knows nothing yet."""
    bound_s, bound = lower_bound_s(problem)
    return {
        "workload": WORKLOADS[workload],
        "host": host,
        "graph_fingerprint": problem.graph.fingerprint,
        "host_fingerprint": problem.host.fingerprint,
        "lower_bound_s": bound_s,
        "lower_bound": bound,
        "step_time_s": None,
        "devices": "",
        "found_by": "",
        "evaluations": 0,
        "runs": [],
    }


def improve(workload: str, host: str, number: int, threads: int) -> None:
    """Runs pass `number` on one problem, unless it was run on the same graph and host."""
    key, (seed, evaluations) = key_of(workload, host), PASSES[number]
    problem = problem_of(workload, host)
    fresh = fresh_entry(problem, workload, host)
    entry = known().get(key, fresh)
    is_same = all(entry[name] == fresh[name] for name in ("graph_fingerprint", "host_fingerprint"))
    if is_same and (METHOD, seed, evaluations) in {
        (run["method"], run["seed"], run["evaluations"]) for run in entry["runs"]
    }:
        return
    begin = time.monotonic()
    found = find(problem, METHOD, Simulator(problem, threads=threads), Budget(evaluations=evaluations), seed=seed)
    seconds = time.monotonic() - begin
    print(
        f"{key} seed {seed}: {found.step_time_s * 1e3:.3f} ms, {found.evaluations:,} evaluations, {seconds:.0f} s",
        flush=True,
    )
    run = {
        "method": METHOD,
        "seed": seed,
        "evaluations": found.evaluations,
        "seconds": round(seconds, 1),
        "step_time_s": found.step_time_s if found.devices is not None else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    with locked() as problems:
        entry = problems.get(key, fresh)
        if any(entry[name] != fresh[name] for name in ("graph_fingerprint", "host_fingerprint")):
            entry = fresh
        entry |= {"lower_bound_s": fresh["lower_bound_s"], "lower_bound": fresh["lower_bound"]}
        entry["runs"].append(run)
        entry["evaluations"] += found.evaluations
        if found.devices is not None and (entry["step_time_s"] is None or found.step_time_s < entry["step_time_s"]):
            entry["step_time_s"] = found.step_time_s
            entry["devices"] = encode(found.devices)
            entry["found_by"] = f"{METHOD}, seed {seed}, {found.evaluations:,} evaluations"
        problems[key] = entry


def main() -> None:
    options = parse(
        __doc__,
        argument("suite", choices=("core", "core-dev")),
        argument("--share", default="0/1", help="K/M: only every M-th problem, from the K-th"),
        argument("--threads", type=int, default=1),
    )
    first, step = (int(part) for part in options.share.split("/"))
    for number in range(len(PASSES)):
        for workload, host in SUITES[options.suite][first::step]:
            if workload in ONLY.get(number, WORKLOADS):
                improve(workload, host, number, options.threads)


if __name__ == "__main__":
    main()
