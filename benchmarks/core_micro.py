"""The problems of `core` in micro-batches: python benchmarks/core.py core-micro, then again with --render.

The same models, hosts and global batches as in `core`; every method chooses how many micro-batches there are, from 1 to
four for each device and at most 64, and what it tries for that counts as its evaluations. What is done is kept in
`results/NAME.jsonl`, a line a row: the command goes on where it was stopped, and processes with a share each
(`--shard 1/2`) may run at once. `--render` writes `results/NAME.json` and `results/NAME.md`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from best_known import encode
from core_micro_table import markdown
from core_true import append, finished, read_lines
from numpy.typing import NDArray
from record import RESULTS, argument, parse, record, save
from suites import CORE, CORE_DEV, WORKLOADS, graph_of, key_of

from rlplace.errors import UserError
from rlplace.graphs import OpGraph
from rlplace.measure import Problem, Simulator, resolve_host
from rlplace.search import Budget, find
from rlplace.search.parallel.choose_micro_batches import choose
from rlplace.session.prepare import capture_workload
from rlplace.workloads import Workload, build_for, parse_workload

NAME = "core-micro"
SEARCH = "portfolio"
FIELD = ("data-parallel", "pipeline", "hybrid")
"""What people do by hand, as methods: each is given every number of micro-batches, and its best one counts."""
EVALUATIONS, QUICK = 10_000, 500
MOST, EACH = 64, 4
"""Micro-batches at most, in all and for each device ..."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""... and the numbers that are tried: powers of two, and what is half way between them."""
PATIENCE = 4
"""After so many numbers in a row that were no better, a method of `FIELD` is given no larger ones."""
BUILT_FOR = "4xV100-pcie"
"""Any simulated host: models are the same on all of them, and never allocated."""
Line = dict[str, Any]


@lru_cache(maxsize=8)
def cut_graph(workload: str, count: int) -> OpGraph:
    """The step of a workload of the suite, its batch cut; without its program, which nothing here runs."""
    if count == 1:
        return graph_of(workload)
    begin = time.monotonic()
    graph = capture_workload(_built(workload), count)
    print(
        f"{workload}, {count} micro-batches: {graph.num_ops:,} ops, {time.monotonic() - begin:.0f} s", file=sys.stderr
    )
    return dataclasses.replace(graph, program=None)


@lru_cache(maxsize=1)
def _built(workload: str) -> Workload:
    return build_for(parse_workload(WORKLOADS[workload]), resolve_host(BUILT_FOR), 0)


def problem_of(workload: str, host: str, count: int) -> Problem:
    """A problem of the suite with `count` micro-batches, with estimated costs and the default grouping."""
    return Problem.estimate(cut_graph(workload, count), resolve_host(host))


def counts_of(host: str) -> list[int]:
    """The numbers of micro-batches that may be chosen."""
    most = min(MOST, EACH * resolve_host(host).num_devices)
    return [count for count in COUNTS if count <= most]


def search(workload: str, host: str, evaluations: int, threads: int) -> Line:
    """What `portfolio` finds: first which number of micro-batches and order of ops, then where every op runs."""
    begin = time.monotonic()
    chosen = choose(
        {count: partial(problem_of, workload, host, count) for count in counts_of(host)},
        evaluations=evaluations,
        seed=0,
        say=partial(print, file=sys.stderr),
    )
    choice_s = time.monotonic() - begin
    left = max(evaluations - chosen.spent, 1)
    found = find(chosen.problem, SEARCH, Simulator(chosen.problem, threads=threads), Budget(evaluations=left))
    best = min((found, chosen), key=lambda one: one.step_time_s)
    facts = {"choice_evaluations": chosen.spent, "choice_s": choice_s}
    return _answer(chosen.problem, best.devices, best.step_time_s, begin, chosen.spent + found.evaluations) | facts


def by_hand(method: str, workload: str, host: str, evaluations: int, threads: int) -> Line:
    """The best that a method of `FIELD` finds, over the numbers of micro-batches."""
    begin, best, spent, why = time.monotonic(), None, 0, ""
    in_vain = 0
    counts = counts_of(host)
    for number, count in enumerate(counts):
        share = max((evaluations - spent) // (len(counts) - number), 1)
        try:
            problem = problem_of(workload, host, count)
            found = find(problem, method, Simulator(problem, threads=threads), Budget(evaluations=share))
        except UserError as error:  # the batch cannot be cut so, or the method needs more micro-batches
            why = str(error)
            continue
        spent += found.evaluations
        in_vain += best is not None
        if found.devices is not None and (best is None or found.step_time_s < best["step_time_s"]):
            best, in_vain = _answer(problem, found.devices, found.step_time_s, begin, spent), 0
        if in_vain == PATIENCE:
            break
    if best is None:
        return {"status": "skipped" if why else "oom", "step_time_s": None, "why": why}
    return best | {"evaluations": spent, "seconds": time.monotonic() - begin}


def _answer(problem: Problem, devices: NDArray[np.int32] | None, step_s: float, begin: float, evaluations: int) -> Line:
    return {
        "status": "oom" if devices is None else "ok",
        "step_time_s": None if devices is None else step_s,
        "count": problem.graph.num_micro_batches,
        "op_order": problem.op_order,
        "num_ops": problem.graph.num_ops,
        "graph_fingerprint": problem.graph.fingerprint,
        "host_fingerprint": problem.host.fingerprint,
        "devices": "" if devices is None else encode(devices),
        "evaluations": evaluations,
        "seconds": time.monotonic() - begin,
    }


def key(line: Line) -> tuple[object, ...]:
    """Two lines with the same key answer the same question."""
    return tuple(line[name] for name in ("problem", "method", "allowed"))


def run(
    problems: Sequence[tuple[str, str]], methods: Sequence[str], evaluations: int, threads: int, path: Path
) -> None:
    """Runs what is missing; problems of one workload are side by side, so that each is captured once."""
    done = {key(line) for line in read_lines(path) if "method" in line}
    begin = time.monotonic()
    for number, (workload, host) in enumerate(problems, start=1):
        for method in methods:
            question = {"problem": key_of(workload, host), "method": method, "allowed": evaluations}
            if key(question) in done:
                continue
            solve: Callable[..., Line] = search if method == SEARCH else partial(by_hand, method)
            line = question | solve(workload, host, evaluations, threads)
            append(path, line)
            time_s = line["step_time_s"]
            told = line["status"] if time_s is None else f"{time_s * 1e3:.1f} ms with {line['count']} micro-batches"
            print(f"{question['problem']}, {method}: {told}", file=sys.stderr, flush=True)
        print(f"{number} of {len(problems)} problems, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def render(path: Path) -> None:
    """Writes the table, from what was finished, or from the committed results where there is nothing else."""
    kept = finished(path, key)
    save(path.with_suffix(""), kept, markdown(kept["rows"], kept), indent=None)


def main(arguments: Sequence[str]) -> None:
    """Runs or renders the suite; `arguments` are those behind its name."""
    options = parse(
        __doc__,
        argument("--methods", default=",".join((SEARCH, *FIELD))),
        argument("--evaluations", type=int, default=EVALUATIONS, help="of each method, its choice included"),
        argument("--quick", action="store_true", help=f"{QUICK} evaluations on the ten problems of core-dev"),
        argument("--problems", help="WORKLOAD/HOST, with semicolons between them: only these"),
        argument("--shard", default="1/1", help="I/N: every N-th workload, from the I-th"),
        argument("--threads", type=int, default=1, help="placements simulated at once"),
        argument("--name", help="of the results' files"),
        argument("--render", action="store_true", help="no run: the table of what was finished"),
        words=arguments,
        prog="core.py core-micro",
    )
    path = RESULTS / f"{options.name or (f'{NAME}-quick' if options.quick else NAME)}.jsonl"
    if options.render:
        render(path)
        return
    problems = list(CORE_DEV if options.quick else CORE)
    if options.problems is not None:
        problems = [names for names in problems if key_of(*names) in options.problems.split(";")]
    shard, shards = (int(part) for part in options.shard.split("/"))
    mine = list(WORKLOADS)[shard - 1 :: shards]
    problems = sorted((names for names in problems if names[0] in mine), key=lambda names: mine.index(names[0]))
    append(path, {"run": record()})
    run(problems, options.methods.split(","), QUICK if options.quick else options.evaluations, options.threads, path)
