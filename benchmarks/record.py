"""What every committed result carries: date, hardware, versions and the exact command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def record(*packages: str) -> dict[str, Any]:
    """Date, hardware, versions of rlplace, Python and `packages`, and the command that is running."""
    names = ("rlplace", "torch", "numpy", "numba", *packages)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}},
        "command": shlex.join(["python", *_relative(sys.argv)]),
    }


def as_markdown(facts: dict[str, Any]) -> str:
    """The record as a paragraph, with each of its `commands` where there were several."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commands = "".join(f"    {command}\n" for command in facts.get("commands") or [facts["command"]])
    return f"Measured on {facts['date']} on {facts['hardware']}; {versions}.\n\n{commands}"


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{named.get('vendor_id', platform.machine())} family {named.get('cpu family', '?')}"


def _relative(argv: list[str]) -> list[str]:
    root = Path(__file__).resolve().parent.parent
    script = Path(argv[0]).resolve()
    return [str(script.relative_to(root)) if script.is_relative_to(root) else script.name, *argv[1:]]
