"""What was run: a command that runs it again, every setting, and the files of the run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rlplace.report.format import format_clock
from rlplace.report.html.escape import escaped, prose
from rlplace.report.html.run_data import RunData, Seconds
from rlplace.report.html.tags import Raw, Section, details, table
from rlplace.say import clean

_MOST_SETTINGS, _MOST_DEPTH = 400, 8
_LEAST_S = 0.5


def what_was_run_section(data: RunData) -> Section:
    """The last section of every page."""
    settings = list(_flat(data.config, ""))[:_MOST_SETTINGS]
    lead = "The same again; the rest of the settings are the program's own, listed below as they were."
    body = f'<pre class="command">{prose(command(data.config))}</pre>'
    body += _durations(data.durations)
    body += details(f"{len(settings)} settings", table(["setting", "value"], settings))
    if data.files:
        links = [[Raw(f'<a href="{escaped(name)}">{escaped(name)}</a>')] for name in data.files]
        body += details("Files of the run, beside this page", table(["file"], links))
    return Section("run", "What was run", lead, body)


def command(config: Mapping[str, Any]) -> str:
    """A command line that asks for the same run; for a shell, whatever the workload is called.

    Example:
        >>> command({"workload": "nmt", "host": "cores", "train": {"budget_s": 90.0, "seed": 3}})
        'rlplace train nmt --host cores --budget 90s --seed 3'
    """
    train = _object(config.get("train"))
    search, learn = _object(train.get("search")), _object(train.get("learn"))
    cut = _object(config.get("micro_batches"))
    words = ["rlplace", "train", config.get("workload", "WORKLOAD"), "--host", config.get("host", "auto")]
    if isinstance(train.get("budget_s"), int | float):
        words += ["--budget", f"{train['budget_s']:g}s"]
    if "seed" in train:
        words += ["--seed", train["seed"]]
    if config.get("workload_seed"):
        words += ["--workload-seed", config["workload_seed"]]
    if search.get("method"):
        words += ["--method", search["method"]]
    if search.get("method") == "policy" and learn.get("policy"):
        words += ["--policy", learn["policy"]]
    if config.get("gangs") is True:
        words.append("--gangs")
    if cut.get("count") not in (None, 1):
        words += ["--micro-batches", cut["count"]]
    return shlex.join(clean(word) for word in words)


def _durations(durations: Seconds) -> str:
    """A row for each part that took time, or was expected to; empty where nothing is known."""
    parts = [name for name in {**durations.expected, **durations.taken} if _some(durations, name)]
    rows = [
        [
            name.removesuffix("_s"),
            *(format_clock(known.get(name, 0.0)) for known in (durations.expected, durations.taken)),
        ]
        for name in parts
    ]
    return table(["part of the run", "expected, m:ss", "taken, m:ss"], rows, numbers=(1, 2)) if rows else ""


def _some(durations: Seconds, name: str) -> bool:
    return any(known.get(name, 0.0) >= _LEAST_S for known in (durations.expected, durations.taken))


def _flat(value: object, path: str, depth: int = 0) -> Iterator[list[object]]:
    """`a.b` and the value, for every value of nested objects."""
    if isinstance(value, Mapping) and depth < _MOST_DEPTH:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, Mapping | list):
        yield [path, ", ".join(map(str, value)) or "none"]
    else:
        yield [path, "none" if value is None else value]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
