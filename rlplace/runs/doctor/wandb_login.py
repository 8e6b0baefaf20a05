"""Check of Weights & Biases: whether runs can be tracked, without a network call and without showing a key."""

from __future__ import annotations

import netrc
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rlplace.runs.doctor.check import Finding
from rlplace.runs.doctor.requirements import requirement_of
from rlplace.runs.doctor.system import System

SERVER = "https://api.wandb.ai"


def check_wandb(system: System) -> Iterator[Finding]:
    """Whether wandb is installed, in which mode, and whether the user is logged in."""
    wanted, version = requirement_of(system, "wandb"), system.version_of("wandb")
    install = f"pip install '{wanted.words}', or leave --track disabled, as it is by default"
    if not version:
        yield Finding("wandb", "warn", "not installed", install)
        return
    if not wanted.is_met_by(version):
        yield Finding("wandb", "warn", f"{version}; rlplace needs {wanted.words}", install)
        return
    server = system.environ.get("WANDB_BASE_URL") or SERVER
    found = f"{version}, WANDB_MODE {system.environ.get('WANDB_MODE', 'not set')} (--track decides)"
    if is_logged_in(system, server):
        yield Finding("wandb", "ok", f"{found}, logged in to {server}")
    else:
        yield Finding("wandb", "ok", f"{found}, not logged in", "`wandb login` for --track online; offline needs none")


def is_logged_in(system: System, server: str) -> bool:
    """Whether there is a key for that server: in the environment, or in the file where `wandb login` leaves it."""
    if system.environ.get("WANDB_API_KEY"):
        return True
    named = system.environ.get("NETRC")
    paths = [Path(named)] if named else [system.home() / name for name in (".netrc", "_netrc")]
    for path in paths:
        try:
            if netrc.netrc(path).authenticators(urlsplit(server).netloc):
                return True
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError):  # its message may hold a key: say nothing of it
            continue
    return False
