"""Whether a run survives being killed, and being suspended: python benchmarks/crash.py --kills 50 --suspends 10 --json

Runs of `rlplace train` are killed (SIGKILL, with all their processes) at moments drawn over the duration of a straight
run, and gone on with by `rlplace train --resume`, which is killed again, several times. After each kill, and in the
end, every file of the run folder is read by its own reader, and compared with what it held before:

- lost: a measurement that is gone, or a best placement that is worse than the one before;
- corrupt: a file that cannot be read;
- different: a simulated run whose answer is not, to the bit, that of a straight run;
- failed: a command that did not end as it should.

With `--suspends N`, a simulated run and a measured one are each suspended N times besides (SIGSTOP, to all their
processes, and SIGCONT after `--suspend-s`):

- blamed: a measurement that is not `ok`, or that has a sample as long as a suspension.

The exit code is 1 if there is any. Simulated runs go two at a time, measured ones alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from crash_folder import Found, answer, final_ratio, look, simulator_of
from record import argument, as_markdown, parse, record, save

from rlplace.measure import Simulator

KILLS_A_RUN = 4
"""Then a run is left to come to its end."""
MEASURED_SHARE = 0.2
TOLERANCE = 1.25
"""A measured placement is no worse than before within this: ratios of short races on two cores are so far apart."""
LONGEST_S = 600.0
"""A command that takes longer is stuck."""
POLL_S = 0.02


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        name: for people.
        workload: what is placed.
        host: where.
        options: of `rlplace train`.
        is_measured: whether steps are run.
    """

    name: str
    workload: str
    host: str
    options: tuple[str, ...]
    is_measured: bool = False

    def command(self, folder: Path) -> list[str]:
        """Starts a run in `folder`, over what a run left there that was killed before it began."""
        words = ["train", self.workload, "--host", self.host, *self.options]
        return [sys.executable, "-m", "rlplace", *words, "--run", str(folder), "--overwrite", "--store", "off"]


MEASURED_BUDGET_S = 8.0
SIMULATED = Case(
    "simulated", "rnnlm@layers=2,units=1024,batch=64,steps=6,vocab=2000", "2xK80", ("--evaluations", "3000")
)
MEASURED = Case(
    "measured",
    "nmt@layers=1,units=16,batch=4,steps=3,vocab=50",
    "cores",
    ("--budget", f"{MEASURED_BUDGET_S:g}s"),
    is_measured=True,
)


@dataclass
class Tally:
    """The faults, and the numbers of kills, runs and suspensions; filled from several threads."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    suspends: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(
        default_factory=lambda: {kind: [] for kind in ("lost", "corrupt", "different", "blamed", "failed")}
    )
    worst_ratio: float = 0.0
    """Of a measured run's final best to the best that was known before."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, words: str) -> None:
        """Notes something wrong."""
        with self.lock:
            self.wrong[kind].append(words)
        print(f"{kind}: {words}", file=sys.stderr, flush=True)


@dataclass
class Straight:
    """An undisturbed run: seconds until its folder and until its end, its answer, and the simulator of its problem."""

    begin_s: float
    end_s: float
    answer: dict[str, Any]
    simulator: Simulator | None

    def moment_s(self, generator: np.random.Generator) -> float:
        """A random moment to kill a run at, in seconds after its start; rarely before it has its folder."""
        return float(generator.uniform(0.9 * self.begin_s, self.end_s))

    def notice(self, end_s: float) -> None:
        """Notes another undisturbed run; the quickest counts, since the machine may have other work."""
        if end_s < self.end_s:
            self.begin_s, self.end_s = self.begin_s * end_s / self.end_s, end_s


def main() -> int:
    asked = parse(
        __doc__,
        argument("--kills", type=int, default=50),
        argument("--measured", type=int, help="how many of them of measured runs; by default a fifth"),
        argument("--suspends", type=int, default=0, help="suspensions of a simulated and of a measured run each"),
        argument("--suspend-s", type=float, default=15.0, help="seconds of each"),
        argument("--seed", type=int, default=0, help="of the moments"),
        argument("--name", help="of files in results/, .json and .md; by default none is written"),
        argument("--json", action="store_true", help="one JSON object on stdout"),
    )
    begin_s, facts, tally = time.monotonic(), record(), Tally()
    num_measured = round(MEASURED_SHARE * asked.kills) if asked.measured is None else asked.measured
    with tempfile.TemporaryDirectory(prefix="rlplace-crash-") as name:
        root = Path(name)
        environment = os.environ | {"XDG_CACHE_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"}
        straights = {}
        for case, kills in ((SIMULATED, asked.kills - num_measured), (MEASURED, num_measured)):
            if not kills and (not asked.suspends or (case.is_measured and asked.measured == 0)):
                continue
            for name in ("first", "straight"):  # the first one compiles kernels
                straight = run_straight(case, root / f"{case.name}-{name}", environment)
            straights[case.name] = straight
            shares = [min(KILLS_A_RUN, kills - done) for done in range(0, kills, KILLS_A_RUN)]
            with ThreadPoolExecutor(1 if case.is_measured else 2) as pool:
                waiting = [
                    pool.submit(
                        kill_often,
                        case,
                        straight,
                        share,
                        np.random.default_rng([asked.seed, case.is_measured, number]),
                        root / f"{case.name}-{number}",
                        environment,
                        tally,
                    )
                    for number, share in enumerate(shares)
                ]
                for each in waiting:
                    each.result()
            if asked.suspends:
                generator = np.random.default_rng([asked.seed, case.is_measured])
                folder = root / f"{case.name}-suspended"
                suspend_often(case, straight, asked, generator, folder, environment, tally)
    is_done = tally.kills.total() == asked.kills and all(tally.suspends[name] == asked.suspends for name in straights)
    result = {
        "schema": 1,
        "kills": tally.kills.total(),
        **{kind: len(words) for kind, words in tally.wrong.items()},
        "ok": not any(tally.wrong.values()) and is_done,
        "suspends_by_kind": dict(tally.suspends),
        "suspend_s": asked.suspend_s,
        "kills_by_kind": dict(tally.kills),
        "runs_by_kind": dict(tally.runs),
        "straight_s": {name: each.end_s for name, each in straights.items()},
        "worst_ratio": tally.worst_ratio,
        "what": {kind: words for kind, words in tally.wrong.items() if words},
        "seconds": time.monotonic() - begin_s,
        **facts,
    }
    if asked.name:
        save(asked.name, result, markdown(result), indent=1)
    print(json.dumps(result) if asked.json else markdown(result))
    return 0 if result["ok"] else 1


def run_straight(case: Case, folder: Path, environment: dict[str, str]) -> Straight:
    """A run of `case` from its beginning to its end."""
    begun_s = time.monotonic()
    with _started(case.command(folder), folder, environment) as process:
        while process.poll() is None and not (folder / "config.json").exists():
            time.sleep(POLL_S)
        begin_s = time.monotonic() - begun_s
        if process.wait(LONGEST_S) != 0:
            raise SystemExit(f"a run that nobody killed failed:\n{_said(folder)}")
    end_s = time.monotonic() - begun_s
    return Straight(begin_s, end_s, answer(folder), simulator_of(case.workload, case.host))


def kill_often(
    case: Case,
    straight: Straight,
    kills: int,
    generator: np.random.Generator,
    folder: Path,
    environment: dict[str, str],
    tally: Tally,
) -> None:
    """Kills runs of `case` `kills` times in all, resumes each to its end, and tallies the faults.

    A run that ends before it is killed is judged, and another one begins.
    """
    done = number = 0
    while done < kills and not tally.wrong["failed"]:
        done += kill_one(case, straight, kills - done, generator, folder / str(number), environment, tally)
        number += 1


def kill_one(
    case: Case,
    straight: Straight,
    most_kills: int,
    generator: np.random.Generator,
    folder: Path,
    environment: dict[str, str],
    tally: Tally,
) -> int:
    """The number of kills of one run, which is resumed to its end."""
    known, done, is_over = Found(), 0, False
    while not is_over:
        is_there = (folder / "config.json").exists()
        resume = [sys.executable, "-m", "rlplace", "train", "--resume", str(folder)]
        moment_s = straight.moment_s(generator) if done < most_kills else None
        command, begun_s = resume if is_there else case.command(folder), time.monotonic()
        with _started(command, folder, environment) as process:
            try:
                code = process.wait(LONGEST_S if moment_s is None else moment_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        where = f"{case.name} {folder.parent.name}/{folder.name} after {done + (code is None)} kills"
        is_over = code is not None or moment_s is None
        if is_over and code != 0:
            tally.add("failed", f"{where}: {'stuck' if code is None else f'exit code {code}'}: {_said(folder)[-400:]}")
        elif is_over and not done:
            straight.notice(time.monotonic() - begun_s)
        done += not is_over
        after = look(folder, straight.simulator)
        _compare(case, known, after, where, tally)
        if code == 0:
            _judge(case, straight, known, folder, where, tally)
        known = Found(rows=known.rows | after.rows, best=min(known.best, after.best))
    with tally.lock:
        tally.kills[case.name] += done
        tally.runs[case.name] += 1
        print(f"{case.name}: {tally.kills[case.name]} kills, {tally.runs[case.name]} runs", file=sys.stderr, flush=True)
    return done


def suspend_often(
    case: Case,
    straight: Straight,
    asked: argparse.Namespace,
    generator: np.random.Generator,
    folder: Path,
    environment: dict[str, str],
    tally: Tally,
) -> None:
    """Suspends runs of `case` as often as asked, and tallies the faults; a run that ends is followed by another."""
    if case.is_measured:  # a budget of time goes on while a run is suspended
        budget_s = MEASURED_BUDGET_S + asked.suspends * asked.suspend_s
        case = dataclasses.replace(case, options=("--budget", f"{budget_s:g}s"))
    for number in range(asked.suspends):
        left = asked.suspends - tally.suspends[case.name]
        if not left or tally.wrong["failed"]:
            return
        run, where = folder / str(number), f"{case.name} {folder.name}/{number}"
        suspends, code = suspend_one(case, straight, left, asked, generator, run, environment)
        tally.suspends[case.name] += suspends
        tally.runs[case.name] += 1
        print(f"{case.name}: {tally.suspends[case.name]} suspensions", file=sys.stderr, flush=True)
        if code != 0:
            tally.add("failed", f"{where}: exit code {code}: {_said(run)[-400:]}")
            return
        found = look(run, straight.simulator)
        _compare(case, Found(), found, where, tally)
        for row in map(json.loads, found.rows):
            if row["status"] != "ok" or max(row["samples_s"], default=0.0) >= asked.suspend_s:
                tally.add("blamed", f"{where}: {row['status']} {row['why']} {row['samples_s']}")
        if not case.is_measured:
            _judge(case, straight, found, run, where, tally)


def suspend_one(
    case: Case,
    straight: Straight,
    most: int,
    asked: argparse.Namespace,
    generator: np.random.Generator,
    folder: Path,
    environment: dict[str, str],
) -> tuple[int, int]:
    """Suspends one run at random moments; their range is the duration of a straight run, without suspensions.

    Returns:
        How often it was suspended, and its exit code.
    """
    moments_s = np.sort([straight.moment_s(generator) for _ in range(most)])
    with _started(case.command(folder), folder, environment) as process:
        for done, wait_s in enumerate(np.diff(moments_s, prepend=0.0).tolist()):
            try:
                return done, process.wait(wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGSTOP)
                time.sleep(asked.suspend_s)
                os.killpg(process.pid, signal.SIGCONT)
        try:
            return most, process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return most, process.wait()


def _compare(case: Case, known: Found, after: Found, where: str, tally: Tally) -> None:
    """Tallies what a folder lost since the last look."""
    for words in after.corrupt:
        tally.add("corrupt", f"{where}: {words}")
    if lost := known.rows - after.rows:
        tally.add("lost", f"{where}: {len(lost)} of {len(known.rows)} measurements")
    if not case.is_measured and after.best > known.best:
        tally.add("lost", f"{where}: the placement takes {after.best} s, {known.best} s before")


def _judge(case: Case, straight: Straight, known: Found, folder: Path, where: str, tally: Tally) -> None:
    """Tallies a run's end: an answer unlike the straight run's, or a best placement worse than one before."""
    if not case.is_measured:
        for name, found in answer(folder).items():
            if found != straight.answer[name]:
                tally.add("different", f"{where}: {name}")
        return
    ratio = final_ratio(folder) / known.best
    with tally.lock:
        tally.worst_ratio = max(tally.worst_ratio, ratio)
    if ratio > TOLERANCE:
        tally.add("lost", f"{where}: the final best is {ratio:.2f} times the best known before")


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    kinds = ", ".join(
        f"{count} of {name} runs ({result['runs_by_kind'][name]} of them, {result['straight_s'][name]:.0f} s each)"
        for name, count in result["kills_by_kind"].items()
    )
    lines = [
        "# Runs that were killed, and went on",
        "",
        as_markdown(result),
    ]
    if result["kills"]:
        lines += [
            f"{result['kills']} times SIGKILL to a run with all its processes, at moments drawn over that of a",
            "straight run, then `rlplace train --resume`, killed again up to three times:",
            f"{kinds}; {result['seconds'] / 60:.0f} minutes.",
            "",
        ]
    if result["suspends_by_kind"]:
        suspends = ", ".join(f"{count} of {name} runs" for name, count in result["suspends_by_kind"].items())
        lines += [
            f"SIGSTOP to a run with all its processes, and SIGCONT {result['suspend_s']:g} s later, at such moments:",
            f"{suspends}.",
            "",
        ]
    lines += [
        "| measurements or best placements lost | corrupt files | simulated answers that differ | blamed | failed |",
        "|---|---|---|---|---|",
        f"| {result['lost']} | {result['corrupt']} | {result['different']} | {result['blamed']} | {result['failed']} |",
        "",
    ]
    if result["worst_ratio"]:
        ratio = f"{result['worst_ratio']:.2f}"
        lines += [
            f"Over the best placement known before a kill, the final best of a measured run took {ratio} at most,",
            "both as ratios to the best single device, measured in races of their own.",
            "",
        ]
    lines += [f"- {kind}: {each}" for kind, words in result["what"].items() for each in words]
    return "\n".join(lines).rstrip("\n") + "\n"


def _started(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a group of its own; its stderr goes into a file beside the run folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _log(folder).open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _said(folder: Path) -> str:
    return _log(folder).read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main())
