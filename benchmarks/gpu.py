"""What has to be seen on real GPUs, in at most eight minutes: python benchmarks/gpu.py (`make gpu`).

Each stage is a process with a time limit, and says in one line what it found. All goes into
`benchmarks/results/gpu/HARDWARE/` (`gpu.json`, `gpu.md`); what a stage said on the way is in `runs/gpu/STAGE.err`.
Without a GPU it says so in one line and is done. `--host cores:2` runs the stages on cores, to see that they run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_stages.verdict import Verdict
from record import RESULTS, argument, as_markdown, parse, record, save

from rlplace import cuda
from rlplace.doctor import System
from rlplace.doctor.checks import driver_version

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 480.0
"""Of all stages together."""
CORES_PER_CHECK = 2
"""Of this machine, for each stage that runs beside others."""
WORKLOAD = "nmt@layers=1,units=64,batch=16,steps=6,vocab=500"


@dataclass(frozen=True)
class Stage:
    """A command, how long it may take, and how to read what it printed."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    read: Callable[[str, int], Verdict]
    is_timed: bool = True
    """Whether it measures times: then it runs alone; the others run beside each other, before."""


def main() -> int:
    options = parse(
        __doc__.partition("\n")[0],
        argument("--host", default="", help="instead of this machine's GPUs, e.g. cores:2"),
        argument("--only", default="", help="names of stages, with commas between them"),
        argument("--results", type=Path, default=RESULTS / "gpu", help="where a folder for this hardware goes"),
        argument("--scratch", type=Path, default=ROOT / "runs" / "gpu", help="for what the stages leave behind"),
    )
    count = cuda.num_gpus()
    if not count and not options.host:
        print("make gpu: PyTorch sees no GPU here, so there is nothing to check (rlplace doctor tells why)")
        return 0
    names = [cuda.gpu(index).name for index in range(count)]
    hardware = " and ".join(f"{number} x {name}" for name, number in Counter(names).items()) or "no GPU"
    folder = options.results / re.sub(r"[^A-Za-z0-9]+", "-", options.host or hardware).strip("-")
    for each in (folder, options.scratch):
        each.mkdir(parents=True, exist_ok=True)
    listed = stages(options.host, count, options.scratch)
    chosen = [stage for stage in listed if not options.only or stage.name in options.only.split(",")]
    facts = {**record(), "gpus": hardware, "driver": driver_version(System()), "cuda": torch.version.cuda, "stages": []}
    until_s, rows = time.monotonic() + BUDGET_S, {}

    def keep(stage: Stage) -> None:
        row = run(stage, until_s - time.monotonic(), options.scratch)
        with lock:
            rows[stage.name] = row
            facts["stages"] = [rows[each.name] for each in chosen if each.name in rows]
            save(folder.resolve() / "gpu", facts, table(facts))

    lock = threading.Lock()
    with ThreadPoolExecutor(max_workers=max(len(os.sched_getaffinity(0)) // CORES_PER_CHECK, 1)) as pool:
        list(pool.map(keep, (stage for stage in chosen if not stage.is_timed)))
    for stage in chosen:
        if stage.is_timed:
            keep(stage)
    found = Counter(row["status"] for row in facts["stages"])
    counts = ", ".join(f"{found[status]} {status}" for status in ("ok", "failed", "skipped"))
    print(f"make gpu: {len(chosen)} stages on {options.host or hardware}: {counts}; see {folder}")
    return found["failed"] > 0


def stages(host: str, count: int, scratch: Path) -> list[Stage]:
    """All of them, the quick ones that others rest on first.

    Args:
        host: instead of GPUs, for all stages.
        count: how many GPUs there are.
        scratch: for what the commands write.
    """
    halves, quarters, mixed = host or "cuda/2", host or "cuda/4", host or "cuda+cpu"
    several = host or ("auto" if count > 1 else "auto+cpu")
    here = [sys.executable, "benchmarks/gpu_stage.py"]
    rlplace = [sys.executable, "-c", "from rlplace.cli.main import main; raise SystemExit(main())"]
    listed: list[Stage] = []

    def checks(name: str, what: str, host_word: str, limit_s: float, module: str = "", is_timed: bool = False) -> None:
        listed.append(Stage(name, what, (*here, module or name, host_word), limit_s, _own, is_timed))

    def runs(name: str, what: str, words: str, limit_s: float, read: Callable[[str, int], Verdict]) -> None:
        listed.append(Stage(name, what, (*rlplace, *shlex.split(words)), limit_s, read))

    checks("copies", "values of copies between all pairs", mixed, 45, "copies")
    checks("copies-parts", "the same between parts", quarters, 45, "copies")
    checks("waits", "no op waits for a GPU", halves, 45)
    checks("waits-mixed", "the same beside the CPU", mixed, 45, "waits")
    checks("races", "CUDA sanitizer", halves, 60)
    checks("races-mixed", "the same beside the CPU", mixed, 60, "races")
    plugins = ("-n", "3", "-p", "no:benchmark", "-p", "no:cacheprovider")
    tests = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plugins)
    listed.append(Stage("tests", "tests that need a GPU", tests, 240, _tests, is_timed=False))
    checks("attention", "attention on a GPU and on the CPU", mixed, 45)
    checks("out-of-memory", "a GPU with 4 MiB", mixed, 45, "out_of_memory")
    checks("memory", "peaks, counted and simulated", halves, 60)
    processes = host.replace("cores", "procs") or "cuda-procs"
    checks("processes", "a process for each GPU, and NCCL", processes, 90, is_timed=True)
    checks("profiles", "links and ops", host or "auto+cpu", 60, is_timed=True)
    checks("traces", "what tracing a step costs", mixed, 60, is_timed=True)
    checks("traces-parts", "the same on parts", halves, 60, "traces", is_timed=True)
    plot = shlex.quote(str(scratch))
    fidelity = f"fidelity {WORKLOAD} --placements 12 --fit 6 --json"
    runs("fidelity", "simulated and measured", f"{fidelity} --host {several} --plot {plot}/all.png", 90, _fidelity)
    runs("fidelity-parts", "the same on parts", f"{fidelity} --host {halves} --plot {plot}/parts.png", 90, _fidelity)
    trained = shlex.quote(str(scratch / "run"))
    train = f"train {WORKLOAD} --host {halves} --budget 20s --run {trained} --overwrite --quiet --json"
    runs("train", "learned from measured steps", train, 120, _rows)
    runs("export", "the learned placement against eager PyTorch", f"export {trained} --check --json", 45, _export)
    methods = "single,eft,anneal,eager,cuda-graph,ddp"
    compare = f"compare {WORKLOAD} --host {halves} --methods {methods} --seconds 15 --quiet --json"
    runs("compare", "beside PyTorch's own ways", compare, 150, _rows)
    return listed


def run(stage: Stage, left_s: float, scratch: Path) -> dict[str, Any]:
    """One row of the results; says its verdict."""
    limit_s, begin_s = min(stage.limit_s, left_s), time.monotonic()
    if limit_s < 1.0:
        verdict = Verdict("failed", f"not run: the {BUDGET_S:.0f} s of all stages are used up")
    else:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (scratch / f"{stage.name}.err").open("w", encoding="utf-8") as errors:
            try:
                done = subprocess.run(
                    stage.command,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    timeout=limit_s,
                    check=False,
                )
                verdict = _read(stage, done.stdout, done.returncode)
            except subprocess.TimeoutExpired:
                verdict = Verdict("failed", f"did not end within {limit_s:.0f} s")
    seconds = time.monotonic() - begin_s
    print(f"{verdict.status:8} {stage.name:16} {seconds:4.0f} s  {verdict.line}", flush=True)
    command = shlex.join(["python", *stage.command[1:]]).replace(str(ROOT) + os.sep, "")
    return {"name": stage.name, "what": stage.what, "command": command, "seconds": round(seconds, 1), **asdict(verdict)}


def table(facts: dict[str, Any]) -> str:
    """The results as one Markdown table."""
    rows = [
        f"| {row['name']} | {row['what']} | {row['status']} | {row['line'].replace('|', '/')} | {row['seconds']:.0f} |"
        for row in facts["stages"]
    ]
    commands = "\n".join(f"    {row['command']}" for row in facts["stages"])
    return (
        f"# GPUs: {facts['gpus']}\n\n{as_markdown(facts)}\n"
        f"Driver {facts['driver'] or 'unknown'}, CUDA {facts['cuda']}.\n\n"
        "| stage | what | verdict | found | seconds |\n|---|---|---|---|---|\n"
        f"{chr(10).join(rows)}\n\nThe stages, each in a process of its own:\n\n{commands}\n"
    )


def _read(stage: Stage, printed: str, code: int) -> Verdict:
    try:
        return stage.read(printed, code)
    except (ValueError, LookupError, TypeError):
        return Verdict("failed", f"exit code {code}; see {stage.name}.err")


def _last(printed: str) -> dict[str, Any]:
    return dict(json.loads(printed.strip().splitlines()[-1]))


def _own(printed: str, code: int) -> Verdict:
    return Verdict(**_last(printed))


def _tests(printed: str, code: int) -> Verdict:
    skipped = [line for line in printed.splitlines() if line.startswith("SKIPPED")]
    line = printed.strip().splitlines()[-1].strip("= ")
    if code == 0 and " passed" not in line:
        return Verdict("skipped", line, {"skipped": skipped})
    return Verdict.of(code == 0, line, skipped=skipped)


def _fidelity(printed: str, code: int) -> Verdict:
    found = _last(printed)
    overall, ceiling = (
        "none" if found[name] is None else f"{found[name]:.2f}" for name in ("spearman", "spearman_ceiling")
    )
    line = f"rank correlation {overall} (of two measurements: {ceiling}), error {found['median_abs_rel_error']:.1%}"
    return Verdict.of(code == 0, f"{line} on {found['host']}", **found)


def _rows(printed: str, code: int) -> Verdict:
    found = _last(printed)
    figures = [
        f"{row['method']} {row.get('step_time_s', row.get('value_s')) * 1e3:.2f} ms" if row["status"] == "ok"
        else f"{row['method']} {row['status']}"
        for row in found["rows"]
    ]  # fmt: skip
    is_ok = code == 0 and all(row["status"] in ("ok", "skipped") for row in found["rows"])
    return Verdict.of(is_ok, ", ".join(figures), rows=found["rows"])


def _export(printed: str, code: int) -> Verdict:
    found = _last(printed)
    differences = f"losses {found['max_loss_rel_diff']:.1e}, parameters {found['max_param_rel_diff']:.1e}"
    return Verdict.of(code == 0 and found["ok"], f"largest relative differences: {differences}", **found)


if __name__ == "__main__":
    sys.exit(main())
