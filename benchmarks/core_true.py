"""A truth that nobody sees, on a suite of problems: python benchmarks/core_true.py core-dev, then again with --render.

Every problem, truth, seed and number of measurements with every row of `rlplace compare --true`, and for each truth the
best that a long search on it finds. What is done is kept in `results/NAME.jsonl`, a line a row: the command goes on
where it was stopped, and processes with a share each (`--shard 1/2`) may run at once. `--render` writes
`results/NAME.json` and `results/NAME.md`. In the suite `learn-dev` a seed is that of the problem, too.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from best_known import encode
from core_true_tables import markdown
from record import RESULTS, argument, parse, record, save
from suites import CORE_DEV, LEARN_DEV, key_of, problem_of

from rlplace.cluster import Cluster, reach
from rlplace.compare import Row
from rlplace.compare.hidden_truth import TrueConfig, compare_true
from rlplace.files import jsonable, read_json
from rlplace.measure import Problem, Simulator
from rlplace.measure.truth import KINDS, Truth, true_problem
from rlplace.say import say
from rlplace.search import Budget, find

REFERENCE = "reference"
"""The method of a line that says what a long search on the truth found."""
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A problem and its truth."""

    workload: str
    host: str
    truth: Truth

    @property
    def facts(self) -> dict[str, str]:
        """What its lines begin with."""
        return {"problem": key_of(self.workload, self.host), "truth": str(self.truth)}


@dataclass(frozen=True)
class Settings:
    """What runs on every case."""

    methods: tuple[str, ...]
    measured: tuple[int, ...]
    evaluations: int | None
    """Simulated placements of a row; as `rlplace compare --true` has it where None."""
    reference: int
    """Evaluations of the search on the truth."""
    is_traced: bool = False
    """Whether measurements have timelines."""


def cases_of(suite: str, kinds: tuple[str, ...], seeds: list[int]) -> list[Case]:
    """All of a suite, those of one problem and truth side by side; in `learn-dev` a seed is that of its problem."""
    if suite == "learn-dev":
        return [Case(*LEARN_DEV[seed], Truth(kind, seed)) for seed in seeds for kind in kinds]
    return [Case(*names, Truth(kind, seed)) for names in CORE_DEV for kind in kinds for seed in seeds]


def read_lines(path: Path) -> Lines:
    """What was finished so far; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line, by one process at a time, on a line of its own whatever was cut off before."""
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(max(file.seek(0, 2) - 1, 0))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if is_cut else b"") + json.dumps(jsonable(line)).encode() + b"\n")


def key(line: dict[str, Any]) -> tuple[object, ...]:
    """Two lines with the same key answer the same question."""
    named = tuple(line[name] for name in ("problem", "truth", "measured", "method", "allowed"))
    return *named, line.get("traced", False)


def run(cases: list[Case], settings: Settings, path: Path, cluster: Cluster | None = None) -> None:
    """Runs what is missing."""
    done = {key(line) for line in read_lines(path) if "method" in line}
    problem_for = lru_cache(maxsize=1)(problem_of)  # cases of a problem are side by side
    begin = time.monotonic()
    for number, case in enumerate(cases):
        for count in settings.measured:
            asked = TrueConfig(case.truth, count, settings.methods, settings.evaluations, is_traced=settings.is_traced)
            missing = tuple(name for name in asked.names if key(case.facts | _question(asked, name)) not in done)
            if missing:
                _compare(case, replace(asked, methods=missing), problem_for, path, cluster)
        reference = case.facts | {"method": REFERENCE, "measured": 0, "allowed": settings.reference}
        if key(reference) not in done:
            found = search_truth(problem_for(case.workload, case.host), case.truth, settings.reference)
            append(path, reference | found)
        spent_s = time.monotonic() - begin
        say(f"{case.facts['problem']} {case.truth}: {number + 1} of {len(cases)}, {spent_s:.0f} s")


def _compare(
    case: Case,
    config: TrueConfig,
    problem_for: Callable[[str, str], Problem],
    path: Path,
    cluster: Cluster | None,
) -> None:
    """Runs rows of a case, each kept as it comes."""

    def keep(row: Row) -> None:
        append(path, case.facts | _question(config, row.method) | _answer(row))

    problem = problem_for(case.workload, case.host)
    if compare_true(problem, config, on_row=keep, cluster=cluster).is_interrupted:
        raise KeyboardInterrupt


def _question(config: TrueConfig, name: str) -> dict[str, Any]:
    facts = {"method": name, "measured": config.measured, "allowed": config.budget().evaluations}
    return facts | ({"traced": True} if config.is_traced else {})


def _answer(row: Row) -> dict[str, Any]:
    return {
        "status": row.status,
        "step_time_s": row.value_s,
        "evaluations": row.evaluations,
        "num_measured": row.measured,
        "plan_s": row.plan_s,
        "why": row.why,
    }


def search_truth(problem: Problem, truth: Truth, evaluations: int) -> dict[str, Any]:
    """The best that `portfolio` finds where it sees the truth, plans and ranks as well: step time and placement."""
    true = true_problem(problem, truth)
    found = find(true, "portfolio", Simulator(true, threads=1), Budget(evaluations=evaluations), seed=truth.seed)
    return {
        "status": "oom" if found.devices is None else "ok",
        "step_time_s": found.step_time_s,
        "evaluations": found.evaluations,
        "plan_s": found.plan_s,
        "devices": "" if found.devices is None else encode(found.devices),
    }


def seeds_of(text: str) -> list[int]:
    """The seeds in `100-104` or `1,5,7`."""
    if "-" in text:
        first, last = (int(part) for part in text.split("-"))
        return list(range(first, last + 1))
    return [int(part) for part in text.split(",")]


def render(suite: str, path: Path, note: str | None = None) -> None:
    """Writes the tables, from what was finished, or from the committed results where there is nothing else.

    Args:
        suite: of the problems.
        path: of what was finished.
        note: what readers should know of these runs, kept with them; what was said before by default.
    """
    results = path.with_suffix(".json")
    before = read_json(results) if results.exists() else {}
    kept = {"note": before.get("note", ""), "suite": suite} | finished(path, key)
    if note is not None:
        kept |= {"note": note}
    save(path.with_suffix(""), kept, markdown(suite, kept["rows"], kept), indent=None)


def finished(path: Path, key: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The results of what was finished, or the committed results where there is nothing else.

    Args:
        path: of the lines.
        key: equal for two lines that answer the same question, of which the last one counts.
    """
    lines = read_lines(path)
    runs = [line["run"] for line in lines if "run" in line]
    if not runs:
        return dict(read_json(path.with_suffix(".json")))
    commands = list(dict.fromkeys(whole_command(run["command"]) for run in runs))
    rows = list({key(line): line for line in lines if "run" not in line}.values())
    return {"schema": 1, **runs[-1], "commands": commands, "rows": rows}


def whole_command(command: str) -> str:
    """A command line that does all of what one process of several did, and writes where it does by default."""
    words = shlex.split(command)
    for option in ("--shard", "--name"):
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    return shlex.join(words)


def main() -> None:
    options = parse(
        __doc__,
        argument("suite", choices=("core-dev", "learn-dev")),
        argument("--truths", default=",".join(KINDS)),
        argument("--seeds", help="FIRST-LAST, or with commas; 100-104, of learn-dev 0-9"),
        argument("--measured", default="16,64", help="plans that a row may measure, with commas between them"),
        argument("--methods", default="all"),
        argument("--evaluations", type=int, help="placements that a row may simulate"),
        argument("--trace", action="store_true", help="measurements have timelines"),
        argument("--reference", type=int, default=20_000, help="evaluations of the search on the truth"),
        argument("--problems", help="WORKLOAD/HOST, with semicolons between them: only these"),
        argument("--shard", default="1/1", help="I/N: every N-th case, from the I-th"),
        argument("--cluster", default="off", help="whose workers have a row each: off, auto or ADDRESS"),
        argument("--name", help="of the results' files"),
        argument("--render", action="store_true", help="no run: the tables of what was finished"),
        argument("--note", help="with --render: what readers should know of these runs, from now on"),
    )
    is_development = options.suite == "learn-dev"
    usual = f"{'learn-dev-true' if is_development else 'core-true'}{'-traced' * options.trace}"
    path = RESULTS / f"{options.name or usual}.jsonl"
    if options.render:
        render(options.suite, path, options.note)
        return
    seeds = seeds_of(options.seeds or ("0-9" if is_development else "100-104"))
    cases = cases_of(options.suite, tuple(options.truths.split(",")), seeds)
    if options.problems is not None:
        cases = [case for case in cases if case.facts["problem"] in options.problems.split(";")]
    shard, shards = (int(part) for part in options.shard.split("/"))
    measured = tuple(int(part) for part in options.measured.split(","))
    settings = Settings(
        tuple(options.methods.split(",")), measured, options.evaluations, options.reference, options.trace
    )
    append(path, {"run": record()})
    with reach(options.cluster, say=say) as cluster:
        run(cases[shard - 1 :: shards], settings, path, cluster)


if __name__ == "__main__":
    main()
