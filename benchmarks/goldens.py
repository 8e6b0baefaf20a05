"""Whether simulated results are still the same, to the bit: python benchmarks/goldens.py

For ten problems, three seeds and every method, and for `learned` beside two hidden truths: the step time, a hash of the
devices and the fingerprint of the plan. Problems with a cut batch are there as well. Compared with
`results/goldens.json`; exits with 1 if a row differs or is missing. `--write` makes that file anew, `--only PREFIX`
takes the problems whose name begins so. Nine minutes on two idle cores; times are not measured.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from core_micro import problem_of as cut_problem_of
from hidden_truth import TrueConfig, compare_true
from record import RESULTS, argument, parse
from suites import CORE_DEV, problem_of

from rlplace.compare import CompareConfig, Row, compare
from rlplace.files import read_json, write_json_atomic
from rlplace.measure import Problem
from rlplace.measure.truth import Truth

EVALUATIONS, SEEDS, MEASURED = 500, 3, 16
CUT = (("gpt2", "4xV100-pcie", 4), ("rnnlm", "2xK80", 2))
CUT_METHODS = ("data-parallel", "pipeline", "hybrid", "portfolio", "anneal", "op-order")
TRUE = (("rnnlm", "2xK80", "hard:0"), ("clip", "RTX4090+RTX3060", "moderate:1"))
Golden = dict[str, str]


def main() -> int:
    asked = parse(
        (__doc__ or "").split("\n", maxsplit=1)[0],
        argument("--write", action="store_true"),
        argument("--only", default=""),
        argument("--file", type=Path, default=RESULTS / "goldens.json"),
    )
    found: Golden = {}
    for name, rows in problems(asked.only):
        for row in rows:
            found[f"{name} {row.method} {row.seed}"] = golden(row)
        print(f"{name}: {len(rows)} rows", file=sys.stderr, flush=True)
    if asked.write:
        write_json_atomic(asked.file, dict(sorted(found.items())))
        return 0
    known = {key: row for key, row in read_json(asked.file).items() if key.startswith(asked.only)}
    differing = [key for key in sorted(known | found) if known.get(key) != found.get(key)]
    for key in differing:
        print(f"{key}: was {known.get(key)}, is {found.get(key)}")
    print(f"{len(known)} rows, {len(differing)} differ")
    return 1 if differing else 0


def problems(prefix: str) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Each problem whose name begins with `prefix`, and its rows."""
    for workload, host in CORE_DEV:
        if (name := f"{workload}/{host}").startswith(prefix):
            yield name, methods(problem_of(workload, host), ("all",))
    for workload, host, count in CUT:
        if (name := f"{workload}/{host}/{count}").startswith(prefix):
            yield name, methods(cut_problem_of(workload, host, count), CUT_METHODS)
    for workload, host, truth in TRUE:
        if (name := f"{workload}/{host}/{truth}").startswith(prefix):
            config = TrueConfig(Truth.parse(truth), MEASURED, ("learned",))
            yield name, compare_true(problem_of(workload, host), config).rows


def methods(problem: Problem, names: tuple[str, ...]) -> tuple[Row, ...]:
    return compare(problem, CompareConfig(names, evaluations=EVALUATIONS, seeds=SEEDS)).rows


def golden(row: Row) -> str:
    """Status, step time, devices, plan."""
    devices = "" if row.devices is None else hashlib.sha256(row.devices.tobytes()).hexdigest()[:16]
    plan = "" if row.plan is None else row.plan.fingerprint[:16]
    return " ".join((row.status, float(row.value_s).hex(), devices or "-", plan or "-"))


if __name__ == "__main__":
    sys.exit(main())
