"""A truth that nobody sees, on a suite of problems: python benchmarks/core_true.py core-dev, then again with --render.

Every problem, truth, seed and number of measurements with every row of `hidden_truth.py`, and for each truth the best
that a long search on it finds. What is done is kept in `results/NAME.jsonl`, a line a row. Any number of processes
with the same command share the work: each takes the next row that no other has, and a row whose process was stopped is
free again. `--render` writes `results/NAME.json` and `results/NAME.md`. In the suite `learn-dev` a seed is that of the
problem, too.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from best_known import encode
from core_true_tables import UNTRACED, markdown
from hidden_truth import ROWS, TRACED_COSTS, TrueConfig, compare_true
from record import RESULTS, argument, parse, record, save
from suites import CORE_DEV, LEARN_DEV, key_of, problem_of

from rlplace.compare import Row
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
class Question:
    """A line that is to be answered: a row with its budget on a case, or the reference."""

    case: Case
    method: str
    """A row, or `REFERENCE`."""
    measured: int
    """Plans that it may measure."""
    allowed: int
    """Placements that it may simulate."""
    is_traced: bool = False
    """Whether measurements have timelines."""

    @property
    def facts(self) -> dict[str, Any]:
        """What its line begins with."""
        facts = {"method": self.method, "measured": self.measured, "allowed": self.allowed}
        return self.case.facts | facts | ({"traced": True} if self.is_traced else {})


@dataclass(frozen=True)
class Settings:
    """What runs on every case."""

    methods: tuple[tuple[str, ...], ...]
    """Rows by importance: those of the first group run on all cases before any of the second. `NAME-untraced` is a row
    without timelines beside others that have them."""
    measured: dict[str, tuple[int, ...]]
    """Numbers of measured plans for each kind of truth."""
    evaluations: int | None
    """Simulated placements of a row; as `benchmarks/hidden_truth.py` has it where None."""
    reference: int
    """Evaluations of the search on the truth."""
    is_traced: bool = False
    """Whether measurements have timelines."""

    def questions(self, cases: Iterable[Case]) -> list[Question]:
        """All of them, in the order in which they run: by importance, then seed by seed, long ones first."""
        found: list[tuple[tuple[int, ...], Question]] = []
        for place, case in enumerate(cases):
            reference = Question(case, REFERENCE, 0, self.reference)
            found.append(((0, case.truth.seed, 0, place), reference))
            for group, names in enumerate(self.methods):
                for count in self.measured[case.truth.kind]:
                    for name in names:
                        order = group, case.truth.seed, -count, place
                        found.append((order, self._question(case, name, count)))
        return [question for _, question in sorted(found, key=lambda pair: pair[0])]

    def _question(self, case: Case, name: str, count: int) -> Question:
        method, is_traced = name.removesuffix(UNTRACED), self.is_traced and not name.endswith(UNTRACED)
        config = TrueConfig(case.truth, count, (method,), self.evaluations, is_traced=is_traced)
        return Question(case, method, count, config.budget().evaluations or 0, is_traced)


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


def run(questions: list[Question], path: Path) -> None:
    """Answers what has no answer, and what no other process is at."""
    problem_for, begin = cache(problem_of), time.monotonic()
    with open(path.with_suffix(".lock"), "ab") as lock:
        done = _done(path)
        for number, question in enumerate(questions):
            asked = key(question.facts)
            if asked in done:
                continue
            with claimed(lock, asked) as is_mine:
                if not is_mine or asked in (done := _done(path)):
                    continue
                problem = problem_for(question.case.workload, question.case.host)
                append(path, question.facts | answer(question, problem))
            spent_s = time.monotonic() - begin
            say(f"{' '.join(map(str, asked))}: {number + 1} of {len(questions)}, {spent_s:.0f} s")


def _done(path: Path) -> set[tuple[object, ...]]:
    return {key(line) for line in read_lines(path) if "method" in line}


@contextmanager
def claimed(lock: BinaryIO, asked: tuple[object, ...]) -> Iterator[bool]:
    """Whether this process alone is at a question until the block ends; the claim of a process ends with it.

    A byte of the file is locked, at a place that the question determines; the file stays empty.
    """
    place = zlib.crc32(repr(asked).encode())
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, place)


def answer(question: Question, problem: Problem) -> dict[str, Any]:
    """The rest of its line."""
    truth = question.case.truth
    if question.method == REFERENCE:
        return search_truth(problem, truth, question.allowed)
    config = TrueConfig(truth, question.measured, (question.method,), question.allowed, is_traced=question.is_traced)
    result = compare_true(problem, config)
    if result.is_interrupted:
        raise KeyboardInterrupt
    return _answer(result.rows[0])


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
    kept = {"suite": suite} | finished(path, key, note)
    save(path.with_suffix(""), kept, markdown(suite, kept["rows"], kept), indent=None)


def finished(path: Path, key: Callable[[dict[str, Any]], object], note: str | None = None) -> dict[str, Any]:
    """The results of what was finished, or the committed results where there is nothing else.

    Args:
        path: of the lines.
        key: equal for two lines that answer the same question, of which the last one counts.
        note: as of `render`.
    """
    lines, results = read_lines(path), path.with_suffix(".json")
    runs = [line["run"] for line in lines if "run" in line]
    before = dict(read_json(results)) if results.exists() or not runs else {}
    note = before.get("note", "") if note is None else note
    if not runs:
        return before | {"note": note}
    commands = list(dict.fromkeys(whole_command(run["command"]) for run in runs))
    rows = list({key(line): line for line in lines if "run" not in line}.values())
    return {"schema": 1, **runs[-1], "commands": commands, "note": note, "rows": rows}


def whole_command(command: str) -> str:
    """A command line that does all of what one process of several did, and writes where it does by default."""
    words = shlex.split(command)
    for option in ("--shard", "--name"):
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    return shlex.join(words)


def groups_of(text: str, *, is_traced: bool) -> tuple[tuple[str, ...], ...]:
    """The rows in `learned,portfolio;calibrated`, by importance; `all` is every row."""
    every = ",".join(name for name in ROWS if is_traced or name != TRACED_COSTS)
    return tuple(tuple(group.replace("all", every).split(",")) for group in text.split(";"))


def counts_of(text: str, measured: str) -> dict[str, tuple[int, ...]]:
    """The numbers of measured plans of each kind in `hard,misfit=4+16`; `measured` where none are named."""
    counts = {}
    for word in text.split(","):
        kind, _, named = word.partition("=")
        counts[kind] = tuple(map(int, named.split("+") if named else measured.split(",")))
    return counts


def main() -> None:
    options = parse(
        __doc__,
        argument("suite", choices=("core-dev", "learn-dev")),
        argument("--truths", default=",".join(KINDS), help="KIND, or KIND=COUNT+COUNT in place of --measured"),
        argument("--seeds", help="FIRST-LAST, or with commas; 100-104, of learn-dev 0-9"),
        argument("--measured", default="16,64", help="plans that a row may measure, with commas between them"),
        argument("--methods", default="all", help="rows; those after a semicolon run when all others are done"),
        argument("--evaluations", type=int, help="placements that a row may simulate"),
        argument("--trace", action="store_true", help="measurements have timelines, but for rows NAME-untraced"),
        argument("--reference", type=int, default=20_000, help="evaluations of the search on the truth"),
        argument("--problems", help="WORKLOAD/HOST, with semicolons between them: only these"),
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
    counts = counts_of(options.truths, options.measured)
    cases = cases_of(options.suite, tuple(counts), seeds)
    if options.problems is not None:
        cases = [case for case in cases if case.facts["problem"] in options.problems.split(";")]
    groups = groups_of(options.methods, is_traced=options.trace)
    settings = Settings(groups, counts, options.evaluations, options.reference, options.trace)
    append(path, {"run": record()})
    run(settings.questions(cases), path)


if __name__ == "__main__":
    main()
