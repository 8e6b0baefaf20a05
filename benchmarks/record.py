"""What the scripts share: arguments, tables, and what every committed result carries: date, hardware, the command."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlplace
from rlplace.errors import RlplaceError, UserError
from rlplace.files import write_json_atomic, write_text_atomic

RESULTS = Path(__file__).parent / "results"


def record(*packages: str) -> dict[str, Any]:
    """Date, hardware, versions of rlplace, Python and `packages`, and the command that is running."""
    names = ("torch", "numpy", "numba", *packages)
    versions = {name: importlib.metadata.version(name) for name in names}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        "versions": {"python": platform.python_version(), "rlplace": rlplace.__version__, **versions},
        "command": shlex.join(["python", *_relative(sys.argv)]),
    }


def as_markdown(facts: dict[str, Any]) -> str:
    """The record as a paragraph, with each of its `commands` where there were several."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commands = "".join(f"    {command}\n" for command in facts.get("commands") or [facts["command"]])
    return f"Measured on {facts['date']} on {facts['hardware']}; {versions}.\n\n{commands}"


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An argument for `parse`, as `ArgumentParser.add_argument` takes it."""
    return names, options


def parse(
    description: str | None,
    *arguments: tuple[tuple[str, ...], dict[str, Any]],
    words: Sequence[str] | None = None,
    prog: str | None = None,
) -> argparse.Namespace:
    """The values of a script's arguments, from `words` or the command line."""
    parser = argparse.ArgumentParser(
        prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for names, options in arguments:
        parser.add_argument(*names, **options)
    return parser.parse_args(words)


@contextmanager
def mistakes_in_a_line(program: str) -> Iterator[None]:
    """Ends the program with one line, and with 2 for a mistake of the user, as `rlplace` does."""
    try:
        yield
    except RlplaceError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def table(*rows: Iterable[object]) -> str:
    """A Markdown table; its first row is the head."""
    head, *body = (f"| {' | '.join(map(str, row))} |\n" for row in rows)
    return "".join((head, "|", "---|" * (head.count(" | ") + 1), "\n", *body))


def save(path: str | Path, result: Mapping[str, Any], page: str, *, indent: int | None = 2) -> None:
    """Writes `PATH.json` and `PATH.md`; a path that is not absolute is one in `results/`."""
    write_json_atomic(f"{RESULTS / path}.json", result, indent=indent)
    write_text_atomic(f"{RESULTS / path}.md", page)


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{named.get('vendor_id', platform.machine())} family {named.get('cpu family', '?')}"


def _relative(argv: list[str]) -> list[str]:
    root = Path(__file__).resolve().parent.parent
    script = Path(argv[0]).resolve()
    return [str(script.relative_to(root)) if script.is_relative_to(root) else script.name, *argv[1:]]
