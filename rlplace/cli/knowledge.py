"""Commands on knowledge that several runs share: measurements, hosts and workloads.

`measurements`: lists, exports or prunes the measurements of this machine. `hosts`: lists the machines to place on.
`workloads`: lists the models to place. `doctor`: checks this machine and this installation.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rlplace.cli.option_groups import answer, parse_duration, print_json
from rlplace.errors import InvalidValue, refuse_if
from rlplace.measure import resolve_host
from rlplace.records import shortened
from rlplace.say import clean, counted, format_seconds, print_result

if TYPE_CHECKING:
    from rlplace.store import Filter, StoredMeasurement

MOST_LETTERS = 40
"""Of a text in the table."""
MOST_LISTED = 50
"""Of all measurements, where no limit is given."""
OPTIONS = {"list": {"limit"}, "export": {"format", "out"}, "prune": {"all", "dry-run"}}
"""Options of one action alone: `prune --limit 3` must not forget everything that a list of three would have shown."""


def measurements(
    action: tyro.conf.Positional[Literal["list", "export", "prune"]] = "list",
    store: str = "auto",
    workload: str = "",
    graph: str = "",
    host: str = "",
    status: str = "",
    older_than: str = "",
    newer_than: str = "",
    most: Annotated[int | None, tyro.conf.arg(name="limit")] = None,
    form: Annotated[str | None, tyro.conf.arg(name="format")] = None,
    out: Path | None = None,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """List, export or prune the measurements of this machine.

    Args:
        action: list the latest, export all of them as a table, or prune (forget) those that the options mean
        store: auto (the one in your cache folder), a file, or a run folder
        workload: only these: a pattern of the workload's name, such as 'nmt*'
        graph: only these: how the graph's fingerprint begins
        host: only these: a pattern of the host's name, or how its fingerprint begins
        status: only these: ok, oom, error or timeout
        older_than: only those taken so long ago or longer, such as 12h or 30d
        newer_than: only those taken so long ago or later
        most: measurements that are listed, the latest (50 where nothing is said)
        form: of an export: csv, json or parquet; by default as the file's name says, else csv
        out: the file of an export; by default stdout
        every: prune everything, also the host models
        dry_run: only count, prune nothing
        json: print one JSON object on stdout
    """
    from rlplace.store import Filter
    from rlplace.store.log import OFF, store_path

    older_s, newer_s = (
        parse_duration(text, option) if text else None
        for option, text in (("older-than", older_than), ("newer-than", newer_than))
    )
    chosen = Filter(workload, graph, host, status, older_s, newer_s)
    path = store_path(store)
    if path is None:
        raise InvalidValue("store", OFF, "auto, a file or a run folder", where="measurements")
    refuse_if(most is not None and most < 1, "limit", most, "at least 1", where="measurements")
    given = {"limit": most, "format": form, "out": out and str(out), "all": every or None, "dry-run": dry_run or None}
    for option, value in given.items():
        owner = next((other for other, options in OPTIONS.items() if option in options), action)
        refuse_if(
            value is not None and owner != action,
            option,
            value,
            f"no such option of `{action}`",
            where="measurements",
            hint=f"`--{option}` is an option of `{owner}`.",
        )
    if action == "list":
        _list(path, chosen, MOST_LISTED if most is None else most, json)
    elif action == "export":
        _export(path, chosen, form, out, json)
    else:
        _prune(path, chosen, every, dry_run, json)


def _list(path: Path, chosen: Filter, most: int, json: bool) -> None:
    from itertools import islice

    from rlplace.store import MeasurementStore

    with MeasurementStore.read(path) as store:
        count, rows = store.count(chosen), list(islice(store.measurements(chosen), most))
    if not json:
        _show(rows)
    result = {"schema": 1, "store": str(path), "count": count, "measurements": [row.to_dict() for row in rows]}
    answer(result, f"{path}: {counted(count, 'measurement')}{f', the latest {most}' * (count > most)}", json)


def _export(path: Path, chosen: Filter, form: str | None, out: Path | None, json: bool) -> None:
    from rlplace.store import MeasurementStore
    from rlplace.store.rows import FORMATS, format_of, write_table

    kind = format_of(form, out)
    if json and out is None:
        raise InvalidValue(
            "json", True, "a file for the table", where="measurements", hint="Give --out FILE, or --format json."
        )
    with MeasurementStore.read(path) as store:
        rows = list(store.measurements(chosen))
    if out is None:
        sys.stdout.buffer.write(FORMATS[kind](rows))
        sys.stdout.buffer.flush()
        return
    write_table(rows, out, kind)
    result = {"schema": 1, "store": str(path), "out": str(out), "format": kind, "count": len(rows)}
    answer(result, f"{out}: {counted(len(rows), 'measurement')}", json)


def _prune(path: Path, chosen: Filter, every: bool, dry_run: bool, json: bool) -> None:
    from rlplace.store import MeasurementStore

    refuse_if(
        chosen.is_empty and not every,
        "what to prune",
        "everything",
        "an option that says which",
        where="measurements",
        hint="For example: rlplace measurements prune --older-than 30d. Everything: --all.",
    )
    refuse_if(every and not chosen.is_empty, "all", True, "no other option that says which", where="measurements")
    is_read = dry_run or not path.exists()
    with MeasurementStore.read(path) if is_read else MeasurementStore.open(path) as store:
        count = store.count(chosen) if is_read else store.prune(chosen)
    result = {"schema": 1, "store": str(path), "pruned": 0 if dry_run else count, "matched": count}
    answer(result, f"{path}: {count} measurement{'s' * (count != 1)} {'would be ' * dry_run}forgotten", json)


def _show(rows: list[StoredMeasurement]) -> None:
    from rlplace.report.console import plain_table, show

    def cells(row: StoredMeasurement) -> list[str]:
        outcome = row.measurement
        step = format_seconds(outcome.step_time_s) if outcome.ok else ""
        ratio = f"{outcome.ratio:.3f}" if outcome.ok and row.reference_s > 0 else ""
        taken = time.strftime("%m-%d %H:%M", time.localtime(row.taken_s))
        words = (taken, row.workload, row.host_name, row.graph[:8], row.plan[:8], row.status, step, ratio, row.why)
        return [shortened(clean(word), MOST_LETTERS) for word in words]  # a store may be a stranger's

    columns = ("<taken", "workload", "<host", "<graph", "<plan", "<status", "<step", "<ratio", "why")
    show(plain_table(columns, map(cells, rows), box=None, padding=(0, 1, 0, 0), pad_edge=False))


def hosts(name: tyro.conf.Positional[str] = "", json: bool = False) -> None:
    """List the words for this machine and the presets, or show one host.

    Args:
        name: a word for this machine (`auto`, `cores`, `cuda/2`, ...), a preset or a host file; empty lists them
        json: print one JSON object on stdout; that of one host is a host file
    """
    from rlplace.measure.hosts.host_file import host_to_dict
    from rlplace.measure.hosts.resolve import AS_PROCESSES, HOST_WORDS, describe_hosts

    if name:
        host = resolve_host(name)
        result = host_to_dict(host)
        lines = [f"{one.name:12} {one.kind:28} {one.memory_bytes / 2**30:8.1f} GiB" for one in host.devices]
        lines += [
            f"{one.name:28} {one.bandwidth_bytes_per_s / 1e9:8.1f} GB/s {one.latency_s * 1e6:8.1f} us"
            for one in host.links
        ]
    else:
        rows = describe_hosts()
        result = {"schema": 1, "words": HOST_WORDS, "hosts": rows}
        kinds = [", ".join(f"{count} x {kind}" for kind, count in row["kinds"].items()) for row in rows]
        names = [*HOST_WORDS, *(row["name"] for row in rows)]
        lines = [f"{name:18} {words}" for name, words in zip(names, (*HOST_WORDS.values(), *kinds), strict=True)]
        lines += [f"{f'PRESET{AS_PROCESSES}':18} the same devices, a process each: none waits for another's launches"]
    answer(result, "\n".join(lines), json)


def doctor(json: bool = False) -> None:
    """Check this machine and this installation: working parts, missing parts, and causes of noisy measurements.

    It takes a few seconds, changes nothing and asks no server. The exit code is 1 where a check failed.

    Args:
        json: print one JSON object on stdout
    """
    from rlplace import __version__
    from rlplace.doctor import CHECKS, System, run_checks, worst
    from rlplace.report.console import doctor_table, show

    findings = run_checks(System(), CHECKS)
    facts: dict[str, Any] = {
        "schema": 1,
        "rlplace": __version__,
        "verdict": worst(findings),
        "checks": [asdict(finding) for finding in findings],
    }
    if json:
        print_json(facts)
    else:
        show(doctor_table(facts["checks"]))
        verdicts = Counter(finding.verdict for finding in findings)
        print_result(f"{len(findings)} findings: {verdicts['fail']} failed, {counted(verdicts['warn'], 'warning')}")
    if facts["verdict"] == "fail":
        raise SystemExit(1)


def workloads(json: bool = False) -> None:
    """List the named workloads: their sizes, options, and counts of ops and edges of a training step.

    Args:
        json: print one JSON object on stdout
    """
    from rlplace.workloads import describe_workloads

    rows = describe_workloads()
    if json:
        print_json({"schema": 1, "workloads": rows})
        return
    for row in rows:
        if row["problem"]:
            print_result(f"{row['name']:13} {row['problem']}")
            continue
        for size in ("small", "paper"):
            options = ",".join(f"{key}={str(value).lower()}" for key, value in row[size].items())
            counts = row["counts"].get(size)
            counted = f"{counts['num_ops']:7,} ops {counts['num_edges']:7,} edges" if counts else f"{'not counted':>25}"
            print_result(f"{row['name']:13} {size:6} {counted}  {options}")
        if not row["is_installed"]:
            print_result(f"{'':13} needs pip install 'rlplace[{row['extra']}]'")
    own = "your own: package.module:function, or a graph file"
    print_result(f"several as one: multi:NAME[@...][*WEIGHT],NAME,...; {own}")
