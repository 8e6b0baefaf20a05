"""Every policy beside search at equal budgets: python benchmarks/policies.py, then again with --render.

Each policy with its learner runs alone, from nothing and from the portfolio's starts, then together with annealing, and
as a guide of `portfolio`; beside them stand `portfolio` and the list scheduler with random weights over the same
groupings. What is done is kept in `results/NAME.jsonl`, a line a run: the command goes on where it was stopped.
`--render` writes `results/NAME.json`, `results/NAME.md` and the learning curves, `results/NAME.png`. One thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from core_true import append, finished, read_lines, seeds_of
from policies_table import markdown, save_curves
from random_weights import solve as solve_random_weights
from record import RESULTS, argument, parse, record, save
from suites import SUITES, key_of, problem_of

from rlplace.measure import Simulator
from rlplace.policy import POLICIES, LearnConfig
from rlplace.policy.base import pretrained_kinds
from rlplace.search import Budget, Task
from rlplace.training.method_choice import GUIDED, METHODS, POLICY, SCHEDULE

SUITE, EVALUATIONS, SEEDS = "core-dev", "500,3000", "0-9"
LEARNERS = {"placer": "ppo", "gnn": "ppo", "seq2seq": "reinforce", "improver": "ppo", "schedule": "ppo"}
"""The policies, each with the learner that is its own."""
MODES: dict[str, dict[str, Any]] = {
    "from nothing": {"init": "none", "share": 1.0},
    "alone": {"init": "starts", "share": 1.0},
    "with annealing": {"init": "starts", "share": 0.05},
}
"""What a policy begins with, and the share of the budget that it samples for."""
PRETRAINED: dict[str, dict[str, Any]] = {
    "pretrained": {"init": "pretrained", "share": 1.0},
    "pretrained, with annealing": {"init": "pretrained", "share": 0.05},
}
"""The same for a policy whose weights come with rlplace."""


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        row: its name.
        solve: spends a task's budget.
        policy: which it needs; none for a search.
    """

    row: str
    solve: Callable[[Task], object]
    policy: str | None = None


def contenders() -> list[Contender]:
    """Every row whose policy there is."""
    found = [Contender("portfolio", METHODS["portfolio"].run), Contender("random weights", solve_random_weights)]
    trained = pretrained_kinds()
    for policy, learner in LEARNERS.items():
        modes = MODES | (PRETRAINED if policy in trained else {})
        for mode, options in modes.items():
            config = LearnConfig(policy=policy, learner=learner, **options)
            found.append(Contender(f"{policy}+{learner}, {mode}", partial(METHODS[POLICY].run, config=config), policy))
        init = "pretrained" if policy in trained else "starts"
        config = LearnConfig(policy=policy, learner=learner, init=init)
        found.append(Contender(f"portfolio, guided by {policy}", partial(METHODS[GUIDED].run, config=config), policy))
    if SCHEDULE in trained:
        found.append(Contender("schedule, zero-shot", METHODS[SCHEDULE].run))
    return [one for one in found if one.policy is None or one.policy in POLICIES]


@dataclass(frozen=True)
class Question:
    """One run."""

    problem: tuple[str, str]
    row: str
    budget: int
    seed: int

    @property
    def facts(self) -> dict[str, Any]:
        """What its line begins with."""
        return {"problem": key_of(*self.problem), "row": self.row, "budget": self.budget, "seed": self.seed}


def key(line: dict[str, Any]) -> tuple[object, ...]:
    """Two lines with the same key answer the same question."""
    return tuple(line[name] for name in ("problem", "row", "budget", "seed"))


def answer(question: Question, contender: Contender) -> dict[str, Any]:
    """Step time, what it took, and the best so far wherever it improved."""
    problem = cache_of(*question.problem)
    task = Task(problem, Simulator(problem, threads=1), Budget(question.budget), seed=question.seed)
    begin, cpu = time.monotonic(), time.process_time()
    contender.solve(task)
    return {
        "step_time_s": task.best_s if task.history else None,
        "evaluations": task.evaluations,
        "seconds": round(time.monotonic() - begin, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
        "history": [[best.evaluations, best.best_s] for best in task.history],
    }


cache_of = cache(problem_of)
"""Problems by workload and host, each made once."""


def run(questions: Iterable[Question], by_row: dict[str, Contender], path: Path) -> None:
    """Runs what is missing."""
    done = {key(line) for line in read_lines(path) if "row" in line}
    for question in questions:
        if key(question.facts) in done:
            continue
        line = question.facts | answer(question, by_row[question.row])
        append(path, line)
        step_s = line["step_time_s"]
        told = "nothing that fits" if step_s is None else f"{step_s * 1e3:.2f} ms"
        words = ", ".join(str(value) for value in question.facts.values())
        print(f"{words}: {told}, {line['cpu_s']:.1f} s", file=sys.stderr, flush=True)


def render(path: Path, suite: str, note: str | None = None) -> None:
    """Writes table and picture, of what was finished, or of the committed results where there is nothing else.

    Args:
        path: of what was finished.
        suite: of the problems.
        note: what readers should know of these runs, kept with them; what was said before by default.
    """
    kept = finished(path, key, note)
    page = markdown(suite, kept["rows"], kept, picture=f"{path.stem}.png")
    save(path.with_suffix(""), kept, page, indent=None)
    save_curves(path.with_suffix(".png"), kept["rows"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(
        __doc__,
        argument("--suite", choices=sorted(SUITES), default=SUITE),
        argument("--evaluations", default=EVALUATIONS, help="budgets, with commas between them"),
        argument("--seeds", default=SEEDS, help="FIRST-LAST, or with commas"),
        argument("--rows", help="only these, with semicolons between them; `*` stands for anything"),
        argument("--problems", help="WORKLOAD/HOST, with semicolons between them: only these"),
        argument("--name", default="policies", help="of the results' files"),
        argument("--render", action="store_true", help="no run: table and picture of what was finished"),
        argument("--note", help="with --render: what readers should know of these runs, from now on"),
        words=arguments,
    )
    path = RESULTS / f"{options.name}.jsonl"
    if options.render:
        render(path, options.suite, options.note)
        return
    by_row = {one.row: one for one in contenders()}
    if options.rows is not None:
        patterns = options.rows.split(";")
        by_row = {row: one for row, one in by_row.items() if any(fnmatchcase(row, pattern) for pattern in patterns)}
    problems = list(SUITES[options.suite])
    if options.problems is not None:
        problems = [names for names in problems if key_of(*names) in options.problems.split(";")]
    questions = [
        Question(problem, row, int(budget), seed)
        for budget in options.evaluations.split(",")
        for seed in seeds_of(options.seeds)
        for problem in problems
        for row in by_row
    ]
    append(path, {"run": record()})
    run(questions, by_row, path)


if __name__ == "__main__":
    main()
