"""Splits on the problems of `core-micro` and larger layers: python benchmarks/core.py core-split, then with --render.

`auto` chooses micro-batches, the order of ops and the split; `unsplit` the same without a split, at equal evaluations
and seeds. `tensor-parallel` and `hybrid-3d` are given every number of shards and micro-batches, and the best one
counts, as do the methods of `core-micro` with every number of micro-batches; `ring` is an estimate. Each placement is
also timed with costs whose efficiency depends on the size of ops, and a split has to be better with both. What is done
is in `results/NAME.jsonl`, a line a row: the command goes on where it was stopped, and processes with a share each
(`--shard 1/2`) may run at once.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import core_micro
import numpy as np
from core_micro import BUILT_FOR, EVALUATIONS, FIELD, SEARCH, counts_of
from core_true import append, finished, read_lines
from numpy.typing import NDArray
from record import RESULTS, argument, as_markdown, parse, record, save, table
from suites import CORE, WORKLOADS, graph_of, key_of

from rlplace.errors import UserError
from rlplace.graphs import OpGraph, SplitPlan, capture
from rlplace.graphs.capturing.trace import kept_traces
from rlplace.measure import Plan, Problem, Simulator, resolve_host
from rlplace.measure.bounds import even_split_s
from rlplace.measure.placement import PlacedSplit
from rlplace.search import METHODS, Budget, find
from rlplace.search.parallel.choose_micro_batches import choose, shard_counts, shares_of, sized
from rlplace.session.prepare import capture_workload
from rlplace.workloads import Workload, build_for, parse_workload

NAME = "core-split"
INFERENCE = "-inference"
LARGE = {
    "llama-8": "llama@paper,layers=8,batch=1",
    f"llama-8{INFERENCE}": "llama@paper,layers=8,batch=1",
    "gpt2-1": "gpt2@paper,batch=1",
}
"""Steps of one sample, which have no batch to cut."""
SUITE = (*CORE, *((workload, host) for workload in LARGE for host in ("4xA100-nvlink", "4xV100-pcie")))
SPLIT_FIELD = ("tensor-parallel", "hybrid-3d")
"""What people do by hand with shards."""
RING = "ring"
"""Data parallelism with a ring, an estimate that no plan of ours has to reach: smaller batches are as efficient."""
COSTS = ("step_time_s", "by_size_s")
"""Step times of a row: with the costs that are searched on, and with costs by size."""
MEGATRON = ("vocabulary", "attention", "mlp", "experts")
Line = dict[str, Any]


@lru_cache(maxsize=1)
def _built(workload: str) -> Workload:
    return build_for(parse_workload((WORKLOADS | LARGE)[workload]), resolve_host(BUILT_FOR), 0)


@cache
def captured(workload: str, count: int, plan: SplitPlan | None = None) -> tuple[OpGraph | UserError, float]:
    """The step of a workload, its batch cut and its ops split, or why there is none; and the seconds of its capture.

    It is without its program, which nothing here runs. All of one workload are kept until the next one begins.
    """
    begin = time.process_time()
    try:
        graph = _capture(workload, count, plan)
    except UserError as error:
        return error.with_traceback(None), time.process_time() - begin
    took = time.process_time() - begin
    print(f"{workload}, {count}, {plan}: {graph.num_ops:,} ops, {took:.0f} s", file=sys.stderr)
    return dataclasses.replace(graph, program=None), took


def _capture(workload: str, count: int, plan: SplitPlan | None) -> OpGraph:
    if plan is None and count == 1 and workload in WORKLOADS:
        return graph_of(workload)
    work = _built(workload)
    if not workload.endswith(INFERENCE):
        return capture_workload(work, count, split=plan)
    inputs = work.inputs
    given = {n: v for n, v in inputs.items() if n != "labels"} if isinstance(inputs, Mapping) else inputs
    return capture(work.model.eval(), given, split=plan, micro_batches=count)


def problem_of(workload: str, host: str, count: int, plan: SplitPlan | None = None) -> Problem:
    """A problem of the suite, with estimated costs and the default grouping.

    Raises:
        UserError: its batch cannot be cut so, or its ops cannot be split so.
    """
    graph, _ = captured(workload, count, plan)
    if isinstance(graph, UserError):
        raise graph
    return Problem.estimate(graph, resolve_host(host))


def numbers_of(workload: str, host: str, most: int) -> list[int]:
    """The numbers of micro-batches that may be chosen; one where there is one sample."""
    return [count for count in counts_of(host) if count <= most] if workload in WORKLOADS else [1]


def search(workload: str, host: str, evaluations: int, seed: int, most: int, *, splits: bool) -> Line:
    """What `portfolio` finds, all choices included; `choice_s` has all captures, those that were kept too."""
    begin, kept_s = time.process_time(), 0.0

    def make(count: int, plan: SplitPlan | None = None) -> Problem:
        nonlocal kept_s
        asked = time.process_time()
        took = captured(workload, count, plan)[1]
        kept_s += max(took - (time.process_time() - asked), 0.0)
        return problem_of(workload, host, count, plan)

    with kept_traces():
        chosen = choose(
            {count: partial(make, count) for count in numbers_of(workload, host, most)},
            evaluations=evaluations,
            seed=seed,
            say=partial(print, file=sys.stderr, flush=True),
            split=make if splits else None,
            by_size=True,
        )
    choice_s = time.process_time() - begin + kept_s
    left = Budget(evaluations=max(evaluations - chosen.spent, 1))
    found = find(chosen.problem, SEARCH, Simulator(chosen.problem, threads=1), left, seed=seed, start=chosen.devices)
    step_s = min(found.step_time_s, chosen.step_time_s)
    is_found = found.step_time_s == step_s
    devices, order = (found.devices, found.plan) if is_found else (chosen.devices, None)
    plan = chosen.split
    return {
        "step_time_s": step_s if step_s < float("inf") else None,
        "by_size_s": by_size_s(chosen.problem, devices, order),
        "count": chosen.num_micro_batches,
        "op_order": chosen.op_order,
        "split": "" if plan is None else str(PlacedSplit(**plan.words)),
        "evaluations": chosen.spent + found.evaluations,
        "choice_s": choice_s,
        "seconds": time.process_time() - begin,
    }


def by_size_s(problem: Problem, devices: NDArray[np.int32] | None, plan: Plan | None = None) -> float | None:
    """The step time with costs by size of a placement, in the order of its plan or the problem's; None where they are
    unknown."""
    with_sizes = None if devices is None else sized(problem)
    if devices is None or with_sizes is None:
        return None
    simulator = Simulator(with_sizes, threads=1)
    step_s = float(simulator.step_times(devices[None])[0]) if plan is None else simulator.retime(plan).step_time_s
    return step_s if step_s < float("inf") else None


def by_hand(method: str, workload: str, host: str, evaluations: int, seed: int, most: int) -> Line:
    """The best that a method finds over numbers of micro-batches, and of shards where it needs some."""
    begin, best, spent = time.process_time(), Line(step_time_s=None, count=0, op_order="", split=""), 0
    whole = problem_of(workload, host, 1)
    plans: list[SplitPlan | None] = [None]
    if METHODS[method].min_shards > 1:
        shares = [shares_of(whole, size) for size in shard_counts(whole)]
        plans = [SplitPlan(MEGATRON, each, reduce) for each in shares for reduce in ("owner", "chunks")]
    grid = [(count, plan) for plan in plans for count in numbers_of(workload, host, most)]
    grid = [(count, plan) for count, plan in grid if plan is None or count * plan.num_shards <= 64]
    for number, (count, plan) in enumerate(grid):
        share = max((evaluations - spent) // (len(grid) - number), 1)
        try:
            problem = problem_of(workload, host, count, plan)
            found = find(problem, method, Simulator(problem, threads=1), Budget(evaluations=share), seed=seed)
        except UserError:  # it cannot be cut or split so, or the method needs more micro-batches
            continue
        spent += found.evaluations
        if found.devices is not None and found.step_time_s < (best["step_time_s"] or float("inf")):
            split = "" if plan is None else str(PlacedSplit(**plan.words))
            best = Line(step_time_s=found.step_time_s, count=count, op_order=problem.op_order, split=split)
            best["by_size_s"] = by_size_s(problem, found.devices, found.plan)
    return best | {"evaluations": spent, "seconds": time.process_time() - begin}


def ring(workload: str, host: str) -> Line:
    """Data parallelism whose gradients a ring sums behind the backward, at best."""
    step_s = even_split_s(problem_of(workload, host, 1))
    kept = step_s if workload in WORKLOADS and step_s < float("inf") else None
    return Line(step_time_s=kept, count=1, op_order="", split="", evaluations=1, seconds=0.0)


def key(line: Line) -> tuple[object, ...]:
    """Two lines with the same key answer the same question."""
    return tuple(line[name] for name in ("problem", "method", "seed", "allowed", "most"))


def markdown(rows: Sequence[Line], facts: dict[str, Any]) -> str:
    """The page: medians over seeds."""
    found: dict[str, dict[str, list[Line]]] = {}
    for row in rows:
        found.setdefault(row["problem"], {}).setdefault(row["method"], []).append(row)
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def median_s(answers: Mapping[str, list[Line]], method: str, costs: str = "step_time_s") -> float | None:
        times = [row[costs] for row in answers.get(method, ()) if row.get(costs) is not None]
        return statistics.median(times) if times else None

    def ratio_of(answers: Mapping[str, list[Line]], costs: str) -> float | None:
        auto_s, whole_s = median_s(answers, "auto", costs), median_s(answers, "unsplit", costs)
        return None if auto_s is None or whole_s is None else auto_s / whole_s

    def lines() -> Iterator[tuple[str, ...]]:
        for problem, answers in found.items():
            cells = []
            for method in methods:
                step_s = median_s(answers, method)
                first = next(iter(answers.get(method, ())), None)
                about = "" if first is None else f" ({', '.join(filter(None, (str(first['count']), first['split'])))})"
                cells.append("–" if step_s is None else f"{step_s * 1e3:.2f}{about}")
            both = (ratio_of(answers, costs) for costs in COSTS)
            yield problem, *cells, *("–" if ratio is None else f"{ratio:.3f}" for ratio in both)

    def mean(costs: str) -> str:
        ratios = [ratio for answers in found.values() if (ratio := ratio_of(answers, costs)) is not None]
        if not ratios:
            return "–"
        return f"{statistics.geometric_mean(ratios):.3f}, largest {max(ratios):.3f}, {len(ratios)} problems"

    return (
        f"# Suite `{NAME}`: ops split into shards\n\n{as_markdown(facts)}\n"
        "Simulated step times in ms, estimated costs, medians over seeds; micro-batches and split in brackets.\n"
        "The last column has the same placements where small ops are less efficient (costs by size).\n\n"
        f"`auto` over `unsplit`: {mean('step_time_s')}; by size: {mean('by_size_s')}.\n\n"
        + table(("problem", *methods, "auto / unsplit", "by size"), *lines())
    )


def main(arguments: Sequence[str]) -> None:
    """Runs or renders the suite; `arguments` are those behind its name."""
    options = parse(
        __doc__,
        argument("--methods", default=",".join(("auto", "unsplit", *SPLIT_FIELD, *FIELD, RING))),
        argument("--evaluations", type=int, default=EVALUATIONS, help="of each method, its choices included"),
        argument("--seeds", default="0", help="with commas between them"),
        argument("--problems", help="WORKLOAD/HOST, with semicolons between them: only these"),
        argument("--most", type=int, default=core_micro.MOST, help="micro-batches"),
        argument("--shard", default="1/1", help="I/N: every N-th workload, from the I-th"),
        argument("--name", default=NAME, help="of the results' files"),
        argument("--render", action="store_true", help="no run: the table of what was finished"),
        words=arguments,
        prog=f"core.py {NAME}",
    )
    path: Path = RESULTS / f"{options.name}.jsonl"
    if options.render:
        kept = finished(path, key)
        save(path.with_suffix(""), kept, markdown(kept["rows"], kept), indent=None)
        return
    shard, shards = (int(part) for part in options.shard.split("/"))
    mine = [*WORKLOADS, *LARGE][shard - 1 :: shards]
    wanted = None if options.problems is None else options.problems.split(";")
    problems = [names for names in SUITE if names[0] in mine and (wanted is None or key_of(*names) in wanted)]
    append(path, {"run": record()})
    done = {key(line) for line in read_lines(path) if "method" in line}
    last = None
    for workload, host in sorted(problems, key=lambda names: mine.index(names[0])):
        if workload != last:
            captured.cache_clear()
            last = workload
        for seed, method in ((int(s), m) for s in options.seeds.split(",") for m in options.methods.split(",")):
            question = {"problem": key_of(workload, host), "method": method, "seed": seed}
            question |= {"allowed": options.evaluations, "most": options.most}
            if key(question) in done:
                continue
            given = (workload, host, options.evaluations, seed, options.most)
            if method == RING:
                line = ring(workload, host)
            elif method in ("auto", "unsplit"):
                line = search(*given, splits=method == "auto")
            else:
                with kept_traces():
                    line = by_hand(method, *given)
            append(path, question | line)
            told = "nothing fits" if line["step_time_s"] is None else f"{line['step_time_s'] * 1e3:.2f} ms"
            about = f"{told}, {line['count']} micro-batches, {line['split'] or 'whole'}, {line['seconds']:.0f} s"
            print(f"{question['problem']}, {method}, seed {seed}: {about}", flush=True)
