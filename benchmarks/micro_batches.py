"""Micro-batches on this machine's cores: python benchmarks/micro_batches.py gpt2@small bert@small vit@small nmt@small.

For each workload, placements of the step as it is and with `--micro-batches auto`, each with and without gangs, are
searched on the calibrated simulator with the same budget; the best few of each are raced, and the winners again with
plain PyTorch, all in one race. Needs an idle machine. Writes `results/micro_batches.json` and `.md`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import argument, as_markdown, parse, record, save

from rlplace.measure import Host, HostRunner, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget, find
from rlplace.session.calibrate import calibrated
from rlplace.session.prepare import Steps, prepare, verdict_of
from rlplace.session.setup import AUTO, CutOptions, ProblemOptions
from rlplace.workloads import parse_workload

WORKLOADS = ("gpt2@small", "bert@small", "vit@small", "nmt@small")
SEEDS = (0, 1, 2)
HEAT = RaceProtocol(warmup=2, min_rounds=9, max_rounds=9, hopeless=float("inf"))
FINAL = RaceProtocol(warmup=3, min_rounds=41, max_rounds=41, hopeless=float("inf"))
EAGER = {"eager, all cores": None, "eager, one core": 1}
"""Plain PyTorch on the whole batch: intra-op threads by row."""


@dataclass(frozen=True, eq=False)
class Side:
    """One way to cut the step, on one kind of host: a runner, and the plan that won its heat."""

    name: str
    problem: Problem
    runner: HostRunner
    plan: Plan
    simulated_s: float

    @classmethod
    def searched(cls, name: str, steps: Steps, evaluations: int, threads_of: Side | None) -> Side:
        """Prepared, calibrated, searched with every seed; the plans that were found are raced.

        It runs on the threads of `threads_of`: a second team on the same cores would slow both down.
        """
        progress = make_progress()
        profiled = prepare(steps, progress.say, ProblemOptions()).problem
        problem, _ = calibrated(profiled, 12, seed=0, say=progress.say)
        simulator = Simulator(problem, threads=1)
        runner = HostRunner(problem, simulator)
        if threads_of is not None:
            runner._crew.stop()
            runner._crew = copy.copy(threads_of.runner._crew)
            runner._crew.workers = threads_of.runner._crew.workers[: problem.host.num_devices]
        found = [find(problem, "single", simulator, Budget(evaluations=64))]
        found += [find(problem, "portfolio", simulator, Budget(evaluations=evaluations), seed=seed) for seed in SEEDS]
        plans = [simulator.plan(one.devices) for one in found if one.devices is not None]
        outcomes = runner.measure_plans(plans, protocol=HEAT)
        failed = [outcome.why for outcome in outcomes if not outcome.ok]
        if failed:
            raise SystemExit(f"{name}: {failed[0]}")
        best = min(range(len(plans)), key=lambda index: outcomes[index].step_time_s)
        return cls(name, problem, runner, plans[best], simulator.retime(plans[best]).step_time_s)

    def facts(self) -> dict[str, Any]:
        """What the table says of it besides its time."""
        graph, cost_s = self.problem.graph, self.problem.costs.op_time_s[:, 0]
        devices = self.plan.devices
        shares = {
            device.name: float(cost_s[devices == index].sum() / cost_s.sum())
            for index, device in enumerate(self.problem.host.devices)
        }
        return {
            "count": graph.num_micro_batches,
            "op_order": self.problem.op_order,
            "verdict": verdict_of(graph),
            "num_ops": graph.num_ops,
            "simulated_s": self.simulated_s,
            "shares": shares,
        }


@one_thread_here()
def raced(workload: str, evaluations: int) -> dict[str, Any]:
    """Every side and plain PyTorch in one race: the samples of each, round by round."""
    spec, sides = parse_workload(workload), list[Side]()
    for gangs in (True, False):  # the devices without gangs are the first of those with them
        host = Host.detect("cores", gangs=gangs)
        for asked in (CutOptions(1), CutOptions(AUTO)):
            name = f"{'auto' if asked.is_auto else 'whole'}{', gangs' if gangs else ''}"
            sides.append(Side.searched(name, Steps(spec, host, 0, asked), evaluations, sides[0] if sides else None))
    first = sides[0]
    whole = next(side.problem for side in sides if side.problem.graph.num_micro_batches == 1)
    eager = [EagerStep(whole.graph, whole.host, num_threads=threads) for threads in EAGER.values()]
    eager[0].worker = first.runner.widest_worker()
    idle = idle_share(1.0)
    timers = [*(side.runner.timer(side.plan) for side in sides[1:]), *eager]
    outcomes = first.runner.measure_plans([first.plan], others=timers, protocol=FINAL)
    names = [first.name, *(side.name for side in sides[1:]), *EAGER]
    samples_s = {name: list(outcome.samples_s) for name, outcome in zip(names, outcomes, strict=True)}
    facts = {side.name: side.facts() for side in sides}
    first.runner.close()
    return {"workload": workload, "idle": idle, "samples_s": samples_s, "sides": facts}


def paired(row: dict[str, Any], name: str, other: str) -> str:
    """The median over rounds of the ratio of two contenders, with its quartiles."""
    ratios: NDArray[np.float64] = np.array(row["samples_s"][name]) / np.array(row["samples_s"][other])
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any], evaluations: int) -> str:
    """The table, and where each placement ran its work."""
    names = list(rows[0]["samples_s"])
    order = [name for name in ("whole", "auto", "whole, gangs", "auto, gangs", *EAGER) if name in names]
    text = [
        "# Micro-batches on this machine's cores\n\n",
        as_markdown(facts),
        f"\nHost `cores`. `whole` is the step as it is, `auto` the number of micro-batches chosen by simulation,\n"
        f"each searched with {evaluations:,} placements and three seeds on its own calibrated simulator. One race of\n"
        f"{FINAL.max_rounds} rounds a workload; medians in ms; ratios are medians over rounds, with quartiles.\n\n"
        f"| workload | {' | '.join(order)} | best / eager | auto / whole | auto / whole, gangs |\n"
        f"|---|{'---|' * (len(order) + 3)}\n",
    ]
    for row in rows:
        median_s = {name: float(np.median(row["samples_s"][name])) for name in order}
        best = min((name for name in order if name not in EAGER), key=median_s.__getitem__)
        fastest = min(EAGER, key=median_s.__getitem__)
        cells = [
            *(f"{median_s[name] * 1e3:.1f}" for name in order),
            *(f"{paired(row, best, fastest)} ({best})", paired(row, "auto", "whole")),
            paired(row, "auto, gangs", "whole, gangs"),
        ]
        text.append(f"| `{row['workload']}` | {' | '.join(cells)} |\n")
    text.append(
        "\nWhat was chosen, and the share of the step's work on each device:\n\n"
        "| workload | step | micro-batches | loss | order of ops | simulated, ms | shares | idle before |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        for name, side in row["sides"].items():
            shares = ", ".join(f"{device} {share:.0%}" for device, share in side["shares"].items())
            verdict = side["verdict"]["kind"] if side["verdict"] else "–"
            cells = [str(side["count"]), verdict, side["op_order"], f"{side['simulated_s'] * 1e3:.1f}", shares]
            text.append(f"| `{row['workload']}` | {name} | {' | '.join(cells)} | {row['idle']:.0%} |\n")
    return "".join(text)


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--evaluations", type=int, default=4000, help="of each seed"),
        argument("--name", default="micro_batches", help="of the results' files"),
    )
    facts, rows = record(), []
    for workload in options.workloads:
        rows.append(raced(workload, options.evaluations))
        save(
            options.name, {"schema": 1, **facts, "rows": rows}, markdown(rows, facts, options.evaluations), indent=None
        )


if __name__ == "__main__":
    main()
