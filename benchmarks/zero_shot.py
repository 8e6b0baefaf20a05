"""Placements at once: python benchmarks/zero_shot.py [--suite core] [--render].

How good the best of 1, 16 and 64 evaluations is on a suite, over the best known: of the pretrained policy `schedule`,
of the same without its ranker, of weights of the list scheduler in their listed order, of weights drawn at random over
the same groupings, and of `portfolio`. Writes `results/zero_shot.json` and `results/zero_shot.md`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import core_micro
import numpy as np
from best_known import known
from core_true_tables import workload_of
from numpy.typing import NDArray
from record import RESULTS, argument, as_markdown, parse, record, table
from suites import CORE, CORE_DEV, WORKLOADS, key_of, problem_of

from rlplace.compare import mean_ratio
from rlplace.env.sequential import GROUPINGS, ListSchedules, Pair
from rlplace.files import read_json, write_json_atomic, write_text_atomic
from rlplace.graphs.synthetic import synthetic
from rlplace.measure import Problem, Simulator, resolve_host
from rlplace.policy.base import pretrained_path
from rlplace.policy.schedule import propose
from rlplace.policy.schedule_network import ScheduleNetwork, load_network
from rlplace.search import Budget, find
from rlplace.search.improve.starting_points import CROSSED, FIRST_WEIGHTS, START_WEIGHTS
from rlplace.training.method_choice import METHODS, SCHEDULE

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
from pretrain import draw

COUNTS = (1, 16, 64)
DRAWS = 9
"""Times that random weights are drawn: the mean of the logs of their ratios counts."""
KINDS = {"clip": "vit", "mixtral": "llama"}
"""Workloads of the suite whose blocks are those of a model that the policy was trained on."""
MICRO_COUNTS = (4,)
HEAD = ("", *(f"best of {count}" for count in COUNTS))
UNSOLVED = 3.0
"""Ratio that counts where nothing fits into memory, and the worst that counts at all."""
Row = dict[str, Any]
Bests = dict[int, float]


def bests(simulator: Simulator, devices: NDArray[np.int32]) -> Bests:
    """Step time of the best of the first 1, 16 and 64 placements."""
    times = simulator.step_times(devices)
    return {count: float(times[:count].min()) for count in COUNTS}


def guessed(problem: Problem, simulator: Simulator, network: ScheduleNetwork, *, is_ranked: bool) -> Row:
    """The policy's guesses, and the CPU seconds that one and that all of them take."""
    seconds = {}
    for count in COUNTS:
        begin = time.process_time()
        found = propose(problem, network, count, is_ranked=is_ranked)
        seconds[count] = time.process_time() - begin
    return {"step_time_s": bests(simulator, found.devices), "inference_s": seconds}


def listed(problem: Problem, simulator: Simulator) -> Row:
    """The weights that searches begin with, in their order."""
    pairs = [*FIRST_WEIGHTS, *((name, weights) for weights in START_WEIGHTS for name in CROSSED)]
    return {"step_time_s": bests(simulator, ListSchedules(problem).place(pairs[: max(COUNTS)]))}


def drawn(problem: Problem, simulator: Simulator) -> Row:
    """Weights drawn at random, each over one of the groupings, drawn as well."""
    found = []
    for seed in range(DRAWS):
        generator = np.random.default_rng(seed)
        names = generator.choice(GROUPINGS, max(COUNTS))
        pairs: list[Pair] = [
            (str(name), tuple(row)) for name, row in zip(names, draw(generator, max(COUNTS)).tolist(), strict=True)
        ]
        found.append(bests(simulator, ListSchedules(problem).place(pairs)))
    return {
        "draws_s": found,
        "step_time_s": {count: float(np.median([one[count] for one in found])) for count in COUNTS},
    }


def searched(problem: Problem, simulator: Simulator, method: str) -> Row:
    """What a method finds with each number of evaluations."""
    return {
        "step_time_s": {
            count: find(problem, METHODS[method].name, simulator, Budget(evaluations=count)).step_time_s
            for count in COUNTS
        }
    }


def rows_of(problem: Problem, network: ScheduleNetwork) -> dict[str, Row]:
    """Every row of one problem, by its name."""
    simulator = Simulator(problem, threads=1)
    makers: dict[str, Callable[[], Row]] = {
        "schedule": lambda: guessed(problem, simulator, network, is_ranked=True),
        "schedule, gate alone": lambda: guessed(problem, simulator, network, is_ranked=False),
        "method `schedule`": lambda: searched(problem, simulator, SCHEDULE),
        "listed weights": lambda: listed(problem, simulator),
        "random weights": lambda: drawn(problem, simulator),
        "portfolio": lambda: searched(problem, simulator, "portfolio"),
    }
    return {name: make() for name, make in makers.items()}


def run(suite: Sequence[tuple[str, str]], micro: Sequence[tuple[str, str]]) -> list[Row]:
    """Rows of all problems; those of the micro-batched ones say how often the batch is cut."""
    network, rows = load_network(pretrained_path("schedule")), []
    for cut, problems in ((1, suite), *((count, micro) for count in MICRO_COUNTS)):
        for workload, host in problems:
            begin = time.monotonic()
            problem = problem_of(workload, host) if cut == 1 else core_micro.problem_of(workload, host, cut)
            for name, row in rows_of(problem, network).items():
                rows.append({"problem": key_of(workload, host), "micro_batches": cut, "row": name, **row})
            seconds = time.monotonic() - begin
            print(f"{key_of(workload, host)}, {cut} micro-batches: {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def large() -> Row:
    """CPU seconds of a first guess, and of 64, at a graph of some 5,000 ops on four devices."""
    network = load_network(pretrained_path("schedule"))
    graph = synthetic("encoder_decoder", encoder=20, decoder=20, heads=8)
    problem = Problem.estimate(graph, resolve_host("4xV100-pcie"))
    propose(problem, network, 1)
    told: Row = {"num_ops": graph.num_ops, "inference_s": {}}
    for count in COUNTS:
        times = []
        for _ in range(5):
            begin = time.process_time()
            propose(problem, network, count)
            times.append(time.process_time() - begin)
        told["inference_s"][count] = float(np.median(times))
    return told


def ratio(rows: list[Row], name: str, count: int, best: dict[str, float], keep: Callable[[str], bool] = bool) -> str:
    """Geometric mean over problems of a row's best over the best known, with its interval."""
    ratios, workloads = [], []
    for row in rows:
        if row["row"] != name or row["problem"] not in best or not keep(row["problem"]):
            continue
        found = [one[str(count)] for one in row.get("draws_s", [row["step_time_s"]])]
        over = (UNSOLVED if step_s is None else step_s / best[row["problem"]] for step_s in found)
        logs = [np.log(min(each, UNSOLVED)) for each in over]
        ratios.append(float(np.exp(np.mean(logs))))
        workloads.append(workload_of(row["problem"]))
    if not ratios:
        return "–"
    mean = mean_ratio(ratios, workloads)
    return str(mean) if len(set(workloads)) > 1 else f"{mean.mean:.3f}"


def _seconds(taken: list[dict[str, float]]) -> str:
    """The median seconds of each number of guesses."""
    return ", ".join(f"{np.median([one[str(count)] for one in taken]):.3f} s for {count}" for count in COUNTS)


def _is_of(workload: str, key: str) -> bool:
    return workload_of(key) == workload


def markdown(result: Row) -> str:
    """The tables."""
    rows = [row for row in result["rows"] if row["micro_batches"] == 1]
    best = {key: one["step_time_s"] for key, one in known().items() if one["step_time_s"] is not None}
    names = list(dict.fromkeys(row["row"] for row in rows))
    told, seconds = result["large"], [row["inference_s"] for row in rows if row["row"] == "schedule"]
    kinds: dict[str, Callable[[str], bool]] = {
        **{
            f"schedule on {workload}, whose blocks are those of {trained}": partial(_is_of, workload)
            for workload, trained in KINDS.items()
        },
        f"schedule on the other {len(WORKLOADS) - len(KINDS)} workloads": lambda key: (
            key.partition("/")[0] not in KINDS
        ),
    }
    parts = [(name, *(ratio(rows, "schedule", count, best, keep) for count in COUNTS)) for name, keep in kinds.items()]
    text = [
        "# Placements at once\n\n",
        as_markdown(result),
        "\nGeometric means over the problems of `core` of the best of so many simulated placements over the best\n"
        "known, with 95 % intervals bootstrapped by workload; a problem that a row cannot solve counts as 3.\n"
        "`schedule` ranks its guesses by the ends of list schedules that it makes itself: that is inference,\n"
        "whose seconds are below, and no evaluation; `gate alone` does without. The method `schedule` varies the\n"
        "best of its guesses once it has made them: it learns from what it simulates. `listed weights` were in\n"
        "part chosen on four of the suite's workloads, those of `schedule` on none of them.\n\n",
        table(HEAD, *((name, *(ratio(rows, name, count, best) for count in COUNTS)) for name in names), *parts),
        f"\nInference over these problems (median, CPU time of one core): {_seconds(seconds)}.\n",
        f"A synthetic graph of {told['num_ops']:,} ops on four devices (median of five): "
        f"{_seconds([told['inference_s']])}.\n",
    ]
    cut = [row for row in result["rows"] if row["micro_batches"] > 1]
    if cut:
        text += ["\n## Steps cut into micro-batches\n\n", micro_table(cut)]
    return "".join(text)


def micro_table(rows: list[Row]) -> str:
    """Ratios to `portfolio` with the same number of evaluations."""
    base = {
        count: {
            row["problem"]: step_s
            for row in rows
            if row["row"] == "portfolio" and (step_s := row["step_time_s"][str(count)]) is not None
        }
        for count in COUNTS
    }
    names = dict.fromkeys(row["row"] for row in rows)
    return (
        f"Ten problems of `core-dev`, their batches cut into {MICRO_COUNTS[0]}; over `portfolio` with as many\n"
        "evaluations, whose first placements are pipelines, data parallelism and mixtures of both; the method\n"
        "`schedule` takes these after its first guess, the other rows do without.\n\n"
    ) + table(HEAD, *((name, *(ratio(rows, name, count, base[count]) for count in COUNTS)) for name in names))


def main() -> None:
    options = parse(
        __doc__,
        argument("--suite", choices=("core", "core-dev"), default="core"),
        argument("--micro", action="store_true", help="the micro-batched problems of core-dev as well"),
        argument("--name", default="zero_shot", help="of the results' files"),
        argument("--render", action="store_true", help="no run: the last one's rows beside the best known now"),
    )
    path = RESULTS / f"{options.name}.json"
    if not options.render:
        suite = CORE if options.suite == "core" else CORE_DEV
        result = {"schema": 1, **record(), "large": large(), "rows": run(suite, CORE_DEV if options.micro else ())}
        write_json_atomic(path, result, indent=None)
    write_text_atomic(path.with_suffix(".md"), markdown(read_json(path)))


if __name__ == "__main__":
    main()
