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
from collections import Counter
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
from rlplace.say import counted
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

    def lines() -> Iterator[tuple[str, ...]]:
        for problem, answers in found.items():
            cells = []
            for method in methods:
                step_s = median(answers, method)
                first = next(iter(answers.get(method, ())), None)
                about = "" if first is None else f" ({', '.join(filter(None, (str(first['count']), first['split'])))})"
                cells.append("–" if step_s is None else f"{step_s * 1e3:.2f}{about}")
            both = (ratio_of(answers, "unsplit", value=costs) for costs in COSTS)
            yield problem, *cells, *("–" if ratio is None else f"{ratio:.3f}" for ratio in both)

    note = f"{facts['note']}\n" if facts.get("note") else ""
    return (
        f"# Suite `{NAME}`: ops split into shards\n\n{as_markdown(facts)}\n"
        "Simulated step times in ms, estimated costs, medians over seeds; micro-batches and split in brackets.\n"
        "The last column has the same placements where small ops are less efficient (costs by size).\n"
        f"Rows: {coverage(rows)}.\n{note}\n"
        f"{summary(found)}\n" + table(("problem", *methods, "auto / unsplit", "by size"), *lines())
    )


def coverage(rows: Sequence[Line]) -> str:
    """The seeds of each method, and on how many problems each has them; methods that have the same are named together.

    >>> coverage([{"problem": "rnnlm/2xK80", "method": "auto", "seed": seed} for seed in (0, 1)])
    '`auto`: seeds 0, 1 on 1 problem'
    """
    seeds: dict[str, dict[str, set[int]]] = {}
    for row in rows:
        seeds.setdefault(row["method"], {}).setdefault(row["problem"], set()).add(row["seed"])
    alike: dict[str, list[str]] = {}
    for method, by_problem in seeds.items():
        counts = Counter(tuple(sorted(each)) for each in by_problem.values())
        parts = (
            f"seed{'s' * (len(each) > 1)} {', '.join(map(str, each))} on {counted(count, 'problem')}"
            for each, count in sorted(counts.items(), key=lambda pair: (-len(pair[0]), pair[0]))
        )
        alike.setdefault(" and ".join(parts), []).append(f"`{method}`")
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in alike.items())


def summary(found: Mapping[str, Mapping[str, list[Line]]]) -> str:
    """The ratios over problems, as a list: to no split, to the best opponent, and of the time that choices take."""

    def ratios(*methods: str, value: str = "step_time_s", is_micro: bool = False) -> dict[str, float]:
        kept = {problem: each for problem, each in found.items() if problem.split("/")[0] in WORKLOADS or not is_micro}
        pairs = ((problem, ratio_of(answers, *methods, value=value)) for problem, answers in kept.items())
        return {problem: ratio for problem, ratio in pairs if ratio is not None}

    def told(of: Mapping[str, float]) -> str:
        if not of:
            return "–"
        worst = max(of, key=lambda problem: of[problem])
        mean, number = statistics.geometric_mean(of.values()), counted(len(of), "problem")
        return f"{mean:.3f}, largest {of[worst]:.3f} ({worst}), {number}"

    methods = dict.fromkeys(method for answers in found.values() for method in answers)
    opponents = [method for method in methods if method not in ("auto", "unsplit", RING)]
    lines = ["`auto` over others, geometric means of the problems that have both:\n"]
    for name, against in (("`unsplit`", ["unsplit"]), ("the best opponent", opponents)):
        lines.append(f"- {name}: {told(ratios(*against))}; by size: {told(ratios(*against, value='by_size_s'))}.")
        lines.append(f"- {name}, problems of `core-micro`: {told(ratios(*against, is_micro=True))}.")
    lost = {
        problem: ratio
        for problem, ratio in ratios(*opponents).items()
        if ratio > 1 and any(is_faster(found[problem], method) for method in opponents)
    }
    about = ", ".join(f"{problem} ({ratio:.3f})" for problem, ratio in lost.items()) or "none"
    lines.append(f"- problems where an opponent is faster with both costs: {about}.")
    if choice := list(ratios("unsplit", value="choice_s").values()):
        most = f"largest {max(choice):.2f}, above 2 on {sum(each > 2 for each in choice)} of {len(choice)} problems"
        lines.append(f"- seconds of the choice, over `unsplit`: median {statistics.median(choice):.2f}, {most}.")
    return "\n".join(lines) + "\n"


def is_faster(answers: Mapping[str, list[Line]], method: str) -> bool:
    """Whether a method is faster than `auto`, also where small ops are less efficient."""
    values = ("step_time_s", "by_size_s")
    pairs = [(median(answers, method, value), median(answers, "auto", value)) for value in values]
    return all(theirs is not None and ours is not None and theirs < ours for theirs, ours in pairs)


def median(answers: Mapping[str, list[Line]], method: str, value: str = "step_time_s") -> float | None:
    """The median over seeds of a value of a method; None where it has none."""
    values = [row[value] for row in answers.get(method, ()) if row.get(value) is not None]
    return statistics.median(values) if values else None


def ratio_of(answers: Mapping[str, list[Line]], *methods: str, value: str) -> float | None:
    """The median of `auto` over the least of those of `methods`; None where either is unknown."""
    auto = median(answers, "auto", value)
    others = [other for method in methods if (other := median(answers, method, value)) is not None]
    return None if auto is None or not others else auto / min(others)


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
        argument("--note", help="with --render: what readers should know of these runs, from now on"),
        words=arguments,
        prog=f"core.py {NAME}",
    )
    path: Path = RESULTS / f"{options.name}.jsonl"
    if options.render:
        kept = finished(path, key, options.note)
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
