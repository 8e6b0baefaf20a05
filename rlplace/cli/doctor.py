"""`rlplace doctor`: whether this machine and this installation are fit for placing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlplace.cli.arguments import print_json
from rlplace.say import say


def doctor(json: bool = False) -> None:
    """Check this machine and this installation: what works, what is missing, what would disturb measuring.

    It takes a few seconds, changes nothing and asks no server. The exit code is 1 where a check failed.

    Args:
        json: print one JSON object on stdout
    """
    from rlplace import __version__
    from rlplace.runs.doctor import CHECKS, System, run_checks, worst

    findings = run_checks(System(), CHECKS)
    facts = {
        "schema": 1,
        "rlplace": __version__,
        "verdict": worst(findings),
        "checks": [asdict(finding) for finding in findings],
    }
    if json:
        print_json(facts)
    else:
        _show(facts)
    if facts["verdict"] == "fail":
        raise SystemExit(1)


def _show(facts: dict[str, Any]) -> None:
    from rlplace.report.console import CleanConsole
    from rlplace.report.printed import doctor_table

    CleanConsole(stderr=True, highlight=False, emoji=False).print(doctor_table(facts["checks"]))
    verdicts = [row["verdict"] for row in facts["checks"]]
    warnings = "1 warning" if verdicts.count("warn") == 1 else f"{verdicts.count('warn')} warnings"
    say(f"{len(verdicts)} findings: {verdicts.count('fail')} failed, {warnings}")
