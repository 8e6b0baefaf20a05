"""Whether what a run claims is so: python benchmarks/claims.py simulate, and python benchmarks/claims.py real.

`simulate`: runs in which every step is drawn (normal, 5 % noise, independent), through the code of `rlplace train` that
makes the final table and its verdict. Eight placements, everything on one device among them, and plain PyTorch with all
threads and with one: all equal, or one of the eight 5 % faster. A seed is one run.

`real`: twelve runs of `rlplace.place` on this machine, each in a process of its own. Then two other processes run the
placed step and a plain loop of the reference that the verdict names, in turn, for sixty pairs. An idle machine is
needed, for about twenty minutes. A run that is done is in `results/claims-real.json`, and is not done again.

Both write a page into `results/`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from record import RESULTS, argument, as_markdown, parse, record, save, table
from torch import nn

import rlplace
from rlplace.files import write_json_atomic
from rlplace.measure import Costs, Host, Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.host_runner import as_measurement
from rlplace.measure.timing.race import Timer, race
from rlplace.measure.timing.verdict import interval
from rlplace.session.session_records import MethodResult
from rlplace.training.config import TrainConfig
from rlplace.training.outputs import measure_table
from rlplace.training.phases import judge_table

NOISE = 0.05
"""Deviation of a step over its mean."""
METHODS = ("portfolio", "learned", "single", "heft", "eft", "blocks", "expert", "round-robin")


class DrawnSteps:
    """A runner whose steps take no time: each is drawn.

    Args:
        step_s: mean of a step.
        seed: of the draws.
        faster: share of the step that the plan `chosen` saves.
        chosen: fingerprint of that plan.
    """

    reference = None

    def __init__(self, step_s: float, seed: int, faster: float, chosen: str) -> None:
        self._step_s, self._faster, self._chosen = step_s, faster, chosen
        self._generator = np.random.default_rng(seed)

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol,
        others: Sequence[EagerRecipe] = (),
        deadline_s: float = math.inf,
    ) -> list[Measurement]:
        """As `HostRunner.measure_plans`, by the same race."""
        names = [plan.fingerprint for plan in plans] + [""] * len(others)
        lanes = race([self._timer(name == self._chosen) for name in names], None, protocol)
        return [as_measurement(lane, has_reference=False) for lane in lanes]

    def _timer(self, is_faster: bool) -> Timer:
        mean_s = self._step_s * (1 - self._faster * is_faster)
        return lambda: mean_s * (1 + NOISE * float(self._generator.standard_normal()))


def drawn_run(problem: Problem, step_s: float, seed: int, faster: float) -> tuple[str, str]:
    """The method that is named, and the verdict on it."""
    simulator = Simulator(problem)
    rows = np.random.default_rng(0).integers(0, 2, (len(METHODS), problem.grouping.num_groups), dtype=np.int32)
    rows[METHODS.index("single")] = 0
    devices = rows[:, problem.grouping.op_group]
    plans = {method: simulator.plan(row) for method, row in zip(METHODS, devices, strict=True)}
    runner, said = DrawnSteps(step_s, seed, faster, plans["learned"].fingerprint), list[str]()
    with (
        mock.patch("rlplace.measure.evaluator.make_runner", lambda *_, **__: runner),
        mock.patch("rlplace.measure.evaluator.idle_share", lambda _: 1.0),
    ):
        evaluator, config = Evaluator(problem, simulator), TrainConfig()
        entries = {method: MethodResult(plan, is_searched=method == "learned") for method, plan in plans.items()}
        found = measure_table(problem, evaluator, entries, config, said.append)
        judged = judge_table(problem, evaluator, found, config, said.append)
    assert judged.verdict is not None, said
    return judged.best, judged.verdict.outcome


def simulate(num_runs: int) -> None:
    """Writes `results/claims-simulated.md`."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    graph = rlplace.capture(model, torch.randn(2, 4))
    costs = Costs(np.full((graph.num_ops, 2), 0.2 / graph.num_ops), "profiled")
    problem = Problem.grouped(graph, Host.detect("cores:2"), costs, grouping="none")
    lines, result = [], {**record(), "noise": NOISE, "runs": []}
    for rounds, step_s in ((40, 0.2), (25, 0.33)):
        for faster in (0.0, 0.05):
            found = [drawn_run(problem, step_s, seed, faster) for seed in range(num_runs)]
            outcomes = Counter(outcome for _, outcome in found)
            quiet = sum(outcomes[name] for name in ("no clear difference", "not known")) / num_runs
            hit = sum(best == "learned" and outcome == "faster" for best, outcome in found) / num_runs
            share, bar = (quiet, 0.95) if faster == 0 else (hit, 0.9)
            what = "no verdict of a difference" if faster == 0 else "found and called faster"
            told = "eight equal placements" if faster == 0 else f"one of eight {faster:.0%} faster"
            lines.append((told, rounds, num_runs, what, f"{share:.1%}", f"{bar:.0%}", "yes" if share >= bar else "NO"))
            result["runs"].append({"faster": faster, "rounds": rounds, "share": share, "outcomes": dict(outcomes)})
            print(*lines[-1], dict(outcomes), flush=True)
    head = ("runs", "rounds of the last race", "seeds", "what", "share", "at least", "met")
    page = (
        "# Claims, simulated\n\nEvery step is drawn with 5 % noise. The table's race, which chooses, has 25 rounds.\n\n"
    )
    save("claims-simulated", result, f"{page}{table(head, *lines)}\n{as_markdown(result)}")


if __name__ == "__main__":
    given = parse(
        __doc__,
        argument("mode", choices=("simulate", "real")),
        argument("--runs", type=int, default=400, help="simulated runs of each kind"),
    )
    simulate(given.runs)
