"""Splits, gangs and plain PyTorch on this machine's cores: python benchmarks/gangs.py [WORKLOAD ...].

A step of one sample has no batch to cut; what else uses two cores? These rows are raced, round by round:

- `whole`: each op on one core; `split`: the same with ops in two shards, summed by their owner or in chunks;
- `gangs`: each op on one core, or on both;
- `eager`: plain PyTorch with both cores;
- `auto`: what `rlplace train WORKLOAD --host cores --gangs --split auto` finds.

The first three are searched on a calibrated simulator, a few seeds each, and the best of a heat counts. `gangs:NAME` of
a function here is inference with the model of that name. Needs an idle machine. Writes `results/splits_on_cores.json`
and `.md`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import argument, as_markdown, parse, record, save, table

from rlplace.cli.main import main as command_line
from rlplace.errors import UserError
from rlplace.graphs import SplitPlan
from rlplace.measure import Costs, Host, HostRunner, Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.placement import PlacedSplit, Placement, load_placement
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.race import Timer, idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget, find
from rlplace.search.parallel.choose_micro_batches import CLASSES
from rlplace.session.calibrate import calibrated
from rlplace.session.prepare import Steps, make_problem
from rlplace.training import TrainConfig
from rlplace.workloads import build, parse_workload

ROWS = ("split", "whole", "gangs", "eager", "auto")
SPLITS = tuple(SplitPlan(next(iter(CLASSES)), 2, reduce) for reduce in ("owner", "chunks"))
AUTO = ("--host", "cores", "--gangs", "--split", "auto", "--budget", "20s")
"""The options of the row `auto`: the search of the method that learns, and of `portfolio`, has so long."""
SEEDS = (0, 1)
HEAT = RaceProtocol(warmup=2, min_rounds=9, max_rounds=9, hopeless=math.inf)
BAR = 1.03
"""`auto` over the best of the other rows, at most."""


def inference(name: str) -> tuple[Any, Any]:
    """A named model and its inputs, without labels."""
    workload = build(parse_workload(name))
    inputs = workload.inputs
    given = {key: each for key, each in inputs.items() if key != "labels"} if isinstance(inputs, Mapping) else inputs
    return workload.model.eval(), given


llama = partial(inference, "llama@small,batch=1")
gpt2 = partial(inference, "gpt2@small,batch=1")
vit = partial(inference, "vit@small,batch=1")
WORKLOADS = ("llama@small,batch=1", "gpt2@small,batch=1", "vit@small,batch=1", "gangs:llama", "gangs:gpt2", "gangs:vit")


@dataclass(frozen=True, eq=False)
class Step:
    """A step on this machine's cores and their gang, calibrated, with what runs its plans."""

    problem: Problem
    runner: HostRunner

    def searched(self, evaluations: int, *, has_gang: bool) -> list[Plan]:
        """What searches find, with the gang or on single cores alone."""
        problem = self.problem if has_gang else without_gang(self.problem)
        simulator = Simulator(problem, threads=1)
        found = [find(problem, "single", simulator, Budget(evaluations=64))]
        found += [find(problem, "portfolio", simulator, Budget(evaluations=evaluations), seed=seed) for seed in SEEDS]
        plans = [simulator.plan(one.devices) for one in found if one.devices is not None]
        return list({plan.fingerprint: plan for plan in plans}.values())


def without_gang(problem: Problem) -> Problem:
    """The same step and figures on the single cores."""
    single = [index for index, device in enumerate(problem.host.devices) if not device.members]
    costs, seen = problem.costs, problem.costs.workspace_bytes
    part = Costs(costs.op_time_s[:, single], costs.source, None if seen is None else seen[:, single])
    return Problem.grouped(problem.graph, problem.host.part(single), part, TrainConfig.num_groups)


Entry = tuple[Step, Plan]


def race(entries: Sequence[Entry], others: Sequence[Timer], protocol: RaceProtocol) -> list[Measurement]:
    """All plans and `others` in one race, each plan by the runner of its step.

    Raises:
        RunnerError: one of them failed.
    """
    (first, plan), *rest = entries
    timers = [step.runner.timer(each) for step, each in rest]
    return first.runner.measure_plans([plan], others=[*timers, *others], protocol=protocol)


@one_thread_here()
def raced(workload: str, options: Any) -> dict[str, Any]:
    """The samples of every row, round by round, and what each of them is."""
    begin, say = time.monotonic(), make_progress().say
    spec, host = parse_workload(workload), Host.detect("cores", gangs=True)
    asked, crew = Steps(spec, host, 0), Crew(host.devices)  # one for all: a second team of threads would slow both
    made: dict[SplitPlan | None, Step] = {}

    def step_of(plan: SplitPlan | None) -> Step:
        if plan not in made:
            problem = make_problem(asked.graph(1, plan), host, TrainConfig.num_groups, say, spec=spec, isolated=False)
            config = TrainConfig()
            problem, _ = calibrated(problem, config.num_calibrated, seed=0, say=say, isolated=False, is_traced=True)
            made[plan] = Step(problem, HostRunner(problem, Simulator(problem), crew=crew))
        return made[plan]

    placement, trained_s = trained(workload)
    heat: list[tuple[str, Entry]] = []
    for plan in (None, *SPLITS):
        try:
            step = step_of(plan)
        except UserError as error:  # nothing of it can be split so
            say(f"{plan}: left out ({error})")
            continue
        for row, has_gang in (("split", False),) if plan else (("whole", False), ("gangs", True)):
            heat += [(row, (step, found)) for found in step.searched(options.evaluations, has_gang=has_gang)]
    tried = zip(race([entry for _, entry in heat], [], HEAT), heat, strict=True)
    ranked = sorted(tried, key=lambda each: each[0].step_time_s, reverse=True)
    entries = {row: entry for _, (row, entry) in ranked}  # the quickest of a row is the last
    entries["auto"] = step_of(placement.split_words and placement.split_words.plan), placement.plan
    widest = entries["gangs"][0].runner.widest_worker()
    eager = EagerStep(asked.graph(1), host, worker=widest)
    protocol = RaceProtocol(warmup=3, min_rounds=options.rounds, max_rounds=options.rounds, hopeless=math.inf)
    idle = idle_share(1.0)
    outcomes = race(list(entries.values()), [eager], protocol)
    crew.stop()
    if failed := [outcome.why for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{workload}: {failed[0]}")
    samples_s = {row: list(each.samples_s) for row, each in zip((*entries, "eager"), outcomes, strict=True)}
    return {
        "workload": workload,
        "idle": idle,
        "samples_s": {row: samples_s[row] for row in ROWS},
        "chosen": {row: described(*entries[row]) for row in ROWS if row in entries},
        "trained_s": trained_s,
        "seconds": time.monotonic() - begin,
    }


def trained(workload: str) -> tuple[Placement, float]:
    """What the command finds, and the seconds that it took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if command_line(["train", workload, *AUTO, "--store", "off", "--run", str(run)]):
            raise SystemExit(f"{workload}: `train` failed")
        return load_placement(run / "placement.json"), time.monotonic() - begin


def described(step: Step, plan: Plan) -> dict[str, Any]:
    """How a plan splits ops, and the share of the work on each device."""
    problem, cost_s = step.problem, step.problem.costs.op_time_s[:, 0]
    return {
        "split": str(PlacedSplit.of(problem.graph) or "whole ops"),
        "num_ops": problem.graph.num_ops,
        "simulated_s": Simulator(problem, threads=1).retime(plan).step_time_s,
        "shares": {
            device.name: float(cost_s[plan.devices == index].sum() / cost_s.sum())
            for index, device in enumerate(problem.host.devices)
        },
    }


def over(row: dict[str, Any], name: str, other: str) -> tuple[float, float, float]:
    """The median over rounds of the ratio of two rows, and its quartiles."""
    ratios: NDArray[np.float64] = np.array(row["samples_s"][name]) / np.array(row["samples_s"][other])
    low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
    return middle, low, high


def best_of(row: dict[str, Any]) -> str:
    """The row but `auto` with the shortest median step."""
    return min(ROWS[:-1], key=lambda name: float(np.median(row["samples_s"][name])))


def words_of(workload: str) -> str:
    """Which step it is, for people."""
    name = workload.removeprefix("gangs:")
    return f"`{workload}`, training" if name == workload else f"`{globals()[name].args[0]}`, inference"


def markdown(rows: Sequence[dict[str, Any]], facts: dict[str, Any], options: Any) -> str:
    """Medians, ratios to the best row, and what each row is."""

    def times() -> Iterator[tuple[str, ...]]:
        for row in rows:
            best, cells = best_of(row), (f"{np.median(row['samples_s'][name]) * 1e3:.2f}" for name in ROWS)
            yield words_of(row["workload"]), *cells, best, "{:.3f} [{:.3f}, {:.3f}]".format(*over(row, "auto", best))

    def ratios() -> Iterator[tuple[str, ...]]:
        for row in rows:
            to_best = (over(row, name, best_of(row)) for name in ROWS)
            yield words_of(row["workload"]), *("{:.3f} [{:.3f}, {:.3f}]".format(*each) for each in to_best)

    def chosen() -> Iterator[tuple[str, ...]]:
        for row in rows:
            for name, each in row["chosen"].items():
                shares = ", ".join(f"{device} {share:.0%}" for device, share in each["shares"].items() if share > 0.005)
                about = f"{each['simulated_s'] * 1e3:.2f}", shares, f"{row['idle']:.0%}"
                yield words_of(row["workload"]), name, each["split"], str(each["num_ops"]), *about

    most = max(over(row, "auto", best_of(row))[0] for row in rows)
    won = [f"`{name}` on {count} of {len(rows)}" for name in ROWS[:-1] if (count := [*map(best_of, rows)].count(name))]
    return (
        f"# Splits, gangs and plain PyTorch on two cores\n\n{as_markdown(facts)}\n"
        f"Steps of one sample, {options.rounds} rounds of one race each. `whole`: each op on one core. `split`: so, "
        "with ops in two\nshards. `gangs`: each op on one core, or on both. `eager`: plain PyTorch with both cores. "
        f"`auto`: what\n`rlplace train WORKLOAD {' '.join(AUTO)}` finds (without `--gangs`,\n"
        "it has single cores alone); it is no candidate "
        "for the best row. `split`, `whole`\nand `gangs` are the best of a heat of what `portfolio` finds in "
        f"{options.evaluations:,} evaluations and {len(SEEDS)} seeds on a calibrated\nsimulator, both ways to sum "
        "among them. Medians in ms; ratios are medians over rounds, with quartiles.\n\n"
        f"Best: {', '.join(won)}. `auto` over the best row: at most {most:.3f} (bar {BAR}).\n\n"
        + table(("step", *ROWS, "best", "auto / best"), *times())
        + "\nOver the best row:\n\n"
        + table(("step", *ROWS), *ratios())
        + "\nWhat was raced, and the share of the step's work on each device (`cpu:0-1` is the gang):\n\n"
        + table(("step", "row", "ops", "number", "simulated, ms", "shares", "idle before"), *chosen())
    )


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--rounds", type=int, default=61),
        argument("--evaluations", type=int, default=4000, help="of each seed"),
        argument("--name", default="splits_on_cores", help="of the results' files"),
    )
    facts, rows = record(), []
    for workload in options.workloads:
        rows.append(raced(workload, options))
        save(options.name, {"schema": 1, **facts, "rows": rows}, markdown(rows, facts, options), indent=None)


if __name__ == "__main__":
    main()
