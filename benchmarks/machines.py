"""Steps over two machines, network namespaces with a link of 1 Gb/s or 200 Mb/s: python benchmarks/machines.py.

Three stages: `sleeping` (random placements of ops that sleep, simulated and measured), `real` (the same of real ops, by
`rlplace fidelity`) and `race` (the best searched placement, PyTorch's own ways over both machines, each in its quickest
variant, and one core of one machine, in one race). Needs root and an idle machine of two cores; writes
`results/machines.json` and `.md` after each stage. Under torchrun it is the part of one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RESULTS, argument, as_markdown, parse, record, save, table
from sleeping import Naps

from rlplace.compare.pytorch_baselines import pytorch_baselines
from rlplace.graphs import capture
from rlplace.measure import Host, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.fresh_ranks import serve
from rlplace.measure.hosts.nodes import join, under_torchrun
from rlplace.measure.isolate.keeper import keep
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget, find
from rlplace.session.calibrate import calibrated
from rlplace.session.prepare import Steps, prepare
from rlplace.session.setup import CutOptions, ProblemOptions
from rlplace.workloads import parse_workload

NAMESPACES = Path(__file__).resolve().parent.parent / "scripts" / "two_machines.py"
RATES = ("1gbit", "200mbit")
NUM_PLANS, NUM_NAPS, NAP_BYTES = 8, 24, 2 << 20
REAL = (("nmt@small", 1), ("gpt2@small", 4), ("inception_v3@small", 1))
"""Workloads and their micro-batches."""
RACED = REAL[:2]
FIELD = ("ddp", "fsdp2", "torch-pipeline", "ddp-bf16-gradients")
"""PyTorch's own ways; the last one is another arithmetic."""
ROUNDS = RaceProtocol(warmup=2, min_rounds=9, max_rounds=9, hopeless=float("inf"))
FINAL = RaceProtocol(warmup=3, min_rounds=41, max_rounds=41, hopeless=float("inf"))
SEEDS = (0, 1, 2)
LIMIT_S = 1500


def sleeping(seed: int) -> dict[str, Any]:
    """Step times of random placements, simulated with profiled figures and measured."""
    graph = capture(Naps(NUM_NAPS, NAP_BYTES, seed), torch.zeros(8, dtype=torch.uint8))
    problem = Problem.profile(graph, Host.detect("nodes"), grouping="none", progress=True)
    simulator, generator = Simulator(problem), np.random.default_rng(seed)
    rows = generator.integers(0, problem.host.num_devices, (NUM_PLANS, graph.num_ops)).astype(np.int32)
    plans = [simulator.plan(row) for row in rows]
    with closing(Evaluator(problem, simulator)) as evaluator:
        outcomes = evaluator.measure_plans(plans, ROUNDS)
    return {
        "links": {link.name: [link.latency_s, link.bandwidth_bytes_per_s] for link in problem.host.links},
        "simulated_s": [simulator.retime(plan).step_time_s for plan in plans],
        "measured_s": [outcome.step_time_s for outcome in outcomes],
        "why": [outcome.why for outcome in outcomes],
    }


@one_thread_here()
def race(workload: str, count: int, evaluations: int, rounds: int) -> dict[str, Any]:
    """Samples of the best searched placement, of PyTorch's own ways, and of plain PyTorch on one core."""
    progress, spec = make_progress(), parse_workload(workload)
    final = replace(FINAL, min_rounds=rounds, max_rounds=rounds)
    steps = Steps(spec, Host.detect("nodes"), 0, CutOptions(count))
    problem, _ = calibrated(prepare(steps, progress.say, ProblemOptions()).problem, 12, seed=0, say=progress.say)
    simulator = Simulator(problem, threads=1)
    found = [find(problem, "portfolio", simulator, Budget(evaluations=evaluations), seed=seed) for seed in SEEDS]
    plans = [simulator.plan(one.devices) for one in found if one.devices is not None]
    told = {"default_size": "small", "seed": 0, "say": progress.say, "asked": steps.asked}
    with (
        closing(Evaluator(problem, simulator)) as evaluator,
        pytorch_baselines(problem, spec, FIELD, **told) as entries,
    ):
        heat = evaluator.measure_plans(plans, ROUNDS)
        best = min(range(len(plans)), key=lambda k: heat[k].step_time_s)
        idle = idle_share(1.0)
        others = [EagerRecipe(num_threads=1), *(timer for _, timer in entries if timer is not None)]
        outcomes = evaluator.measure_plans([plans[best]], final, others=others)
    names = ["placed", "one core", *(row.method for row, timer in entries if timer is not None)]
    cost_s = problem.costs.op_time_s[:, 0]
    return {
        "idle": idle,
        "simulated_s": simulator.retime(plans[best]).step_time_s,
        "samples_s": {name: list(outcome.samples_s) for name, outcome in zip(names, outcomes, strict=True)},
        "why": {row.method: row.why for row, _ in entries}
        | {name: outcome.why for name, outcome in zip(names, outcomes, strict=True) if outcome.why},
        "share_of_first": float(cost_s[plans[best].devices == 0].sum() / cost_s.sum()),
        "sent_bytes": int(problem.graph.tensor_bytes[plans[best].transfer_tensor].sum()),
    }


def run_rank(options: Any) -> None:
    """One rank of torchrun: the first one does the stage, and the others work for it."""
    nodes = join()
    if nodes.rank != 0:
        serve(nodes)
        keep(nodes)
        return
    try:
        if options.stage == "sleeping":
            found = sleeping(options.seed)
        else:
            found = race(options.workload, options.count, options.evaluations, options.rounds)
        Path(options.out).write_text(json.dumps(found))
    finally:
        nodes.end()


def over_machines(rate: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program on both machines; its stdout is that of the first one."""
    given = [sys.executable, str(NAMESPACES), "--rate", rate, "--limit", str(LIMIT_S), "--", *words]
    return subprocess.run(given, stdout=subprocess.PIPE, text=True, check=False)


def staged(rate: str, stage: str, **options: object) -> dict[str, Any]:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        done = over_machines(rate, __file__, "--stage", stage, "--out", str(out), *given)
        if not out.exists():
            raise SystemExit(f"{stage} at {rate} failed with exit code {done.returncode}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def fidelity(rate: str, workload: str, count: int) -> dict[str, Any]:
    """The object of `rlplace fidelity --json`."""
    command = ("-m", "rlplace", "fidelity", workload, "--host", "nodes", "--placements", "12", "--fit", "12", "--json")
    with tempfile.TemporaryDirectory() as folder:
        done = over_machines(
            rate, *command, "--micro-batches", str(count), "--store", "off", "--plot", str(Path(folder) / "plot.png")
        )
    if done.returncode != 0:
        raise SystemExit(f"fidelity of {workload} at {rate} failed with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """The median and the largest |simulated / measured - 1|."""
    error = np.abs(np.array(row["simulated_s"]) / np.array(row["measured_s"]) - 1)
    return float(np.median(error)), float(error.max())


def ratio(samples_s: dict[str, list[float]], other: str) -> str:
    """Of the placed step, over rounds: median and quartiles."""
    low, middle, high = np.percentile(np.array(samples_s["placed"]) / np.array(samples_s[other]), (25, 50, 75))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def markdown(facts: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """The page."""
    text = [
        f"# Steps over two machines\n\n{as_markdown(facts)}\n",
        "Network namespaces, a core each, gloo; `tc tbf` limits each direction of the link to the rate.\n"
        "The load is that of the minute before, of everything else on these cores; an idle machine has none.\n",
    ]
    rows = [
        (what, rate, len(row["measured_s"]), *(f"{error:.1%}" for error in errors(row)), f"{row['load']:.1f}")
        for stage in ("sleeping", "real")
        for (what, rate), row in ((key.split(", "), row) for key, row in found[stage].items())
    ]
    head = ("step", "rate", "placements", "median error", "largest error", "load before")
    text += ["\n## Simulated against measured\n\n", table(head, *rows)]
    raced, field = [], []
    for key, row in found["race"].items():
        samples_s, why = {name: each for name, each in row["samples_s"].items() if each}, row["why"]
        medians = {name: float(np.median(each)) for name, each in samples_s.items()}
        ddp = min((name for name in medians if name.partition(",")[0] == "ddp"), key=medians.__getitem__)
        raced.append(
            (
                *key.split(", "),
                *(f"{medians[name] * 1e3:.1f}" for name in ("placed", ddp, "one core")),
                *(ratio(samples_s, name) for name in (ddp, "one core")),
                f"{row['share_of_first']:.0%}",
                f"{row['sent_bytes'] / 1e6:.2f}",
                f"{row['load']:.1f}",
            )
        )
        for name in (ddp, *FIELD[1:]):
            shown = (f"{medians[name] * 1e3:.1f}", ratio(samples_s, name)) if name in medians else ("", "")
            field.append((*key.split(", "), name, *shown, why.get(name) or "" if name != ddp else why.get(ddp) or ddp))
    head = (
        *("workload", "rate", "placed, ms", "best DDP, ms", "one core, ms", "placed / DDP"),
        *("placed / one core", "work on a", "sent, MB", "load before"),
    )
    if raced:
        rounds = min(len(row["samples_s"]["placed"]) for row in found["race"].values())
        text += [f"\n## Raced, {rounds} rounds\n\n", table(head, *raced)]
        text.append("\nRatios are medians over the rounds, with quartiles. Above 1, the other machine does not pay.\n")
        head = ("workload", "rate", "row", "ms", "placed / row", "its quickest variant, or why it did not run")
        text += ["\n## PyTorch's own ways, in the same race\n\n", table(head, *field)]
        text.append(
            f"\n`{FIELD[-1]}` alone has another arithmetic: gradients are rounded to bf16 before they are added.\n"
        )
    return "".join(text)


def main() -> None:
    options = parse(
        __doc__,
        argument("stages", nargs="*", default=["sleeping", "real", "race"]),
        argument("--rates", nargs="*", default=list(RATES)),
        argument("--evaluations", type=int, default=4000, help="of each seed"),
        argument("--rounds", type=int, default=FINAL.max_rounds, help="of the race"),
        argument("--raced", nargs="*", default=[name for name, _ in RACED], help="workloads of the race"),
        argument("--name", default="machines", help="of the results' files"),
        *(argument(f"--{name}", help="of one rank") for name in ("stage", "out", "workload")),
        *(argument(f"--{name}", type=int, default=0, help="of one rank") for name in ("seed", "count")),
    )
    if under_torchrun():
        run_rank(options)
        return
    facts, kept = record(), RESULTS / f"{options.name}.json"
    found = {stage: dict[str, Any]() for stage in ("sleeping", "real", "race")}
    if kept.exists():
        found |= {stage: rows for stage, rows in json.loads(kept.read_text()).items() if stage in found}
    for stage in options.stages:
        for rate in options.rates:
            raced = [(name, count) for name, count in RACED if name in options.raced]
            for workload, count in (("naps", 1),) if stage == "sleeping" else REAL if stage == "real" else raced:
                named = f"{workload} K={count}" if count > 1 else workload
                load = os.getloadavg()[0]
                if stage == "sleeping":
                    row = staged(rate, stage, seed=options.seed)
                elif stage == "real":
                    row = fidelity(rate, workload, count)
                else:
                    asked = {"evaluations": options.evaluations, "rounds": options.rounds}
                    row = staged(rate, stage, workload=workload, count=count, **asked)
                found[stage][f"{named}, {rate}"] = row | {"load": load}
                save(options.name, {"schema": 1, **facts, **found}, markdown(facts, found), indent=None)


if __name__ == "__main__":
    main()
