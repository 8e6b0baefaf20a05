"""`rlplace hosts`: the machines to place on.

`rlplace doctor`: whether this machine and this installation are fit for placing.

`rlplace workloads`: the models to place.

`rlplace bench`: how fast rlplace itself is.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tyro

from rlplace.cli.option_groups import print_json
from rlplace.say import counted, say


def hosts(name: tyro.conf.Positional[str] = "", json: bool = False) -> None:
    """List the words for this machine and the presets, or show one host.

    Args:
        name: a word for this machine (`auto`, `cores`, `cuda/2`, ...), a preset or a host file; empty lists them
        json: print one JSON object on stdout; that of one host is a host file
    """
    from rlplace.measure import resolve_host
    from rlplace.measure.hosts.host_file import host_to_dict
    from rlplace.measure.hosts.resolve import HOST_WORDS, describe_hosts

    if name:
        host = resolve_host(name)
        if json:
            print_json(host_to_dict(host))
            return
        for device in host.devices:
            say(f"{device.name:12} {device.kind:28} {device.memory_bytes / 2**30:8.1f} GiB")
        for link in host.links:
            say(f"{link.name:28} {link.bandwidth_bytes_per_s / 1e9:8.1f} GB/s {link.latency_s * 1e6:8.1f} us")
        return
    rows = describe_hosts()
    if json:
        print_json({"schema": 1, "words": HOST_WORDS, "hosts": rows})
        return
    for word, meaning in HOST_WORDS.items():
        say(f"{word:18} {meaning}")
    for row in rows:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in dict(row["kinds"]).items())  # type: ignore[call-overload]
        say(f"{row['name']:18} {kinds}")


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
        verdicts = [finding.verdict for finding in findings]
        warnings = counted(verdicts.count("warn"), "warning")
        say(f"{len(verdicts)} findings: {verdicts.count('fail')} failed, {warnings}")
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
            say(f"{row['name']:13} {row['problem']}")
            continue
        for size in ("small", "paper"):
            options = ",".join(f"{key}={str(value).lower()}" for key, value in row[size].items())
            counts = row["counts"].get(size)
            counted = f"{counts['num_ops']:7,} ops {counts['num_edges']:7,} edges" if counts else f"{'not counted':>25}"
            say(f"{row['name']:13} {size:6} {counted}  {options}")
        if not row["is_installed"]:
            say(f"{'':13} needs pip install 'rlplace[{row['extra']}]'")
    say("several as one: multi:NAME[@...][*WEIGHT],NAME,...; your own: package.module:function, or a graph file")


def bench(subject: tyro.conf.Positional[str] = "simulator", quick: bool = False, json: bool = False) -> None:
    """Time rlplace itself.

    Args:
        subject: simulator
        quick: fewer sizes
        json: print one JSON object on stdout
    """
    from rlplace.errors import UnknownName

    if subject != "simulator":
        raise UnknownName("benchmark", subject, ("simulator",))
    from rlplace.measure.simulate.bench_simulator import bench_simulator

    result = bench_simulator(is_quick=quick, on_row=lambda row: say(str(row)))
    if json:
        print_json({"schema": 1, **result})
