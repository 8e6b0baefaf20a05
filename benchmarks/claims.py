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
from functools import partial
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
from rlplace.measure.timing.race import Timer, idle_share, race
from rlplace.measure.timing.threads import SPINS_S, keep_freed_memory
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
        mock.patch("rlplace.measure.evaluator.make_runner", return_value=runner),
        mock.patch("rlplace.measure.evaluator.idle_share", return_value=1.0),
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
    for rounds, step_s in ((40, 0.2), (30, 0.33)):
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


PAIRS, WARMUP = 60, 3
BUDGET_S = 40.0
"""Of a real run, all of it."""
GAIN = 0.1
"""A run whose pairs show so much has to be called faster."""

Work = tuple[nn.Module, Any, Callable[..., torch.Tensor] | None, Any]
"""A model, its input, its loss and the target of that; without a loss for inference."""


class Branches(nn.Module):
    """The sum of modules that do not need one another."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All branches of `x`, added."""
        return torch.stack([branch(x) for branch in self.branches]).sum(dim=0)


class Recurrent(nn.Module):
    """A recurrent cell that is unrolled over time; the last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, width) of (B, T, width)."""
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


def convolutions(channels: int, depth: int) -> nn.Module:
    """Small convolutions, one after the other."""
    layers = [layer for _ in range(depth) for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def perceptron(width: int, depth: int) -> nn.Module:
    """Linear layers, one after the other."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def named(workload: str) -> Callable[[], Work]:
    """A workload of rlplace."""

    def make() -> Work:
        built = rlplace.workloads.build(workload, seed=0)
        return built.model, built.inputs, built.loss_fn, built.targets

    return make


def trained(make: Callable[[], nn.Module], *shape: int) -> Work:
    """A training step of a model on drawn inputs of this shape."""
    model, x = make(), torch.randn(shape)
    return model, x, nn.functional.mse_loss, torch.randn_like(model(x))


RECURRENT = partial(trained, lambda: Branches([Recurrent(384) for _ in range(2)]), 4, 20, 384)
CONVOLUTIONS = partial(trained, lambda: Branches([convolutions(48, 12) for _ in range(2)]), 1, 48, 24, 24)
TOWERS = partial(trained, lambda: Branches([perceptron(768, 12) for _ in range(2)]), 1, 768)


def convolutions_alone() -> Work:
    """The forward of four convolutional branches."""
    return Branches([convolutions(48, 12) for _ in range(4)]).eval(), torch.randn(1, 48, 24, 24), None, None


RUNS: dict[str, tuple[str, Callable[[], Work]]] = {
    "inception_v3@small, cores": ("cores:2", named("inception_v3@small")),
    "inception_v3@small, procs": ("procs:2", named("inception_v3@small")),
    "nmt@small, cores": ("cores:2", named("nmt@small")),
    "gpt2@small, cores": ("cores:2", named("gpt2@small")),
    "clip@small, cores": ("cores:2", named("clip@small")),
    "two recurrent branches, cores": ("cores:2", RECURRENT),
    "two recurrent branches, procs": ("procs:2", RECURRENT),
    "two convolutional branches, cores": ("cores:2", CONVOLUTIONS),
    "four convolutional branches, inference, cores": ("cores:2", convolutions_alone),
    "two towers, procs": ("procs:2", TOWERS),
    "two towers, cores": ("cores:2", TOWERS),
    "one wide perceptron, cores": ("cores:2", partial(trained, lambda: perceptron(1024, 8), 64, 1024)),
}
"""Host and step of each run: some gain by placing, some cannot."""


def made(name: str) -> tuple[str, Work]:
    """Host and step of a run, the same in each process."""
    torch.manual_seed(0)
    host, make = RUNS[name]
    return host, make()


def claim(name: str, folder: Path) -> None:
    """One run of `place`: writes its placement, and everything on one device beside it."""
    host, (model, inputs, loss_fn, targets) = made(name)
    optimizer, begin_s = None if loss_fn is None else "sgd", time.monotonic()
    options: dict[str, Any] = {"targets": targets, "host": host, "progress": True}
    placed = rlplace.place(
        model, inputs, loss_fn, optimizer, budget_s=BUDGET_S, path=folder / "placement.json", **options
    )
    took_s = time.monotonic() - begin_s
    assert placed.table is not None
    verdict = placed.table.verdict
    assert verdict is not None
    found = rlplace.measure.load_placement(folder / "placement.json")
    single = dataclasses.replace(found, plan=placed.table.plans["single"], verdict=None)
    rlplace.measure.save_placement(single, folder / "single.json")
    told = dataclasses.asdict(verdict) | {"line": str(verdict), "took_s": took_s}
    (folder / "claim.json").write_text(json.dumps(told))


def step_of(name: str, which: str, folder: Path) -> Callable[[], object]:
    """A function that runs a step: of a placement in the folder, or a plain loop."""
    host, (model, inputs, loss_fn, targets) = made(name)
    optimizer, args, kwargs = None if loss_fn is None else "sgd", (), {}
    if isinstance(inputs, dict):
        kwargs = inputs
    else:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
    if which in ("placed", "one device"):
        path = folder / ("placement.json" if which == "placed" else "single.json")
        placed = rlplace.place(model, inputs, loss_fn, optimizer, targets=targets, host=host, path=path, progress=False)
        aims = {} if targets is None else {"targets": targets}
        return lambda: placed(*args, **kwargs, **aims)
    torch.set_num_threads(1 if which == "eager on one thread" else 2)
    run: Callable[..., Any] = torch.compile(model) if which == "torch.compile" else model
    if loss_fn is None:

        def infer() -> object:
            with torch.no_grad():
                return run(*args, **kwargs)

        return infer
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = targets if isinstance(targets, tuple) else () if targets is None else (targets,)

    def train() -> object:
        update.zero_grad()
        loss = loss_fn(run(*args, **kwargs), *given)
        loss.backward()
        update.step()
        return loss

    return train


def serve(name: str, which: str, folder: Path) -> None:
    """Runs a step for each line that comes, and answers with its seconds.

    The C library keeps freed memory here, as it does in races for all that is timed, and a step follows another of its
    own, as in a loop.
    """
    keep_freed_memory()
    step = step_of(name, which, folder)
    for _ in range(WARMUP):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        step()
        begin_s = time.perf_counter()
        step()
        print(time.perf_counter() - begin_s, flush=True)


def pairs(name: str, reference: str, folder: Path) -> list[float]:
    """The placed step over the reference's, each in a process of its own, one asleep while the other runs.

    A team of OpenMP threads looks for work in a loop for some milliseconds after its step. It would take the cores from
    the other process: before each step, there is a pause.
    """
    ran = []
    for which in ("placed", reference):
        words = [sys.executable, __file__, "serve", "--name", name, "--which", which, "--folder", str(folder)]
        ran.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for process in ran:
            assert process.stdout is not None
            while (line := process.stdout.readline().strip()) != "ready":
                assert line or process.poll() is None, f"{name}: a step did not run"

        def one(process: subprocess.Popen[str]) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            time.sleep(2 * SPINS_S)
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        found = []
        for k in range(PAIRS):
            order = (0, 1) if k % 2 == 0 else (1, 0)
            seconds = {which: one(ran[which]) for which in order}
            found.append(seconds[0] / seconds[1])
        return found
    finally:
        for process in ran:
            process.stdin.close()
            process.wait(60)


def judged(name: str) -> dict[str, Any]:
    """A run, and its pairs."""
    with tempfile.TemporaryDirectory() as place:
        folder, words = Path(place), ["--name", name, "--folder", place]
        subprocess.run([sys.executable, __file__, "claim", *words], check=True)
        told = json.loads((folder / "claim.json").read_text())
        idle = idle_share()
        ratios = pairs(name, told["beside"][0]["name"], folder)
    low, middle, high = np.exp(interval(np.log(ratios), 0.025)).tolist()
    return told | {"name": name, "pairs": [low, middle, high], "idle": min(idle, idle_share()), "ratios": ratios}


def is_refuted(run: dict[str, Any]) -> bool:
    """Whether the interval of the pairs excludes the verdict; that of no clear difference is its own interval."""
    low, _, high = run["pairs"]
    first = run["beside"][0]
    return {
        "faster": low >= 1.0,
        "slower": high <= 1.0,
        "no clear difference": high < first["low"] or low > first["high"],
        "not known": False,
    }[run["outcome"]]


def real(most: int) -> None:
    """Writes `results/claims-real.md`."""
    path = RESULTS / "claims-real.json"
    result = json.loads(path.read_text()) if path.exists() else {**record(), "runs": []}
    done = {run["name"] for run in result["runs"]}
    for name in [name for name in RUNS if name not in done][:most]:
        result["runs"].append(judged(name))
        write_json_atomic(path, result, indent=1)
        print(*_line(result["runs"][-1]), flush=True)
    runs = result["runs"]
    known = sum(run["outcome"] != "not known" for run in runs)
    large = [run for run in runs if run["pairs"][1] <= 1 - GAIN]
    sums = (
        f"{len(runs)} runs, {known} of them known; {sum(map(is_refuted, runs))} verdicts outside the interval of "
        f"the pairs; {len(large)} runs whose pairs show {GAIN:.0%} and more, "
        f"{sum(run['outcome'] == 'faster' for run in large)} of them called faster."
    )
    print(sums)
    head = ("run", "verdict", "beside", "claimed", "pairs", "95 % interval", "outside", "took, s", "idle")
    words = (
        f"Each run is one of `rlplace.place` with `budget_s={BUDGET_S:g}`. Then the placed step and the reference ran "
        f"in processes of their own, in turn with pauses in which teams of threads fall asleep, {PAIRS} pairs. "
        "Each step follows another of its own, and all processes keep freed memory, as in races. Ratios are of the "
        "placed step over the reference."
    )
    page = f"# Claims, measured again\n\n{words}\n\n{table(head, *map(_line, runs))}\n{sums}\n\n{as_markdown(result)}"
    save("claims-real", result, page, indent=1)


def _line(run: dict[str, Any]) -> tuple[str, ...]:
    low, middle, high = run["pairs"]
    first = run["beside"][0]
    return (
        run["name"],
        run["outcome"],
        first["name"],
        f"{first['ratio']:.3f}",
        f"{middle:.3f}",
        f"{low:.3f} to {high:.3f}",
        "YES" if is_refuted(run) else "no",
        f"{run['took_s']:.0f}",
        f"{run['idle']:.0%}",
    )


if __name__ == "__main__":
    given = parse(
        __doc__,
        argument("mode", choices=("simulate", "real", "claim", "serve"), help="the last two are parts of `real`"),
        argument("--runs", type=int, default=400, help="simulated runs of each kind, or real runs at most"),
        argument("--name", default="", help="of a real run"),
        argument("--which", default="placed", help="step that is served"),
        argument("--folder", type=Path, default=Path(), help="of a real run"),
    )
    if given.mode == "simulate":
        simulate(given.runs)
    elif given.mode == "real":
        real(given.runs)
    elif given.mode == "claim":
        claim(given.name, given.folder)
    else:
        serve(given.name, given.which, given.folder)
